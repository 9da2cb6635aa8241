"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

from nucleate.server.http_errors import HTTPError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; all others are invalid_request_error."""


def error_body(error: HTTPError, request_id: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    found = {"type": TYPES.get(error.status, "invalid_request_error"), "message": error.body["error"]["message"]}
    return {"type": "error", "error": found, "request_id": request_id}
