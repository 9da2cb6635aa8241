"""The body of an error response in the format of its path: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from nucleate.server.anthropic.message_errors import error_body as anthropic_error
from nucleate.server.http_errors import HTTPError

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""The beginnings of these paths."""


def is_anthropic(scope: Scope) -> bool:
    """Whether the path of a request is one of Anthropic's API."""
    return _path(scope).startswith(ANTHROPIC)


def error_response(scope: Scope, error: HTTPError, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of the response to a request that fails."""
    if is_anthropic(scope):
        return anthropic_error(error, request_id)
    if _path(scope).startswith(OLLAMA):
        return {"error": error.body["error"]["message"]}
    return error.body


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
