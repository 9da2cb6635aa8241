"""Usable by everybody: axe-core, the keyboard alone, narrow windows, zoom, reduced motion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from axe import Axe, width_beyond
from chromium import PageErrors
from inspector_page import InspectorPage
from server_process import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"
GIVEN = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.02, "seed": 7, "max_tokens": 24, "stop": [" to "]}
LINK = {"prompt": PROMPT, "params": GIVEN}
TABS = ("Many draws", "Compare", "Branches", "Stages")
ACTIVE = "() => document.activeElement.getAttribute('data-key') ?? document.activeElement.textContent"


@pytest.mark.parametrize(("width", "scheme", "other"), [(1280, "light", "dark"), (360, "dark", "light")])
def test_axe_finds_nothing(width: int, scheme: Any, other: Any, page: Page, server: Server) -> None:
    """In every tab, in the menu and in a dialog; colours in the other scheme too."""
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    inspector = InspectorPage(page)
    inspector.open(server.url, LINK)
    axe = Axe(page)
    inspector.go(4)
    inspector.root.locator("[data-key^=token-]").first.click()

    def check(where: str, part: str = ".nci-step-card") -> None:
        inspector.settle()
        assert axe.violations(part) == [], where
        page.emulate_media(color_scheme=other, reduced_motion="reduce")
        assert axe.violations(part, ["color-contrast"]) == [], f"{where}, {other}"
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert width_beyond(page) <= 0, where

    check("Stages", "html")
    inspector.tab("Many draws")
    inspector.root.get_by_role("button", name="Draw", exact=True).click()
    check("Many draws")
    inspector.tab("Compare")
    inspector.root.get_by_role("button", name="Compare with second settings").click()
    inspector.slider("temperature").fill("1.7")
    inspector.settle()
    inspector.root.get_by_role("button", name="Generate both texts").click()
    check("Compare")
    inspector.tab("Branches")
    check("Branches")
    inspector.root.locator("summary", has_text="Save and share").click()
    check("menu", ".nci-menu")
    inspector.root.locator(".nci-menu-item", has_text="Python").click()
    check("dialog", "dialog[open]")


def test_axe_finds_nothing_where_a_key_is_needed(page: Page, locked_server: Server, errors: PageErrors) -> None:
    errors.allow("status of 401")
    page.goto(f"{locked_server.url}/inspector")
    page.get_by_label("API key").wait_for()
    assert Axe(page).violations() == []


def test_everything_works_with_the_keyboard_alone(page: Page, server: Server) -> None:
    inspector = InspectorPage(page)
    inspector.open(server.url)

    def tab_to(key: str) -> None:
        seen = []
        for _ in range(60):
            page.keyboard.press("Tab")
            seen.append(page.evaluate(ACTIVE))
            if seen[-1] == key:
                assert page.evaluate(HAS_FOCUS_RING), f"no focus ring at {key}"
                return
        raise AssertionError(f"{key} is not reached: {seen}")

    tab_to("prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("The cat")
    page.keyboard.press("Control+Enter")
    inspector.settle()
    tab_to("ribbon")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    inspector.settle()
    assert inspector.step() == 1
    first = inspector.columns()[0]
    tab_to(f"token-{first}")
    page.keyboard.press("Enter")
    inspector.settle()
    assert page.evaluate(ACTIVE) == f"token-{first}"  # the table was built again
    tab_to("range temperature")
    before = inspector.ladder()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    inspector.settle()
    assert inspector.ladder() != before
    order = inspector.stages()
    tab_to("up top_p")
    page.keyboard.press("Enter")
    inspector.settle()
    assert inspector.stages() != order
    assert page.evaluate(ACTIVE) == "up top_p"
    inspector.root.get_by_role("tab", name="Stages").focus()
    for name in ("Many draws", "Compare A/B", "Branches", "Stages"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate(ACTIVE) == name
    inspector.root.locator("summary").focus()
    page.keyboard.press("Enter")
    inspector.settle()  # the menu is filled when it has opened
    page.keyboard.press("Tab")
    assert inspector.root.locator(".nci-menu-item:focus").count() == 1
    page.keyboard.press("Escape")
    assert page.evaluate(ACTIVE) == "save"
    assert inspector.root.locator(".nci-menu-item:visible").count() == 0


HAS_FOCUS_RING = """() => {
  const { outlineStyle, outlineWidth, boxShadow, borderColor } = getComputedStyle(document.activeElement);
  return (outlineStyle !== "none" && parseFloat(outlineWidth) > 0) || boxShadow !== "none";
}"""


def test_zoom_to_200_percent_needs_no_sideways_scrolling(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 640, "height": 450}, device_scale_factor=2)
    inspector = InspectorPage(context.new_page())
    inspector.open(server.url, LINK)
    for tab in TABS:
        inspector.tab(tab)
        inspector.settle()
        assert width_beyond(inspector.page) <= 0, tab
    inspector.go(4)
    inspector.slider("top_p").fill("0.5")
    inspector.settle()
    assert inspector.slider("top_p").is_visible()
    context.close()


def test_motion_is_reduced_on_request(browser: Browser, server: Server) -> None:
    context = browser.new_context(reduced_motion="reduce")
    inspector = InspectorPage(context.new_page())
    inspector.open(server.url, LINK)
    inspector.go(4)
    inspector.slider("temperature").fill("1.7")
    moving = "() => document.getAnimations().filter((each) => each.effect.getComputedTiming().duration > 20).length"
    assert inspector.page.evaluate(moving) == 0
    durations = inspector.root.locator("*").evaluate_all(
        "all => all.flatMap((x) => getComputedStyle(x).transitionDuration.split(',')).map(parseFloat)"
    )
    assert max(durations) <= 0.02
    context.close()


def test_the_theme_can_be_chosen(inspector: InspectorPage) -> None:
    colour = "x => getComputedStyle(x).backgroundColor"
    light = inspector.root.evaluate(colour)
    inspector.root.get_by_role("button", name="Theme").click()
    assert inspector.root.evaluate(colour) != light
    assert Axe(inspector.page).violations() == []
    inspector.root.get_by_role("button", name="Theme").click()
    assert inspector.root.evaluate(colour) == light
