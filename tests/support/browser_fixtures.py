"""Fixtures of tests of pages: the browser, and the servers whose pages it opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chromium import PageErrors, chromium
from server_process import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

MILLISECONDS = 30_000  # the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser per module: see `chromium` for why it cannot stay open."""
    with chromium() as running:
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser profile without history, with a clipboard."""
    made = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    made.set_default_timeout(MILLISECONDS)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture(autouse=True)
def errors(page: Page) -> Iterator[PageErrors]:
    """The page's console errors, warnings and uncaught exceptions. They fail the test unless it allows them."""
    found = PageErrors(page)
    yield found
    assert found.unexpected() == []


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server with the bundled model, and no API key."""
    with Server() as running:
        yield running.warmed()


@pytest.fixture(scope="session")
def key() -> str:
    """The API key of the locked server."""
    return "a-key-of-this-test"


@pytest.fixture(scope="session")
def locked_server(key: str) -> Iterator[Server]:
    """A server that needs an API key, and keeps the logits of 80 steps."""
    with Server("--api-key", key, "--max-inspector-bytes", str(80 * 4 * 4096)) as running:
        yield running.warmed()
