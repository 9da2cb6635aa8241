"""axe-core, and whether a page is wider than its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chromium import unavailable

if TYPE_CHECKING:
    from playwright.sync_api import Page

SETTLED = """() => {
    const finite = document.getAnimations().filter((each) => isFinite(each.effect.getComputedTiming().endTime));
    return Promise.allSettled(finite.map((each) => each.finished));
}"""


class Axe:
    """axe-core in a page."""

    def __init__(self, page: Page) -> None:
        try:
            from axe_playwright_python.sync_playwright import Axe as Script
        except ImportError:
            unavailable("axe-core is not installed: make setup")
        self._page = page
        page.evaluate(Script().axe_script)

    def violations(self, part: str = "html", rules: Sequence[str] | None = None) -> list[str]:
        """What is wrong in a part of the page, with the elements, after transitions. rules: check these only."""
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        run = "async ([part, options]) => (await axe.run(part, options)).violations"
        self._page.evaluate(SETTLED)
        found = self._page.evaluate(run, [part, options])
        return [f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:3]]}" for each in found]


def width_beyond(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return int(page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth"))
