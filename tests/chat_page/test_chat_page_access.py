"""The chat page for everybody: axe-core, keyboard, phone, themes; API keys and the policy of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from axe import Axe, width_beyond
from chat_page import ChatPage
from chromium import PageErrors
from server_process import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

STORY = "Tell me a story about a dog."


@pytest.mark.parametrize(("width", "scheme", "other"), [(1280, "light", "dark"), (390, "dark", "light")])
def test_axe_finds_nothing(width: int, scheme: Any, other: Any, page: Page, server: Server) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    chat = ChatPage(page)
    chat.open(server.url)
    axe = Axe(page)

    def check(where: str) -> None:
        assert axe.violations() == [], where
        page.emulate_media(color_scheme=other, reduced_motion="reduce")
        assert axe.violations(rules=["color-contrast"]) == [], f"{where}, {other}"
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert width_beyond(page) <= 0, where

    check("welcome")
    chat.send(STORY)
    chat.reply.locator("[data-step='5']").click()
    check("reply and card")
    page.keyboard.press("Escape")
    chat.button("Colour tokens by their probability").click()
    check("colours")
    chat.action("Edit", 0)
    check("editor")
    page.keyboard.press("Escape")
    chat.open_settings()
    check("settings")
    page.keyboard.press("Escape")
    if width < 900:
        chat.button("Conversations").click()
    page.get_by_label("More about").click()
    check("list")


def test_a_phone_shows_the_conversation_and_its_drawers(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chat = ChatPage(context.new_page())
    chat.open(server.url)
    assert not chat.button("New conversation").is_visible()
    chat.send(STORY)
    chat.reply.locator("[data-step='5']").tap()
    card = chat.page.get_by_role("dialog", name="Token").bounding_box()
    assert card is not None
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 390
    assert card["y"] + card["height"] <= 844
    chat.page.locator(".nci-chat-title").tap()
    assert chat.page.get_by_role("dialog", name="Token").is_hidden()
    chat.button("Conversations").tap()
    chat.button("New conversation").tap()
    assert chat.messages() == []
    assert not chat.button("New conversation").is_visible()
    field = chat.field.bounding_box()
    assert field is not None
    assert 700 < field["y"] < 844
    context.close()


def test_everything_works_with_the_keyboard_alone(chat: ChatPage) -> None:
    active = "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.dataset.key"
    press = chat.page.keyboard.press

    def tab_to(key: str, *, back: bool = False) -> None:
        seen = []
        for _ in range(60):
            press("Shift+Tab" if back else "Tab")
            seen.append(chat.page.evaluate(active))
            if seen[-1] == key:
                return
        raise AssertionError(f"{key} is not reached: {seen}")

    assert chat.page.evaluate(active) == "Message"
    chat.page.keyboard.type("Hello")
    press("Shift+Enter")
    chat.page.keyboard.type("there")
    press("Enter")
    chat.settle()
    assert chat.messages()[0] == "Hello\nthere"
    tab_to("Generate another version", back=True)
    press("Enter")
    chat.page.get_by_text("2 / 2").wait_for()
    chat.settle()
    press("Control+,")
    tab_to("temperature")
    press("ArrowRight")
    press("Escape")
    assert not chat.page.locator("[data-key=seed]").is_visible()
    press("Control+Shift+O")
    assert chat.page.evaluate(active) == "Message"
    assert chat.messages() == []


def test_a_server_with_an_api_key(page: Page, locked_server: Server, key: str, errors: PageErrors) -> None:
    errors.allow("status of 401")
    page.goto(f"{locked_server.url}/")
    page.get_by_label("API key").wait_for()
    assert not page.get_by_text("Loading").is_visible()
    assert Axe(page).violations() == []
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("did not accept this key").wait_for()
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    chat = ChatPage(page)
    chat.send("Hello")
    assert key not in page.content()
    with page.context.expect_page() as opened:
        chat.point_at(1).get_by_role("link", name="Inspect this token").click()
    opened.value.locator("table.nci-ladder").wait_for()  # the new tab has the key


def test_the_policy_of_the_page_blocks_scripts(chat: ChatPage, errors: PageErrors) -> None:
    errors.allow("Content Security Policy|Content-Security-Policy")
    blocked = """() => {
      const script = document.createElement("script");
      script.textContent = "window.attacked = 1";
      document.body.append(script);
      return window.attacked === undefined;
    }"""
    assert chat.page.evaluate(blocked)


def test_the_theme_is_kept(chat: ChatPage) -> None:
    root = chat.page.locator("#nci-root")
    light = root.evaluate("x => getComputedStyle(x).backgroundColor")
    chat.button("Light or dark").click()
    dark = root.evaluate("x => getComputedStyle(x).backgroundColor")
    assert dark != light
    chat.page.reload()
    chat.field.wait_for()
    assert root.evaluate("x => getComputedStyle(x).backgroundColor") == dark


def test_a_server_without_logprobs_and_inspector(page: Page) -> None:
    with Server("--max-inspector-bytes", "0", "--max-logprobs", "0") as plain:
        chat = ChatPage(page)
        chat.open(plain.url)
        chat.send("Hello")
        assert len(chat.messages()[1]) > 3
        assert chat.tokens() == {}
        assert page.get_by_role("link", name="Inspector").count() == 0
        assert page.get_by_role("link", name="API").count() == 1
