"""The inspector's page as a person uses it: typing, walking, sliding, reading the ladder."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Download, Locator, Page, Request

TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
DIGITS = re.compile(r"[−-]?[\d,]+(?:\.(\d+))?(?:e([−-]?\d+))?")


class Row(NamedTuple):
    """A row of the ladder: its numbers as they are shown, and a cell per column; None where a token is gone."""

    name: str
    kept: str
    entropy: str
    removed: str
    kl: str
    others: str
    cells: list[str | None]


class InspectorPage:
    """The inspector in a browser page. root: the element that holds it."""

    def __init__(self, page: Page, root: Locator | None = None) -> None:
        self.page = page
        self.root = page.locator(".nci").first if root is None else root
        self._in_flight: set[Request] = set()
        page.on("request", self._started)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)

    def open(self, url: str, link: Mapping[str, Any] | None = None) -> None:
        """Open the page of a server, and wait for its first output. link: the contents of a link's hash."""
        self.page.goto(f"{url}/inspector{'' if link is None else hash_of(link)}")
        self.root.locator("[data-step]").first.wait_for()
        self.settle()

    def settle(self) -> None:
        """Wait until all requests of the page are answered and the answers are shown."""
        while True:
            self.page.evaluate(TWO_FRAMES)
            if not self._in_flight:
                return
            self.page.wait_for_timeout(5)

    def _started(self, request: Request) -> None:
        if "/inspector/api/" in request.url:
            self._in_flight.add(request)

    def _ended(self, request: Request) -> None:
        self._in_flight.discard(request)

    @property
    def generate_button(self) -> Locator:
        return self.root.get_by_role("button", name="Generate", exact=True)

    @property
    def ribbon(self) -> Locator:
        return self.root.get_by_role("listbox")

    def generate(self, prompt: str, **values: int | str) -> None:
        """Type a prompt and the values of request fields, generate, and wait for the end."""
        self.root.get_by_label("Prompt", exact=True).fill(prompt)
        for name, value in values.items():
            self.field(name).fill(str(value))
            self.field(name).blur()
        self.generate_button.click()
        self.settle()

    def field(self, name: str) -> Locator:
        """The input of a request field (seed, max_tokens, stop) or of a parameter."""
        return self.root.locator(f"[data-key={name}]")

    def slider(self, name: str) -> Locator:
        return self.root.get_by_role("slider", name=name, exact=True)

    def add_stage(self, name: str) -> None:
        self.root.locator("button.nci-add", has_text=re.compile(rf"^{name}")).click()

    def tab(self, name: str) -> None:
        self.root.get_by_role("tab", name=name).click()

    def tokens(self) -> list[str]:
        """The visible tokens of the output, as they are shown."""
        return [text.replace("\u00a0", " ") for text in self.root.locator("[data-step]").all_text_contents()]

    def step(self) -> int:
        """The chosen step."""
        return int(self.root.get_by_label("Step", exact=True).input_value())

    def go(self, step: int) -> None:
        """Choose a step, and wait for its ladder."""
        self.root.locator(f"[data-step='{step}']").click()
        self.settle()
        assert self.step() == step

    def stages(self) -> list[str]:
        """The stages with a card, in order."""
        cards = self.root.locator("[data-stage]:visible").all()
        return [card.get_attribute("data-stage") or "" for card in cards]

    def columns(self) -> list[int]:
        """The token ids of the ladder's columns."""
        heads = self.root.locator("table.nci-ladder thead button[data-key^=token-]")
        return [int(key.removeprefix("token-")) for key in heads.evaluate_all("all => all.map((x) => x.dataset.key)")]

    def ladder(self) -> list[Row]:
        """The rows of the ladder."""
        found = self.root.locator("table.nci-ladder tbody tr").evaluate_all(
            """rows => rows.map((row) => {
                const text = (selector) => [...row.querySelectorAll(selector)].map((x) => x.textContent);
                const cell = (x) => x.querySelector(".nci-winner, .nci-p")?.textContent ?? null;
                const name = row.querySelector(".nci-stage-name").firstChild.textContent;
                return [name, ...text("td.nci-number"), [...row.querySelectorAll("td.nci-col")].map(cell)];
            })"""
        )
        return [Row(*row) for row in found]

    def picked(self) -> str:
        """The token that the same noise picks under the settings, as it is shown."""
        return self.root.locator(".nci-chip", has_text="same noise").locator(".nci-token").inner_text()

    def menu(self, item: str) -> Locator:
        """Open the menu, and return one of its items."""
        self.root.locator("summary", has_text="Save and share").click()
        return self.root.locator(".nci-menu-item", has_text=item)

    def save(self, item: str, folder: Path) -> Path:
        """Choose an item of the menu that downloads a file, and return the file."""
        with self.page.expect_download() as waiting:
            self.menu(item).click()
        download: Download = waiting.value
        path = folder / download.suggested_filename
        download.save_as(path)
        return path

    def code(self, language: str) -> str:
        """The program that the menu shows."""
        self.menu(language).click()
        text = self.root.locator("dialog[open] pre").text_content()
        self.page.keyboard.press("Escape")
        assert text is not None
        return text


def hash_of(contents: Mapping[str, Any]) -> str:
    """The hash of a link with a prompt and parameters."""
    return f"#s={base64.urlsafe_b64encode(json.dumps(contents).encode()).decode().rstrip('=')}"


def visible(text: str) -> str:
    """The text of a token as the ribbon shows it."""
    signs = {"\n": "↵", "\t": "→"}
    return "".join(signs.get(c, "�" if ord(c) < 32 or 127 <= ord(c) < 160 else c) for c in text) or "∅"


def agrees(shown: str, value: float) -> bool:
    """Whether a shown number or percentage is a value, rounded to the digits that are shown.

    The float32 logits of one pass over a text and of a step after the other differ in their last bits.
    """
    if shown.endswith("%"):
        value *= 100
        shown = shown[:-1]
    if shown.startswith(">"):
        return float(shown[1:]) < value < 100
    found = DIGITS.fullmatch(shown)
    assert found is not None, f"{shown!r} is not a number"
    unit = 10.0 ** (int((found[2] or "0").replace("−", "-")) - len(found[1] or ""))
    exact = float(shown.replace("−", "-").replace(",", ""))
    return abs(exact - value) <= 0.5 * unit + 5e-5 * abs(value)
