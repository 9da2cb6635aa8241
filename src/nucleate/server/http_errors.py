"""Refusals: why a request gets no answer, as a status and OpenAI's error object. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from nucleate.engine.async_engine import EngineStoppedError
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.responses import error_body
from nucleate.structured_output.guide import CONSTRAINT_FAILED

ErrorKind = Literal["internal", "model", "engine", "timeout", "queue_full", "shutdown"]
"""Why a request failed that was not itself at fault. internal: nobody expected it. model: an answer's logits were not
numbers, or its forward failed. engine: it runs no longer. timeout: it took longer than a request may. queue_full: too
many waited already. shutdown: the server stops."""
RETRY = MappingProxyType({"retry-after": "1"})
CLOSE = MappingProxyType({"connection": "close"})
"""For a body that was not read to its end: nothing after it on this connection could be told from it."""


class HTTPError(Exception):  # it is not always an error
    """What a request is answered with instead. fault: whose it is, if it is not the client's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        fault: ErrorKind | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.fault = status, headers, fault
        kind = "invalid_request_error" if fault is None else "server_error"
        self.body: dict[str, Any] = error_body(message, param, code, kind)


def overloaded(message: str, code: str, fault: ErrorKind = "queue_full") -> HTTPError:
    """The server cannot take a request now; clients come again by themselves."""
    return HTTPError(503, message, code=code, fault=fault, headers=RETRY)


def closing() -> HTTPError:
    """The server ends."""
    return overloaded("the server is shutting down", "shutting_down", "shutdown")


def late(what: str, seconds: float) -> HTTPError:
    """Something was not done in time."""
    return HTTPError(504, f"{what} within {seconds:g} s", code="timeout", fault="timeout")


def unexpected(number: str) -> HTTPError:
    """An error that nobody planned for. number: what the log has it under."""
    return HTTPError(500, f"internal error; the log has it under {number}", fault="internal")


def answer_failed(why: str, form: str | None = None) -> HTTPError:
    """The model failed; or a pattern or a form of the request did, or a stage of it cannot go on with its numbers.

    form: the field of the body that says the form, if there is one.
    """
    if form is not None and why.startswith(CONSTRAINT_FAILED):
        return HTTPError(400, f"{form}: {why}", param=form)
    if why.startswith("stop_regex "):
        return HTTPError(400, why, param="stop_regex")
    if why.startswith("invalid logits: ") and (" after " in why or " must be " in why):
        return HTTPError(400, why)
    return HTTPError(500, f"the answer ended with an error: {why}", code="answer_failed", fault="model")


def too_long(field: str, count: int, context_length: int) -> HTTPError:
    """A prompt that leaves no room for an answer. Clients know it by its code, or by its words."""
    most = f"this model's maximum context length is {context_length} tokens, of a prompt with its answer"
    message = f"the prompt is too long: {most}, but the prompt alone has {count}"
    return HTTPError(400, message, code="context_length_exceeded", param=field)


def no_model(asked: str, name: str) -> HTTPError:
    """A request for another model than the one that is here."""
    message = f"there is no model {shown(asked)} here, but {shown(name)}"
    return HTTPError(404, message, code="model_not_found", param="model")


def refusal_of(error: BaseException) -> HTTPError | None:
    """The refusal that an error means to a client; None for one that nobody planned for."""
    match error:
        case HTTPError():
            return error
        case ParameterError():
            return HTTPError(400, str(error), param=error.field)
        case ModelError():  # such as a conversation for a model without a template
            return HTTPError(400, "the model has no chat template; use /v1/completions", code="no_chat_template")
        case EngineStoppedError():
            return overloaded("the engine has stopped", "engine_stopped", "engine")
        case _:
            return None
