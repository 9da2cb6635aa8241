"""A headless Chromium for tests: that of the system, since Playwright's own cannot be downloaded everywhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb")
IN_CI = os.environ.get("CI", "") not in ("", "0", "false")


def unavailable(reason: str) -> Any:
    """Skip a test because something is not installed. In continuous integration, fail it."""
    if IN_CI:
        pytest.fail(f"continuous integration must install what this test needs: {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser. Skips the test without one.

    While it runs, the thread has an asyncio loop: tests that start another one must not run at the same time.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("Playwright is not installed: make setup")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        unavailable("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS])
        yield browser
        browser.close()


class PageErrors:
    """The errors and warnings of a page. Failed requests that a test provokes are allowed with ``allow``."""

    def __init__(self, page: Page) -> None:
        self.found: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        page.on("console", self._add_message)
        page.on("pageerror", lambda error: self.found.append(f"uncaught {error.name}: {error.message}\n{error.stack}"))

    def allow(self, pattern: str) -> None:
        """Ignore messages that contain a match of a regular expression."""
        self._allowed.append(re.compile(pattern))

    def unexpected(self) -> list[str]:
        return [text for text in self.found if not any(pattern.search(text) for pattern in self._allowed)]

    def _add_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.found.append(f"console {message.type}: {message.text} ({message.location.get('url')})")
