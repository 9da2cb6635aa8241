"""Conversations: stream, stop, continue, edit, versions, settings; kept, exported and imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chat_page import ChatPage
from chromium import PageErrors
from server_process import Server

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.sampling.stages import STAGES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.slow

STORY = "Tell me a story about a dog."
LONG = 900
ESCAPE_WHEN_STREAMING = """(send) => new Promise((done) => {
  send.click();
  const poll = () => {
    if (document.querySelectorAll(".nci-thread [data-step]").length < 4) return requestAnimationFrame(poll);
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    done();
  };
  requestAnimationFrame(poll);
})"""


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines() if line.strip())


def test_a_first_visit_can_start_with_an_example(chat: ChatPage) -> None:
    chat.page.locator(".nci-example").first.click()
    chat.settle()
    question, answer = chat.messages()
    assert question == chat.titles()[0]
    assert len(answer) > 50


def test_a_reply_is_what_the_library_generates(chat: ChatPage, llm: nc.LLM) -> None:
    chat.set(seed=5, max_tokens=60, system="You tell stories.")
    chat.send(STORY)
    messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": STORY}]
    first = llm.chat(messages, seed=5, max_tokens=60).outputs[0].text
    assert lines(chat.messages()[-1]) == lines(first)
    chat.send("Go on.")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
    assert lines(chat.messages()[-1]) == lines(llm.chat(messages, seed=5, max_tokens=60).outputs[0].text)


def test_stop_keeps_the_text_and_it_can_be_continued(chat: ChatPage) -> None:
    chat.set(seed=3, max_tokens=LONG)
    chat.open_settings()
    chat.page.locator("button.nci-add", has_text="min_tokens").click()
    chat.page.locator("[data-key=min_tokens]").fill(str(LONG))
    chat.button("Close the settings").click()
    chat.field.fill(STORY)
    chat.page.locator(".nci-send[type=submit]").evaluate(ESCAPE_WHEN_STREAMING)
    chat.settle()
    chat.page.get_by_text("stopped", exact=True).wait_for()
    kept = chat.messages()[-1]
    assert 3 < len(chat.tokens()) < LONG
    chat.set(max_tokens=8)
    chat.open_settings()
    chat.button("Remove min_tokens").click()
    chat.button("Close the settings").click()
    chat.action("Continue this reply")
    chat.settle()
    assert chat.messages()[-1].startswith(kept)
    assert chat.sent[-1]["continue_final_message"] is True
    assert chat.page.locator(".nci-versions").inner_text().split() == ["2", "/", "2"]


def test_versions_and_edits_are_branches(chat: ChatPage) -> None:
    chat.set(max_tokens=12)
    chat.send("Hello")
    first = chat.messages()
    chat.action("Generate another version")
    chat.settle()
    assert chat.sent[0]["messages"] == chat.sent[1]["messages"]
    assert chat.sent[0]["seed"] != chat.sent[1]["seed"]
    chat.button("Previous version").click()
    assert chat.messages() == first
    chat.action("Edit", 0)
    chat.page.get_by_label("Edit: You").fill("Tell me about a cat")
    chat.button("Send").first.click()
    chat.settle()
    assert chat.messages()[0] == "Tell me about a cat"
    chat.button("Previous version").first.click()
    assert chat.messages()[0] == "Hello"
    chat.action("Edit the reply")
    chat.page.get_by_label("Edit: Reply").fill("Good *morning*")
    chat.button("Save").click()
    assert chat.messages()[1] == "Good morning"
    chat.send("And now?")
    assert [each["content"] for each in chat.sent[-1]["messages"]] == ["Hello", "Good *morning*", "And now?"]
    chat.action("Delete, with all that follows", 1)
    assert len(chat.messages()) == 2
    assert chat.messages()[1] != "Good morning"


def test_the_last_message_can_be_changed_with_the_arrow_key(chat: ChatPage) -> None:
    chat.set(max_tokens=4)
    chat.send("Hello")
    chat.field.press("ArrowUp")
    editor = chat.page.get_by_label("Edit: You")
    editor.fill("Good evening")
    editor.press("Control+Enter")
    chat.settle()
    assert chat.messages()[0] == "Good evening"


def test_conversations_are_kept_exported_and_imported(
    chat: ChatPage, browser: Browser, server: Server, tmp_path: Path
) -> None:
    chat.set(max_tokens=10)
    chat.send("Hello")
    chat.button("New conversation").click()
    chat.send(STORY)
    before = chat.messages()
    chat.page.reload()
    chat.page.locator(".nci-message").nth(1).wait_for()
    assert chat.messages() == before
    chat.page.locator(".nci-chat-link", has_text="Hello").click()
    chat.page.locator(".nci-from-user", has_text="Hello").wait_for()
    with chat.page.expect_download() as waiting:
        chat.button("Export all").click()
    waiting.value.save_as(tmp_path / "saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text("utf-8"))
    assert sorted(each["title"] for each in saved["conversations"]) == ["Hello", STORY]

    context = browser.new_context()
    other = ChatPage(context.new_page())
    other.open(server.url)
    for _ in range(2):  # what is there already is not added again
        other.page.locator("input[type=file]").set_input_files(tmp_path / "saved.json")
        other.page.locator(".nci-chat-link").nth(1).wait_for()
    assert sorted(other.titles()) == ["Hello", STORY]
    other.page.locator(".nci-chat-link", has_text=STORY).click()
    assert other.messages() == before
    assert len(other.tokens()) > 5
    assert other.point_at(1).get_by_role("link", name="Inspect this token").is_visible()
    (tmp_path / "other.json").write_text('{"format": "something"}', "utf-8")
    other.page.locator("input[type=file]").set_input_files(tmp_path / "other.json")
    other.page.get_by_role("alert").get_by_text("no conversations saved by this page").wait_for()

    other.page.get_by_label("More about Hello").click()
    other.button("Rename").click()
    other.page.get_by_label("Title").fill("A greeting")
    other.page.locator("dialog").get_by_role("button", name="Rename").click()
    other.page.get_by_label("More about A greeting").click()
    other.button("Delete").click()
    other.page.locator("dialog").get_by_role("button", name="Delete").click()
    other.page.locator(".nci-chat-link", has_text="A greeting").wait_for(state="detached")
    assert other.titles() == [STORY]
    context.close()


def test_settings_are_sent_kept_and_come_from_the_server(chat: ChatPage) -> None:
    chat.send("Hello")
    assert not {"temperature", "top_p", "stop"} & chat.sent[-1].keys()  # the defaults of the server
    chat.set(temperature=0.2, stop="never", max_tokens=3)
    chat.send("Hello")
    assert chat.sent[-1].items() >= {"temperature": 0.2, "stop": ["never"], "max_tokens": 3}.items()
    chat.open_settings()
    assert chat.page.locator("[data-key=preset]").input_value() == ""
    chat.page.locator("[data-key='save preset']").click()
    chat.page.get_by_label("Name").fill("Mine")
    chat.page.locator("dialog[open]").get_by_role("button", name="Save").click()
    chat.page.locator("[data-key=preset]").select_option("Always the likeliest token")
    assert chat.page.locator("[data-key=temperature]").input_value() == "0"
    chat.page.locator("[data-key=preset]").select_option("Mine")
    assert chat.page.locator("[data-key=temperature]").input_value() == "0.2"
    chat.page.reload()
    chat.open_settings()
    assert chat.page.locator("[data-key=preset]").input_value() == "Mine"
    chat.page.get_by_label("Filter stages and parameters").fill("xtc")
    chat.page.locator("button.nci-add", has_text="xtc").click()
    for parameter in STAGES["xtc"].parameters.values():
        assert chat.page.get_by_text(parameter.help).is_visible()


def test_parameters_of_no_stage_and_their_errors(chat: ChatPage, errors: PageErrors) -> None:
    errors.allow("status of 400")
    chat.open_settings()
    chat.page.locator("[data-key='more parameters']").click()
    field = chat.page.locator("[data-key=structured_outputs]")
    field.fill('{"choice": ["yes", "no"]}')
    field.blur()
    chat.send("Is it?")
    assert chat.messages()[1] in ("yes", "no")
    field.fill('{"regex": "("}')
    field.blur()
    scale = chat.page.locator("[data-key=guidance_scale]")
    scale.fill("1.5")
    chat.send("And now?", wait=False)
    assert chat.sent[-1]["guidance_scale"] == 1.5
    problem = chat.page.locator(".nci-reply-problem:visible")
    message = problem.locator("span").inner_text()
    assert chat.page.locator(".nci-more .nci-field-error", has_text=message).is_visible()
    chat.page.locator("[data-key='reset structured_outputs']").click()
    chat.button("Try again").click()
    chat.settle()
    assert problem.count() == 0
    assert "structured_outputs" not in chat.sent[-1]


def test_a_seed_gives_the_reply_again(chat: ChatPage) -> None:
    chat.set(max_tokens=30)
    chat.send(STORY)
    first = chat.messages()
    chat.page.locator(".nci-seed").click()
    chat.action("Generate another version")
    chat.page.get_by_text("2 / 2").wait_for()
    chat.settle()
    assert chat.sent[1]["seed"] == chat.sent[0]["seed"]
    assert chat.messages() == first


def test_a_text_is_continued(chat: ChatPage, llm: nc.LLM) -> None:
    chat.button("Continue a text").click()
    chat.set(seed=7, max_tokens=20)
    chat.send("Once upon a time")
    [completion] = llm.generate("Once upon a time", seed=7, max_tokens=20)
    text = f"Once upon a time{completion.outputs[0].text}"
    assert lines(chat.messages()[0]) == lines(text)
    chat.send(" The end was")
    assert chat.sent[-1]["prompt"] == f"{text} The end was"


@pytest.fixture(scope="module")
def base_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model has no chat template."""
    folder = tmp_path_factory.mktemp("base") / "base-model"
    shutil.copytree(EMBEDDED, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with Server("--model", str(folder)) as running:
        yield running


def test_a_model_without_a_chat_template_continues_texts(page: Page, base_server: Server) -> None:
    chat = ChatPage(page)
    chat.open(base_server.url)
    page.get_by_text("has no chat template").wait_for()
    chat.set(max_tokens=20)
    chat.send("The little dog")
    assert "prompt" in chat.sent[0]
    assert chat.messages()[0].startswith("The little dog")
    assert len(chat.tokens()) == 20


CHUNKS: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}, "seed": 7},
    {"delta": {"reasoning_content": "The weather is asked for."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city":'}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
]


def answer(route: Route, chunks: list[dict[str, Any]]) -> None:
    frames = [json.dumps({"choices": [{"index": 0, "finish_reason": None, **each}]}) for each in chunks]
    body = "".join(f"data: {frame}\n\n" for frame in [*frames, "[DONE]"])
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_reasoning_and_tool_calls_are_folded_and_answered(chat: ChatPage) -> None:
    chat.open_settings()
    chat.page.locator("[data-key=tools]").fill("{")
    chat.page.get_by_text("This is not JSON.").wait_for()
    chat.button("Insert an example").click()
    chat.button("Close the settings").click()
    replies = [CHUNKS, [{"delta": {"content": "It rains."}, "seed": 7}, {"delta": {}, "finish_reason": "stop"}]]
    chat.page.route("**/v1/chat/completions", lambda route: answer(route, replies.pop(0)))
    chat.send("Weather in Paris?")
    assert chat.sent[0]["tools"][0]["function"]["name"] == "get_weather"
    assert not chat.page.get_by_text("The weather is asked for.").is_visible()
    chat.page.locator("summary", has_text="Reasoning").click()
    assert chat.page.get_by_text("The weather is asked for.").is_visible()
    chat.page.locator("summary", has_text="get_weather").click()
    assert chat.page.get_by_role("region", name="Arguments").inner_text() == '{\n  "city": "Paris"\n}'
    chat.page.get_by_label("Result of get_weather").fill("rain")
    chat.page.locator("[data-key='answer c1']").click()
    chat.page.get_by_text("It rains.").wait_for()
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    asked, result = chat.sent[1]["messages"][-2:]
    assert (asked["tool_calls"], asked["content"]) == ([call], None)
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_an_error_is_shown_where_the_reply_would_be(chat: ChatPage, errors: PageErrors) -> None:
    errors.allow("Failed to load resource|ERR_")
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.send("Hello", wait=False)
    chat.page.locator(".nci-message").get_by_text("The server cannot be reached").wait_for()
    chat.page.unroute_all()
    chat.button("Try again").click()
    chat.settle()
    assert len(chat.messages()[1]) > 3
    chat.send("word " * 2000, wait=False)
    chat.page.locator(".nci-message").last.get_by_text("context").wait_for()


def test_two_tabs_show_the_same_conversations(chat: ChatPage, server: Server) -> None:
    chat.set(max_tokens=8)
    chat.send("Hello")
    other = ChatPage(chat.page.context.new_page())
    other.open(server.url)
    other.page.locator(".nci-chat-link", has_text="Hello").click()
    other.page.locator(".nci-from-user", has_text="Hello").wait_for()
    other.send("Go on.")
    chat.page.bring_to_front()
    chat.page.evaluate("() => dispatchEvent(new Event('focus'))")
    chat.page.locator(".nci-from-user", has_text="Go on.").wait_for()
    assert chat.messages() == other.messages()


def test_a_conversation_goes_on_while_another_one_is_shown(chat: ChatPage) -> None:
    chat.send(STORY, wait=False)
    chat.reply.locator("[data-step]").first.wait_for()
    chat.button("New conversation").click()
    assert not chat.button("Stop").is_visible()
    chat.send("Hello")
    chat.page.locator(".nci-chat-link", has_text=STORY).click()
    chat.settle()
    assert len(chat.messages()[1]) > 40
