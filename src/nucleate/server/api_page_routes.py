"""The page ``/docs``: a readable version of the OpenAPI document, without files of other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from nucleate.inspector.page import TYPES
from nucleate.server.http_errors import HTTPError
from nucleate.server.inspector_routes import HEADERS
from nucleate.server.request_context import RequestContext

OPEN_ROUTES: Final = frozenset({"docs", "docs/{file}"})
"""Names of the routes that need no API key: the page is the same for everybody; the document that it shows is not."""


def routes() -> dict[str, tuple[str, Callable[[RequestContext], Any]]]:
    """The handlers with their method, by path."""
    return {"/docs": ("GET", _page), "/docs/{file}": ("GET", _file)}


async def _page(context: RequestContext) -> None:
    await _send(context, "index.html")


async def _file(context: RequestContext) -> None:
    await _send(context, context.scope["path_params"]["file"])


async def _send(context: RequestContext, name: str) -> None:
    found = _files().get(name)
    if found is None:
        raise HTTPError(404, f"The API page has no file {name[:60]!r}.")
    content, content_type = found
    await context.reply(200, content, HEADERS, content_type)


@cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    found = (files("nucleate.server") / "api_page").iterdir()
    return {file.name: (file.read_bytes(), TYPES[file.name.rpartition(".")[2]]) for file in found}
