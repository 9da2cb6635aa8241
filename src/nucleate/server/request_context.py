"""One HTTP request: its context (request id, body, response, disconnects), and the middleware that creates it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from types import MappingProxyType
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nucleate.outputs import EngineStats
from nucleate.server.chat_api import Timing
from nucleate.server.http_errors import CLOSE, HTTPError, error_response, http_error, internal_error
from nucleate.server.metrics import Metrics
from nucleate.server.openai.json_encoding import encode_json
from nucleate.server.request_log import RequestLog

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
BODY_TIMEOUT_SECONDS = 30.0
"""Maximum time for a request body to arrive."""
PRIVATE_FIELDS = (
    *("prompt", "messages", "tokens", "response_format", "structured_outputs", "grammar"),
    *("input", "instructions", "text", "system", "output_config", "format"),  # of other APIs
)
"""Body fields whose content is not logged."""
MAX_ERROR_CHARACTERS = 500
"""Maximum length of an error message in the log."""
IGNORED_FIELDS_HEADER = "x-nucleate-ignored-fields"
"""The response header with the names of unknown fields, percent-encoded and separated by commas."""
MAX_IGNORED_NAME, MAX_IGNORED_NAMES, MAX_IGNORED_HEADER = 100, 20, 2000
"""Maximum characters of such a name; maximum names; maximum characters of the header."""
LINGER_SECONDS = 5.0
"""Maximum time to read the rest of a body after an error response: closed at once, the connection could be reset before
the client has the response."""
ERROR_FRAME_TIMEOUT_SECONDS = 1.0
"""Maximum time to send the error frame that ends a stream, if the client does not read."""
LOAD_HEADER = "endpoint-load-metrics"
JSON_TYPE, STREAM_TYPE = "application/json", "text/event-stream; charset=utf-8"


@dataclass(eq=False)
class RequestLogFields:
    """Log fields of generation requests, beyond those of every request."""

    stream: bool | None = None
    prompt: Any = None  #: as in the body
    structured_outputs: str | None = None  #: the kind of constraint
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    time_to_first_token_seconds: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ignored_fields: Sequence[str] | None = None  #: names of unknown body fields


def _client_id(scope: Scope) -> str:
    """Return the id that the client has given its request, if it can be returned in a header and written to a log."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else ""


