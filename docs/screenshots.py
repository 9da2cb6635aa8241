"""Makes the pictures of docs/inspector.md and docs/chat_page.md: opens the pages in Chromium and uses them.

Needs Chromium, Playwright (the extra dev) and Pillow: pip install pillow; python docs/screenshots.py
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
LINK = {"prompt": "Once upon a time", "params": {"temperature": 0.9, "top_p": 0.95, "seed": 4, "max_tokens": 60}}
SIZE = {"width": 1280, "height": 1060}
COLOURS = 128


@contextmanager
def server() -> Iterator[str]:
    """The address of a server with the embedded model."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    command = [sys.executable, "-m", "nucleate", "serve", "--port", url.rpartition(":")[2], "--log-level", "error"]
    process = subprocess.Popen(command)  # noqa: S603
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()  # noqa: S310
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


class Inspector:
    """The page, with the first answer of LINK."""

    def __init__(self, browser: Browser, url: str, scheme: str = "light", size: dict[str, int] | None = None) -> None:
        self.context = browser.new_context(viewport=size or SIZE, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        link = base64.urlsafe_b64encode(json.dumps(LINK).encode()).decode().rstrip("=")
        self.page.goto(f"{url}/inspector#s={link}")
        self.page.locator("[data-step='59']").wait_for(state="attached")
        self.dismiss_hint()
        self.settle()

    def dismiss_hint(self) -> None:
        hint = self.page.locator(".nci-note button").first
        if hint.is_visible():
            hint.click()

    def settle(self) -> None:
        self.page.wait_for_timeout(350)

    def button(self, name: str | re.Pattern[str]) -> Locator:
        return self.page.get_by_role("button", name=name)

    def go(self, step: int) -> None:
        self.page.locator(f"[data-step='{step}']").click()
        self.settle()

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()
        self.settle()

    def slide(self, name: str, value: float) -> None:
        self.page.get_by_role("slider", name=name, exact=True).fill(str(value))
        self.settle()

    def shot(self) -> Image.Image:
        self.settle()
        return Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")


def save(picture: Image.Image, name: str) -> None:
    """Write a small PNG file."""
    picture.quantize(192, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)


def stills(browser: Browser, url: str) -> None:
    """One picture per part of the page."""
    for scheme in ("light", "dark"):
        inspector = Inspector(browser, url, scheme)
        inspector.go(4)
        save(inspector.shot(), f"inspector-{scheme}.png")
        inspector.context.close()
    inspector = Inspector(browser, url)
    inspector.go(4)
    inspector.tab("Many draws")
    inspector.button("Draw").last.click()
    inspector.page.get_by_text("degree").wait_for()
    save(below(inspector), "inspector-draws.png")
    inspector.tab("Compare")
    inspector.button("Compare with second settings").click()
    inspector.slide("temperature", 1.6)
    inspector.button("Generate both texts").click()
    inspector.page.get_by_text("The texts part at step").wait_for()
    save(below(inspector), "inspector-compare.png")
    inspector.context.close()
    phone = Inspector(browser, url, size={"width": 390, "height": 1400})
    save(phone.shot(), "inspector-phone.png")
    phone.context.close()


CHATS = ("Write a story about a rainy day.", "Tell me a story with a cat and a big red ball.", "Hello")
STORY = "Tell me a story about a brave little dog."


class Chat:
    """The chat page, with a few conversations; the last one is shown."""

    def __init__(self, browser: Browser, url: str, scheme: str, size: dict[str, int]) -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        kept = json.dumps({"params": {"seed": 8}})
        script = f"localStorage.getItem('nucleate-chat') ?? localStorage.setItem('nucleate-chat', '{kept}')"
        self.context.add_init_script(script)
        self.page: Page = self.context.new_page()
        self.page.goto(url)
        for text in CHATS:
            self.send(text)
            self.page.keyboard.press("Control+Shift+O")
        self.send(STORY)
        self.send("Tell me another one.")
        self.page.mouse.move(4, 400)

    def send(self, text: str) -> None:
        field = self.page.locator("[data-key=message]")
        field.fill(text)
        field.press("Enter")
        self.page.locator(".nci-message").last.get_by_role("button", name="Generate another version").wait_for()

    def shot(self) -> Image.Image:
        self.page.wait_for_timeout(350)
        return Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")


def chat_stills(browser: Browser, url: str) -> None:
    """The chat page: the card of a token; colours and settings; on a phone."""
    size = {"width": 1280, "height": 820}
    chat = Chat(browser, url, "light", size)
    chat.page.locator(".nci-thread [data-step='9']").first.hover()
    save(chat.shot(), "chat-light.png")
    chat.context.close()
    chat = Chat(browser, url, "dark", size)
    chat.page.get_by_role("button", name="Colour tokens").click()
    chat.page.get_by_role("button", name="Settings", exact=True).click()
    save(chat.shot(), "chat-dark.png")
    chat.context.close()
    chat = Chat(browser, url, "light", {"width": 390, "height": 844})
    chat.page.get_by_role("button", name="Colour tokens").click()
    chat.page.locator(".nci-thread [data-step='9']").first.click()
    save(chat.shot(), "chat-phone.png")
    chat.context.close()


def below(inspector: Inspector) -> Image.Image:
    """The lower part of the page, where the tabs are."""
    inspector.page.get_by_role("tab", name="Stages").evaluate("tab => tab.scrollIntoView({block: 'center'})")
    inspector.page.evaluate("() => scrollBy(0, 380)")
    return inspector.shot()


def animation(browser: Browser, url: str) -> None:
    """What the page does: walk, slide, reorder, branch."""
    inspector = Inspector(browser, url, size={"width": 1280, "height": 1240})
    frames = list[tuple[Image.Image, int]]()

    def add(milliseconds: int) -> None:
        inspector.page.evaluate("() => scrollTo(0, 0)")
        frames.append((inspector.shot().resize((960, 930), Image.Resampling.LANCZOS), milliseconds))

    add(1500)
    for step in (4, 5, 6, 7):
        inspector.go(step)
        add(900)
    for value in (1.1, 1.3, 1.5, 1.7):
        inspector.slide("temperature", value)
        add(600)
    for value in (0.9, 0.8, 0.7, 0.6):
        inspector.slide("top_p", value)
        add(600)
    add(1200)
    inspector.page.locator("table.nci-ladder thead button[data-key^=token-]").nth(2).click()
    add(1200)
    inspector.button(re.compile("^Branch: go on with")).click()
    inspector.page.get_by_text("Finish reason").first.wait_for()
    add(1600)
    inspector.tab("Branches")
    add(2200)
    inspector.context.close()
    sheet = Image.new("RGB", (960, 3 * 930))
    for row, (picture, _) in enumerate([frames[0], frames[-3], frames[-1]]):
        sheet.paste(picture, (0, 930 * row))
    palette = sheet.quantize(COLOURS, dither=Image.Dither.NONE)
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture, _ in frames]
    pictures[0].save(
        PICTURES / "inspector.gif",
        save_all=True,
        append_images=pictures[1:],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        optimize=True,
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with server() as url, sync_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        stills(browser, url)
        chat_stills(browser, url)
        animation(browser, url)
        browser.close()
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
