"""The chat page as a person uses it: typing, stopping, editing, pointing at tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Request

ANOTHER = "Generate another version"


class ChatPage:
    """The chat page in a browser page. sent: the bodies of the requests for replies, the oldest first."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.sent: list[dict[str, Any]] = []
        page.on("request", self._record)

    def _record(self, request: Request) -> None:
        if request.url.endswith("/completions"):
            self.sent.append(json.loads(request.post_data or ""))

    def open(self, url: str) -> None:
        """Open the page of a server."""
        self.page.goto(f"{url}/")
        self.field.wait_for()

    @property
    def field(self) -> Locator:
        return self.page.locator("[data-key=message]")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def send(self, text: str, *, wait: bool = True) -> None:
        """Type a message and send it. wait: until the reply has ended."""
        self.field.fill(text)
        self.page.locator(".nci-send[type=submit]").click()
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait until the last reply has ended."""
        self.page.locator(".nci-message").last.get_by_role("button", name=ANOTHER).wait_for()

    def messages(self) -> list[str]:
        """The texts of the messages that are shown, with paragraphs and line breaks as newlines."""
        return [text.strip() for text in self.page.locator(".nci-message .nci-markdown").all_inner_texts()]

    @property
    def reply(self) -> Locator:
        """The text of the last reply."""
        return self.page.locator(".nci-from-assistant .nci-markdown").last

    def tokens(self) -> dict[int, str]:
        """The tokens of the last reply by step, as parts of its text. Those that only break lines are left out."""
        parts = self.reply.locator("[data-step]").evaluate_all("all => all.map((x) => [x.dataset.step, x.textContent])")
        found = dict[int, str]()
        for step, text in parts:
            found[int(step)] = found.get(int(step), "") + text
        return found

    def action(self, name: str, message: int = -1) -> None:
        """Use a button below a message."""
        row = self.page.locator(".nci-message").nth(message)
        row.locator(".nci-foot").hover()
        row.get_by_role("button", name=name, exact=True).click()

    def open_settings(self) -> None:
        self.button("Settings").click()
        self.page.locator("[data-key=seed]").wait_for()

    def set(self, **values: float | str) -> None:
        """Set fields of the settings, which are opened and closed again."""
        self.open_settings()
        for name, value in values.items():
            field = self.page.locator(f"[data-key={name}]")
            field.fill(str(value))
            field.blur()
        self.button("Close the settings").click()

    def point_at(self, step: int) -> Locator:
        """Point at a token of the last reply, and return its card."""
        self.page.mouse.move(5, 5)
        self.page.get_by_role("dialog", name="Token").wait_for(state="hidden")
        self.reply.locator(f"[data-step='{step}']").first.hover()
        self.reply.locator(f"[data-step='{step}'][data-shown]").wait_for()
        return self.page.get_by_role("dialog", name="Token")

    def titles(self) -> list[str]:
        """The titles of the conversations in the list."""
        return self.page.locator(".nci-chat-link").all_inner_texts()
