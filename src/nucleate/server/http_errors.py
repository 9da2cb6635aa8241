"""HTTP errors: the status and error object of every failure, and the mapping from exceptions to them.

The body of a response has the format of its path: OpenAI's, Anthropic's or Ollama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nucleate.engine.async_engine import EngineStoppedError
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import STAGES
from nucleate.server.openai.responses import error_body
from nucleate.structured_output.guide import CONSTRAINT_FAILED
from nucleate.tokenization.chat_template import NAMED_TEMPLATES

if TYPE_CHECKING:  # batches need no Starlette
    from starlette.types import Scope


TEMPLATE_NAMES = f"{', '.join(NAMED_TEMPLATES)} or a Jinja file"
ErrorKind = Literal["internal", "model", "engine", "timeout", "queue_full", "shutdown"]
"""Kinds of server errors.

internal: an unexpected exception. model: a failed forward pass or invalid logits. engine: the engine has stopped.
timeout: the request took too long. queue_full: the server is at capacity. shutdown: it is shutting down.
"""
RETRY = MappingProxyType({"retry-after": "1"})
CLOSE = MappingProxyType({"connection": "close"})
"""For requests whose body was not read to its end: the connection cannot be reused."""


class HTTPError(Exception):  # control flow, not always an error
    """A response other than the requested one. kind: the kind of server error; None if the client is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: ErrorKind | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param
        self.status, self.headers, self.kind = status, headers, kind
        error_type = "invalid_request_error" if kind is None else "server_error"
        self.body: dict[str, Any] = error_body(message, param, code, error_type)


def unavailable(message: str, code: str, kind: ErrorKind = "queue_full") -> HTTPError:
    """The server cannot accept a request now; clients retry by themselves."""
    return HTTPError(503, message, code=code, kind=kind, headers=RETRY)


def shutting_down() -> HTTPError:
    return unavailable("Server is shutting down.", "shutting_down", "shutdown")


def timed_out(activity: str, seconds: float) -> HTTPError:
    return HTTPError(504, f"{activity} did not finish within {seconds:g} s.", code="timeout", kind="timeout")


def internal_error(request_id: str) -> HTTPError:
    """An unexpected exception, whose traceback is in the log only."""
    return HTTPError(500, f"Internal server error. See the server log for request {request_id}.", kind="internal")


def generation_failed(reason: str, format_field: str | None = None) -> HTTPError:
    """A sequence ended with an error: 400 if a field of the request caused it, else 500.

    format_field: the body field that sets the structured-output constraint, if there is one.
    """
    if format_field is not None and reason.startswith(CONSTRAINT_FAILED):
        return HTTPError(400, f"{format_field}: {reason}", param=format_field)
    if reason.startswith("stop_regex "):
        return HTTPError(400, reason, param="stop_regex")
    if reason.startswith("invalid logits: ") and (" after " in reason or " must be " in reason):
        stage = STAGES.get(reason.partition(" after ")[2])
        named = [one.name for one in stage.parameters.values() if one.public] if stage else []
        field = named[0] if named else None
        return HTTPError(400, reason if field is None else f"{field}: {reason}", param=field)
    return HTTPError(500, f"Generation failed: {reason}", code="generation_failed", kind="model")


def http_error(error: BaseException) -> HTTPError | None:
    """Return the HTTP error of an exception, or None for an unexpected one."""
    match error:
        case HTTPError():
            return error
        case ParameterError():
            return HTTPError(400, str(error), param=error.field)
        case ModelError():  # such as chat messages for a model without a template
            message = "The model has no chat template. Use /v1/completions, or start the server with --chat-template."
            return HTTPError(400, f"{message} Its values: {TEMPLATE_NAMES}.", code="no_chat_template")
        case EngineStoppedError():
            return unavailable("The engine has stopped.", "engine_stopped", "engine")
        case _:
            return None


ANTHROPIC_TYPES = {
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


def anthropic_error(error: HTTPError, request_id: str | None = None) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": error.body["error"]["message"]}
    if error.code == NO_THREADS:
        found["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": found, "request_id": request_id}


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
