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
NO_THREADS = "thread_unsupported_request"
"""The code of an error after which Anthropic's SDK sends the whole conversation in each request."""


def error_body(error: HTTPError, request_id: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    found: dict[str, Any] = {
        "type": TYPES.get(error.status, "invalid_request_error"),
        "message": error.body["error"]["message"],
    }
    if error.code == NO_THREADS:
        found["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": found, "request_id": request_id}
