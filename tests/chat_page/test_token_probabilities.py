"""Tokens of a reply: their probabilities, alternatives, colours, and the way to the inspector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from chat_page import ChatPage
from inspector_page import InspectorPage, agrees
from server_process import Server

import nucleate as nc

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = pytest.mark.slow

STORY = "Tell me a story about a dog."
SETTINGS = {"seed": 5, "max_tokens": 40}


@pytest.fixture
def story(chat: ChatPage) -> ChatPage:
    """A chat with one reply."""
    chat.set(**SETTINGS)
    chat.send(STORY)
    return chat


def test_a_token_shows_its_probability_and_the_alternatives(story: ChatPage, server: Server) -> None:
    body = {"messages": [{"role": "user", "content": STORY}], "logprobs": True, "top_logprobs": 5, **SETTINGS}
    expected = server.request("POST", "/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert len(expected) == SETTINGS["max_tokens"]
    assert story.tokens() == {step: text for step, each in enumerate(expected) if (text := each["token"].strip("\n"))}
    for step in (0, 7, 20):
        card, token = story.point_at(step), expected[step]
        card.locator(".nci-token-head", has_text=token["token"].strip()).wait_for()
        assert agrees(card.locator("strong").inner_text(), math.exp(token["logprob"]))
        shown = card.locator(".nci-alternative .nci-token").all_inner_texts()
        wanted = [each["token"].replace(" ", "·").replace("\n", "↵") for each in token["top_logprobs"]]
        assert shown[:5] == wanted
    story.page.mouse.move(5, 5)
    card.wait_for(state="hidden")


def test_another_token_starts_another_version(story: ChatPage) -> None:
    before, tokens = story.messages()[1], story.tokens()
    card = story.point_at(6)
    choice = card.locator("button.nci-alternative").first
    text = choice.locator(".nci-token").inner_text().replace("·", " ")
    choice.click()
    story.page.get_by_text("2 / 2").wait_for()
    story.settle()
    begin = "".join(tokens[step] for step in range(6)).lstrip() + text
    assert story.sent[-1]["messages"][-1]["content"] == begin
    assert story.messages()[1].startswith(begin)
    assert story.messages()[1] != before
    assert "chosen by you" in story.point_at(6).inner_text()
    assert story.page.get_by_role("link", name="Inspect this token").count() == 0  # that step was not sampled
    assert story.point_at(9).get_by_role("link", name="Inspect this token").is_visible()


def test_a_token_that_ends_replies_cannot_be_chosen(chat: ChatPage) -> None:
    chat.set(temperature=0)
    chat.send("Hello")
    card = chat.point_at(1)
    assert card.locator(".nci-alternative", has_text="<|end|>").get_attribute("title") == "It would end the reply."
    assert card.locator("button.nci-alternative").count() > 0
    assert card.locator("button.nci-alternative", has_text="<|end|>").count() == 0


@pytest.mark.parametrize("way", ["chat", "text", "continued"])
def test_the_inspector_opens_at_the_token(chat: ChatPage, context: BrowserContext, way: str) -> None:
    if way == "text":
        chat.button("Continue a text").click()
    chat.set(**SETTINGS)
    chat.send(STORY if way != "text" else "Once upon a time")
    first = 0
    if way == "continued":  # its prompt is known as token ids only
        chat.action("Continue this reply")
        chat.page.get_by_text("2 / 2").wait_for()
        chat.settle()
        first = SETTINGS["max_tokens"]
    chat.open_settings()
    if way == "chat":
        chat.page.locator("[data-key=system]").fill("Another one, for later replies.")
    chat.button("Close the settings").click()
    tokens = {step - first: text for step, text in chat.tokens().items() if step >= first}
    step = sorted(tokens)[len(tokens) // 2]
    with context.expect_page() as opened:
        chat.point_at(first + step).get_by_role("link", name="Inspect this token").click()
    inspector = InspectorPage(opened.value)
    inspector.root.locator(f"[data-step='{max(tokens)}']").wait_for(state="attached")
    inspector.settle()
    assert inspector.step() == step
    shown = inspector.tokens()
    assert {each: shown[each] for each in tokens} == tokens
    assert (
        inspector.root.locator(".nci-chip", has_text="generated").locator(".nci-token").inner_text().replace("·", " ")
        == tokens[step]
    )
    assert inspector.ladder()


def test_tokens_are_reached_with_the_keyboard(story: ChatPage) -> None:
    story.reply.focus()
    for key, step in (("ArrowRight", "0"), ("ArrowRight", "1"), ("End", "39"), ("ArrowLeft", "38"), ("Home", "0")):
        story.page.keyboard.press(key)
        assert story.reply.locator("[data-shown]").get_attribute("data-step") == step
    story.page.keyboard.press("Enter")
    assert story.page.evaluate("() => document.activeElement.closest('.nci-token-card') !== null")
    story.page.keyboard.press("Escape")
    assert story.page.get_by_role("dialog", name="Token").is_hidden()
    assert story.page.evaluate("() => document.activeElement.dataset.node !== undefined")


def test_colours_are_those_of_the_inspector(story: ChatPage) -> None:
    levels = story.reply.locator("[data-step]").evaluate_all("all => all.map((x) => [x.dataset.level, x.dataset.step])")
    assert len({level for level, _ in levels}) > 2
    colour = "x => getComputedStyle(x).backgroundColor"
    unlikely = story.reply.locator("[data-level='3'], [data-level='4']").first
    plain = unlikely.evaluate(colour)
    story.button("Colour tokens by their probability").click()
    assert unlikely.evaluate(colour) != plain
    assert story.page.get_by_text("10 – 20%").is_visible()
    story.page.reload()
    story.page.locator(".nci-chat-link").first.click()
    assert story.reply.locator("[data-level='3'], [data-level='4']").first.evaluate(colour) != plain


def test_characters_of_several_tokens_are_shown_whole(chat: ChatPage, llm: nc.LLM) -> None:
    """Bytes become a character with the last of their tokens."""
    text = "Ω🙂 und ünd"
    chat.button("Continue a text").click()
    chat.page.route(
        "**/v1/completions",
        lambda route: route.continue_(
            post_data={**route.request.post_data_json, "structured_outputs": {"choice": [text]}}
        ),
    )
    chat.send("Say it: ")
    assert chat.messages()[0] == f"Say it: {text}"
    assert "".join(chat.tokens().values()) == text
