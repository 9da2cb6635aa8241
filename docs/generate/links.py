"""Finds the links of Markdown pages, outside of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from generate import ROOT

CODE = re.compile(r"^(```|~~~).*?^\1|``.*?``|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
SKIPPED = {".venv", "node_modules", "build", "site"}


def prose(text: str) -> str:
    """Return a page with its code replaced by spaces, so that positions stay the same."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the relative links: group 1 is the path, group 2 the anchor with its #."""
    return LINK.finditer(prose(text))


def replace_links(text: str, replace: Callable[[str, str], str]) -> str:
    """Return a page with other links. replace: gets the path and the anchor of a link, and returns both."""
    parts, end = [], 0
    for found in links(text):
        parts += [text[end : found.start()], replace(found[1], found[2] or "")]
        end = found.end()
    return "".join([*parts, text[end:]])


def broken_links() -> list[str]:
    """Return every relative link of the repository to a file that does not exist. The site also checks anchors."""
    pages = [path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts)]
    return [
        f"{path.relative_to(ROOT)}: {found[1]}"
        for path in pages
        for found in links(path.read_text("utf-8"))
        if not (path.parent / found[1]).exists()
    ]
