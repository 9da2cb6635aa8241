"""An exchange: one HTTP request and its answer. Knows ASGI and OpenAI's error object; knows no route and no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from nucleate.server.http_errors import CLOSE, HTTPError

_NONE: Mapping[str, str] = MappingProxyType({})
BODY_SECONDS = 30.0
"""In which a body must arrive."""
JSON_TYPE, STREAM_TYPE = "application/json", "text/event-stream; charset=utf-8"


@dataclass(eq=False)
class RequestLogFields:
    """What an exchange tells the log beyond what every exchange has."""

    stream: bool | None = None
    prompt: Any = None  #: as the body has it
    structured_outputs: str | None = None  #: the kind of form of the answers
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    finish_reasons: list[str] = field(default_factory=list)


class RequestContext:
    """A request while it is answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.id = f"req_{uuid4().hex}"
        self.start = perf_counter()
        self.status = 0  #: of the answer; 0 as long as it has not begun
        self.left = False  #: the client has gone before the end of the answer
        self.broken: HTTPError | None = None  #: the error that it ended with, a stream that had begun too
        self.told = RequestLogFields()

    @property
    def route(self) -> str:
        """The path of the route that answers, as the routes have it."""
        return getattr(self.scope.get("route"), "path", "")

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return perf_counter() - self.start

    async def body(self, most: int) -> bytes:
        """All of the body, which must be JSON by its type. Raises Refusal."""
        headers = Headers(scope=self.scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise HTTPError(415, f"the Content-Type must be application/json, got {kind[:60]!r}", headers=CLOSE)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPError(415, "the body must not have a Content-Encoding", headers=CLOSE)
        declared = headers.get("content-length", "0")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read(most, int(declared) if declared.isdecimal() else 0)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise HTTPError(408, message, code="timeout", headers=CLOSE) from None

    async def _read(self, most: int, declared: int) -> bytes:
        data, more = bytearray(), True
        while True:
            if max(declared, len(data)) > most:
                raise HTTPError(413, f"the body may have at most {most} bytes", code="body_too_large", headers=CLOSE)
            if not more:
                return bytes(data)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.left = True
                raise ClientDisconnected
            data += message.get("body", b"")
            more = message.get("more_body", False)

    async def unless_left(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, which is cancelled as soon as the client goes."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                self.left = True
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, status: int, body: Any, headers: Mapping[str, str] = _NONE, content_type: str = JSON_TYPE
    ) -> None:
        """The whole answer. body: bytes, or what is to be written as JSON."""
        data = body if isinstance(body, bytes) else written(body)
        await self.begin(status, {"content-length": str(len(data)), **headers}, content_type)
        await self._send({"type": "http.response.body", "body": data})

    async def refuse(self, refusal: HTTPError) -> None:
        """The answer to a request that gets none."""
        self.broken = refusal
        await self.reply(refusal.status, refusal.body, refusal.headers)

    async def begin(self, status: int, headers: Mapping[str, str] = _NONE, content_type: str = STREAM_TYPE) -> None:
        """The head of an answer, here of a stream."""
        if content_type is STREAM_TYPE:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        told = {"content-type": content_type, **headers}
        pairs = [(name.encode(), value.encode()) for name, value in told.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """More of a stream. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def send(self, message: Message) -> None:
        """An ASGI message, for those who answer by themselves."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        await self._send(message)


class ClientDisconnected(Exception):  # noqa: N818
    """The client has gone: there is nobody to answer."""


def written(body: Any) -> bytes:
    """JSON."""
    return json.dumps(body, separators=(",", ":")).encode()
