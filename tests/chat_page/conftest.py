"""The chat page, open in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from browser_fixtures import browser, context, errors, key, locked_server, page, server
from chat_page import ChatPage

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from server_process import Server

__all__ = ["browser", "context", "errors", "key", "locked_server", "page", "server"]


@pytest.fixture
def chat(page: Page, server: Server) -> ChatPage:
    """The open page of a browser that was never here before."""
    made = ChatPage(page)
    made.open(server.url)
    return made
