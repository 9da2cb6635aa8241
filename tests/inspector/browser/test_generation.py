"""Generate in the page: type, stream, walk, stop; text is shown as text."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from inspector_page import InspectorPage, visible
from server_process import Server

import nucleate as nc
from nucleate.tokenization.tokenizer import token_text

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

FIRST_PARAMS = {"temperature": 0.9, "top_p": 0.95}
LONG = {"seed": 11, "max_tokens": 400, "min_tokens": 400}
IMAGE = "<img src=x onerror='window.attacked=1'><script>window.attacked=1</script>"
RECORD_SUMMARIES = """() => {
  window.summaries = new Set();
  const record = () => {
    window.summaries.add(document.querySelector(".nci-summary").textContent);
    requestAnimationFrame(record);
  };
  record();
}"""

ESCAPE_WHEN_STREAMING = """(generate) => new Promise((done) => {
  generate.click();
  const poll = () => {
    const text = document.querySelector(".nci-summary").textContent;
    if (!/^tokens [1-9].*generating/.test(text)) return requestAnimationFrame(poll);
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    done();
  };
  requestAnimationFrame(poll);
})"""


def shown_tokens(llm: nc.LLM, prompt: str, **values: Any) -> list[str]:
    """The tokens that the library generates, as the ribbon shows them."""
    [completion] = llm.generate(prompt, **values)
    return [visible(token_text(llm.tokenizer, token)) for token in completion.outputs[0].token_ids]


def test_the_first_visit_shows_an_inspected_story(inspector: InspectorPage) -> None:
    assert len(inspector.tokens()) == 60
    rows = inspector.ladder()
    assert [rows[0].name, rows[-1].name] == ["logits", "gumbel"]
    assert rows[0].kept == "4,096"
    assert inspector.stages()


def test_a_typed_prompt_streams_its_output(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.page.evaluate(RECORD_SUMMARIES)
    inspector.add_stage("min_tokens")
    inspector.generate("The little dog", **LONG)
    expected = shown_tokens(llm, "The little dog", **FIRST_PARAMS, **LONG)
    inspector.ribbon.press("Home")
    inspector.settle()
    shown = inspector.tokens()  # those of the visible lines
    assert len(shown) > 40
    assert shown == expected[: len(shown)]
    summaries = inspector.page.evaluate("() => [...window.summaries]")
    counts = {
        int(found[1]) for text in summaries if "generating" in text and (found := re.search(r"tokens (\d+)", text))
    }
    assert len(counts) > 2
    assert max(counts) <= len(expected)


def test_a_walk_with_keys_and_clicks(inspector: InspectorPage) -> None:
    inspector.generate("Once upon a time", seed=5, max_tokens=50)
    inspector.go(3)
    last = len(inspector.tokens()) - 1
    for key, step in (("ArrowRight", 4), ("ArrowLeft", 3), ("End", last), ("ArrowRight", last), ("Home", 0)):
        inspector.ribbon.press(key)
        inspector.settle()
        chosen = inspector.ribbon.locator("[aria-selected=true]")
        assert chosen.get_attribute("data-step") == str(step)
        assert inspector.ribbon.get_attribute("aria-activedescendant") == chosen.get_attribute("id")
    inspector.ribbon.press("ArrowDown")
    assert 0 < inspector.step() < last
    inspector.page.locator("h1").click()
    inspector.go(7)
    inspector.root.get_by_role("button", name="Next step").click()
    assert inspector.step() == 8


def test_escape_stops_the_generation(inspector: InspectorPage) -> None:
    inspector.add_stage("min_tokens")
    inspector.field("max_tokens").fill("1000")
    inspector.field("min_tokens").fill("1000")
    inspector.generate_button.evaluate(ESCAPE_WHEN_STREAMING)
    inspector.settle()
    assert inspector.generate_button.is_visible()
    inspector.root.get_by_text("Generation stopped.").wait_for()


def test_text_held_back_by_a_stop_string_is_marked(inspector: InspectorPage) -> None:
    inspector.generate("Once upon a time", seed=5, max_tokens=60, stop=" to ")
    assert inspector.root.locator(".nci-cut, .nci-held").count() > 0
    inspector.root.get_by_text("not part of the text").first.wait_for()


def test_model_text_is_never_html(page: Page, server: Server, llm: nc.LLM) -> None:
    inspector = InspectorPage(page)
    params = {"structured_outputs": {"choice": [IMAGE]}, "max_tokens": 80, "seed": 1}
    inspector.open(server.url, {"prompt": f"Say {IMAGE}", "params": params})
    assert "".join(inspector.tokens()).startswith(IMAGE)
    assert inspector.root.locator("[data-step].nci-origin-forced").count() > 0
    sampled = inspector.root.locator("[data-step].nci-origin-sampled").all()
    for token in sampled[:3]:
        token.click()
        inspector.root.locator("table.nci-ladder").wait_for()
    for tab in ("Many draws", "Compare", "Branches", "Stages"):
        inspector.tab(tab)
    inspector.menu("Python").click()
    assert IMAGE.split("'", maxsplit=1)[0] in page.locator("dialog pre").inner_text()
    assert page.locator("img, .nci script").count() == 0
    assert page.evaluate("() => window.attacked") is None


def test_a_chat_and_the_programs_that_give_it_again(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.root.get_by_role("button", name="Chat", exact=True).click()
    inspector.root.get_by_label("Message 1", exact=True).fill("Tell me about a dog")
    inspector.field("seed").fill("5")
    inspector.field("max_tokens").fill("20")
    inspector.generate_button.click()
    inspector.settle()
    messages = [{"role": "user", "content": "Tell me about a dog"}]
    output = llm.chat(messages, seed=5, max_tokens=20, **FIRST_PARAMS).outputs[0]
    assert inspector.tokens() == [visible(token_text(llm.tokenizer, token)) for token in output.token_ids]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(inspector.code("Python"), {})
    assert printed.getvalue() == f"{output.text}\n"
    answer = subprocess.run(["bash", "-c", inspector.code("curl")], capture_output=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"] == output.text


def test_a_wrong_value_is_explained_at_its_field(inspector: InspectorPage) -> None:
    inspector.field("seed").fill("minus one")
    inspector.field("seed").blur()
    inspector.root.get_by_text("An integer from 0").wait_for()


def test_generate_selects_the_first_token_and_shows_it(browser: Browser, server: Server) -> None:
    """Also on a phone, where the button below the settings is far from the output."""
    context = browser.new_context(viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True)
    inspector = InspectorPage(context.new_page())
    inspector.open(server.url, {"prompt": "Once upon a time", "params": {"seed": 5, "max_tokens": 200}})
    first = inspector.ribbon.locator("[data-step='0'][aria-selected=true]")
    for name in ("Generate", "Generate with these settings"):
        inspector.root.get_by_role("button", name=name, exact=True).tap()
        inspector.settle()
        first.wait_for()
        box, ribbon = first.bounding_box(), inspector.ribbon.bounding_box()
        assert box is not None
        assert ribbon is not None
        assert max(0, ribbon["y"]) <= box["y"] <= box["y"] + box["height"] <= min(700, ribbon["y"] + ribbon["height"])
    context.close()


def test_a_chat_keeps_its_replies(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.root.get_by_role("button", name="Chat", exact=True).click()
    inspector.root.get_by_label("Message 1", exact=True).fill("Hello")
    for name, value in (("seed", "5"), ("max_tokens", "12")):
        inspector.field(name).fill(value)
    inspector.generate_button.click()
    inspector.settle()
    messages = [{"role": "user", "content": "Hello"}]
    first = llm.chat(messages, seed=5, max_tokens=12, **FIRST_PARAMS).outputs[0]
    assert inspector.root.get_by_label("Message 2", exact=True).input_value() == first.text
    assert inspector.root.get_by_label("Role of message 2").input_value() == "assistant"
    inspector.generate_button.click()  # without a new message: the same again
    inspector.settle()
    assert inspector.tokens() == [visible(token_text(llm.tokenizer, token)) for token in first.token_ids]
    inspector.root.get_by_label("Message 3", exact=True).fill("Go on")
    inspector.generate_button.click()
    inspector.settle()
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on"}]
    second = llm.chat(messages, seed=5, max_tokens=12, **FIRST_PARAMS).outputs[0]
    assert inspector.root.get_by_label("Message 4", exact=True).input_value() == second.text


def test_a_link_opens_a_step_of_token_ids(page: Page, server: Server, llm: nc.LLM) -> None:
    inspector, ids = InspectorPage(page), llm.encode("Once upon a time")
    inspector.open(server.url, {"prompt": list(ids), "params": {"seed": 3, "max_tokens": 20}, "step": 11})
    assert inspector.step() == 11
    [completion] = llm.generate([list(ids)], seed=3, max_tokens=20)
    assert inspector.tokens() == [
        visible(token_text(llm.tokenizer, token)) for token in completion.outputs[0].token_ids
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(inspector.code("Python"), {})
    assert printed.getvalue() == f"{completion.outputs[0].text}\n"