class RequestContext:
    """A request in flight. ``id``: ``X-Request-Id`` of its headers, else a random one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.id = _client_id(scope) or f"req_{uuid4().hex}"
        self.start_time = perf_counter()
        self.status = 0  #: HTTP status; 0 until the response has started
        self.disconnected = False  #: the client disconnected before the end of the response
        self.error: HTTPError | None = None  #: the error that ended the response, also in the middle of a stream
        self.log = RequestLogFields()
        self._headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.id.encode())]  # of the response
        self._unread = False  # a part of the body that is needed
        self.error_frame: Callable[[HTTPError], bytes] | None = None
        """Makes the last frame of the stream that has started."""

    @property
    def route(self) -> str:
        """The path of the matched route, such as ``/v1/models/{model:path}``."""
        return getattr(self.scope.get("route"), "path", "")

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self.start_time

    def timing(self) -> Timing:
        return Timing(self.seconds, self.log.time_to_first_token_seconds or 0.0)

    async def body(self, max_bytes: int) -> bytes:
        """Read the whole body, whose content type must be JSON. Raises HTTPError."""
        headers, self._unread = Headers(scope=self.scope), True
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != JSON_TYPE:
            message = f"Content-Type must be application/json, got {content_type[:60]!r}."
            raise HTTPError(415, message, headers=CLOSE)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPError(415, "Content-Encoding is not supported.", headers=CLOSE)
        declared = headers.get("content-length", "0")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                return await self._read(max_bytes, int(declared) if declared.isdecimal() else 0)
        except TimeoutError:
            message = f"The request body did not arrive within {BODY_TIMEOUT_SECONDS:g} s."
            raise HTTPError(408, message, code="timeout", headers=CLOSE) from None

    async def _read(self, max_bytes: int, declared: int) -> bytes:
        data = bytearray()
        while True:
            if max(declared, len(data)) > max_bytes:
                message = f"The request body exceeds the maximum of {max_bytes} bytes."
                raise HTTPError(413, message, code="body_too_large", headers=CLOSE)
            if not self._unread:
                return bytes(data)
            event = await self._receive()
            if event["type"] == "http.disconnect":
                self.disconnected = True
                raise ClientDisconnected
            data += event.get("body", b"")
            self._unread = event.get("more_body", False)

    async def until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; cancel it as soon as the client disconnects."""
        task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(self._disconnect())
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                self.disconnected = True
        finally:
            disconnect.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        status: int,
        body: Any,
        headers: Mapping[str, str] = _NO_HEADERS,
        content_type: str = JSON_TYPE,
        *,
        last: bool = True,
    ) -> None:
        """Send a whole response. body: bytes, or a value to encode as JSON. last: whether it ends here."""
        data = body if isinstance(body, bytes) else encode_json(body)
        await self.start_response(status, {"content-length": str(len(data)), **headers}, content_type)
        await self.write(data, last=last)

    async def reply_in_pieces(self, pieces: AsyncIterator[bytes], content_type: str = JSON_TYPE) -> None:
        """Send a whole response of status 200 in pieces. Waits while the client does not read."""
        piece = await anext(pieces)
        async for following in pieces:
            if not self.status:
                await self.start_response(200, content_type=content_type)
            await self.write(piece)
            piece = following
        if self.status:
            await self.write(piece, last=True)
        else:
            await self.reply(200, piece, content_type=content_type)

    async def send_error(self, error: HTTPError) -> None:
        """Send an error as the response, or as the last frame of the stream that has started."""
        self.error = error
        if self.status and self.error_frame is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ERROR_FRAME_TIMEOUT_SECONDS):
                    await self.write(self.error_frame(error), last=True)
            return
        lingers = self._unread and not self.disconnected
        await self.reply(error.status, error_response(self.scope, error, self.id), error.headers, last=not lingers)
        if lingers:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while self._unread:  # drop the rest of the body
                        event = await self._receive()
                        self._unread = event["type"] == "http.request" and event.get("more_body", False)
            await self.write(b"", last=True)

    async def start_response(
        self, status: int, headers: Mapping[str, str] = _NO_HEADERS, content_type: str = STREAM_TYPE
    ) -> None:
        """Send the status and headers, by default of a stream."""
        if content_type == STREAM_TYPE:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        pairs = [(name.encode(), value.encode()) for name, value in {"content-type": content_type, **headers}.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send the next part of a stream. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def report_ignored_fields(self, names: Sequence[str]) -> None:
        """Report unknown fields of the body in the log and in a header of the response, both of bounded length."""
        if not names:
            return
        cut = [name[:MAX_IGNORED_NAME] for name in names[:MAX_IGNORED_NAMES]]
        self.log.ignored_fields = cut
        text = ", ".join(quote(name, safe="", errors="replace") for name in cut)
        self._headers.append((IGNORED_FIELDS_HEADER.encode(), text[:MAX_IGNORED_HEADER].encode()))

    def report_load(self, stats: Callable[[], EngineStats]) -> None:
        """Report the load in a header of the response, if the request asks for it: an ORCA load report, as in vLLM."""
        form = Headers(scope=self.scope).get("endpoint-load-metrics-format", "").upper()
        if form not in ("TEXT", "JSON"):
            return
        now = stats()
        used = now.num_used_kv_blocks / max(now.num_kv_blocks, 1)
        load = {"kv_cache_usage_perc": used, "num_requests_waiting": float(now.num_waiting_seqs)}
        if form == "TEXT":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        else:
            text = encode_json({"named_metrics": load}).decode()
        self._headers.append((LOAD_HEADER.encode(), f"{form} {text}".encode()))

    async def send(self, message: Message) -> None:
        """Send an ASGI message, and add the request id to the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)


class ClientDisconnected(Exception):  # noqa: N818
    """The client disconnected: no response is needed."""


class RequestMiddleware:
    """Outermost middleware: creates the context, turns exceptions into error responses, logs and counts requests."""

    def __init__(self, app: ASGIApp, log: RequestLog, metrics: Metrics, root_path: str = "") -> None:
        self._app, self._log, self._metrics, self._root_path = app, log, metrics, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(scope, receive, send)
        scope["nucleate.context"] = context
        if self._root_path:  # the router removes it from the path, if it is there
            scope["root_path"] = self._root_path
        scope["app"] = self  # makes the router raise for unknown routes
        unexpected: BaseException | None = None
        try:
            await self._app(scope, receive, context.send)
        except ClientDisconnected:
            pass
        except HTTPException as error:
            await context.send_error(_router_error(error, scope))
        except Exception as error:  # noqa: BLE001  # every exception becomes an error response
            known = http_error(error)
            if known is None or (context.status and context.error_frame is None):
                unexpected = error
            if not context.status or context.error_frame is not None:
                await context.send_error(known or internal_error(context.id))
        finally:
            self._record(context, unexpected)

    def _record(self, context: RequestContext, error: BaseException | None) -> None:
        """Add a finished request to the metrics and the log. error: an unexpected exception."""
        fields, scope, response = dict(vars(context.log)), context.scope, context.error
        kind = response.kind if response is not None else None if error is None else "internal"
        self._metrics.count_request(
            context.route, context.status, context.seconds, error=kind, disconnected=context.disconnected
        )
        client, prompt = scope.get("client"), fields.pop("prompt")
        if fields["prompt_tokens"] is None:
            fields["completion_tokens"] = None
        fields["finish_reasons"] = fields["finish_reasons"] or None
        self._log.request(
            id=context.id,
            client=client and f"{client[0]}:{client[1]}",
            method=scope["method"],
            route=context.route or scope["path"],
            status=context.status,
            duration_seconds=context.seconds,
            **fields,
            client_disconnected=context.disconnected or None,
            error_param=response and response.param,
            error_code=response and response.code,
            error_message=response and self._loggable(response),
            error=error,
            prompt=str(prompt) if self._log.prompts and prompt is not None else None,
        )

    def _loggable(self, error: HTTPError) -> str | None:
        """Return the message of an error, unless it may quote the prompt or a grammar, which the log does not have."""
        is_private = error.param is not None and error.param.startswith(PRIVATE_FIELDS)
        return None if is_private and not self._log.prompts else error.message[:MAX_ERROR_CHARACTERS]


async def reply_with(make: Callable[[], Any], context: RequestContext) -> None:
    """Answer a request with what a function returns now."""
    await context.reply(200, make())


class Handler:
    """The ASGI application of one route: calls a coroutine function with the request context."""

    def __init__(self, handle: Callable[[RequestContext], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope["nucleate.context"])


def _router_error(error: HTTPException, scope: Scope) -> HTTPError:
    path, method = scope["path"][:100], scope["method"][:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"Method {method} is not allowed for {path}."
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"Path {path} does not exist."
    else:
        message = HTTPStatus(error.status_code).phrase
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return HTTPError(error.status_code, message, headers=headers)
