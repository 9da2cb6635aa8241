"""The chat page: the front page of the server, its files, and the settings that its controls need.

The page uses the API like any other client. Its modules share those of the inspector (form fields, colours, the prompt
for an API key), which are sent from the same folder, also where the inspector is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from nucleate.inspector.page import inspector_file, page_files
from nucleate.server.inspector_routes import Routes, page_routes
from nucleate.server.request_context import RequestContext

RUNNING: Final = b"Ollama is running"
"""What programs get at the front page. Clients of Ollama's API look for this text before they send a request."""


def chat_file(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of a file of the page; None if there is none of this name.

    name: that of a file of the page, or of the inspector's.
    """
    return page_files("nucleate.server", "chat_page").get(name) or inspector_file(name)


def chat_routes(describe: Callable[[], Mapping[str, Any]]) -> Routes:
    """Return the routes of the chat page.

    describe: returns the model, the stages with their parameters, and the defaults.
    """
    routes = page_routes("/chat", "The chat page", chat_file)
    _, send = routes.pop("/chat")

    async def front(context: RequestContext) -> None:
        if _accepts_html(context):
            await send(context)
        else:
            await context.reply(200, RUNNING, {"vary": "accept"}, "text/plain; charset=utf-8")

    async def settings(context: RequestContext) -> None:
        await context.reply(200, dict(describe()), {"cache-control": "no-store"})

    return {"/": ("GET", front), "/chat/api/settings": ("GET", settings), **routes}


def _accepts_html(context: RequestContext) -> bool:
    """Return whether the client is a browser: programs accept anything, or JSON."""
    return any(b"text/html" in value for name, value in context.scope["headers"] if name == b"accept")
