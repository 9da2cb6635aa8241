"""The inspector's page, open in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from browser_fixtures import browser, context, errors, key, locked_server, page, server
from inspector_page import InspectorPage

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from server_process import Server

__all__ = ["browser", "context", "errors", "key", "locked_server", "page", "server"]


@pytest.fixture
def inspector(request: pytest.FixtureRequest, page: Page, server: Server) -> InspectorPage:
    """The open page, with PROMPT and GIVEN of the test's module if it has these parameters."""
    made, given = InspectorPage(page), getattr(request.module, "GIVEN", None)
    made.open(server.url, None if given is None else {"prompt": request.module.PROMPT, "params": given})
    return made
