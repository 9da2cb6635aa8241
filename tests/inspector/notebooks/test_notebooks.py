"""The widget of `nc.inspect` in the notebooks that people use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from inspector_page import InspectorPage, visible

import nucleate as nc
from nucleate.tokenization.tokenizer import token_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

GIVEN = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 7}  # as in conftest.WIDGET


def shown_tokens(llm: nc.LLM, **values: float) -> list[str]:
    """The tokens that the library generates, as the ribbon shows them."""
    [completion] = llm.generate("Once upon a time", **GIVEN | values)
    return [visible(token_text(llm.tokenizer, token)) for token in completion.outputs[0].token_ids]


def use(inspector: InspectorPage, llm: nc.LLM) -> None:
    """Read the ladder, walk, move a slider, and generate: the kernel answers."""
    inspector.ribbon.locator("[data-step='23']").wait_for()
    assert inspector.tokens() == shown_tokens(llm)
    ladder = inspector.root.locator("table.nci-ladder tbody")
    ladder.wait_for()
    inspector.root.locator("[data-step='4']").click()
    inspector.root.locator("caption", has_text="Step 4:").wait_for(state="attached")
    before = inspector.ladder()
    assert [before[0].name, before[0].kept, before[-1].name] == ["logits", "4,096", "gumbel"]
    inspector.slider("temperature").fill("1.6")
    ladder.locator(".nci-values", has_text="1.6").wait_for()
    assert inspector.ladder()[0] == before[0]
    assert inspector.ladder()[1].entropy > before[1].entropy
    expected = shown_tokens(llm, temperature=1.6)
    inspector.root.get_by_role("button", name="Generate with these settings").click()
    last = inspector.ribbon.locator(f"[data-step='{len(expected) - 1}']")
    last.filter(has_text=expected[-1].strip()).wait_for()
    inspector.root.get_by_text("Finish reason: length").wait_for()
    assert inspector.tokens() == expected


def test_the_widget_in_jupyterlab(page: Page, jupyterlab: str, llm: nc.LLM) -> None:
    page.goto(jupyterlab)
    cell = page.locator(".jp-CodeCell").first
    cell.locator(".cm-content").click()
    page.get_by_text("| Idle").wait_for()
    page.keyboard.press("Shift+Enter")
    use(InspectorPage(page, page.locator(".nci").first), llm)


def test_the_widget_in_marimo(page: Page, marimo: str, llm: nc.LLM) -> None:
    page.goto(marimo)
    use(InspectorPage(page, page.locator(".nci").first), llm)
