"""HTTP/1.1 as uvicorn reads it, with bounds: a head has a size and a time, and errors are OpenAI's. Knows no route.

Bodies have their bounds elsewhere (``Exchange.body``), as their errors name the limit.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nucleate.server.exchange import CROWDED, JSON_TYPE, written
from nucleate.server.limits import Limits
from nucleate.server.wire.responses import error_body

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """A connection. Subclasses say the limits."""

    limits: Limits
    _in_head, _closing = True, False
    _size = 0  # bytes of the head so far
    _heads = 0  # that have been read
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._in_head:
            self._start()
            # The parser leaves out the body of a request that offers another protocol, as Java's does with HTTP/2.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        before = self._in_head, self._heads
        super().data_received(data)
        if before == (True, self._heads) and self._in_head:  # else there may be bodies in it
            self._size += len(data)
            if self._size > self.limits.max_head:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"may have at most {self.limits.max_head} bytes"
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.connections) > self.limits.connections:
            self.scope[CROWDED] = True  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head, self._size, self._heads = False, 0, self._heads + 1
        self._stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser cannot read."""
        self._refuse(HTTPStatus.BAD_REQUEST, "is not HTTP/1.1")

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_seconds, self._late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"did not arrive within {self.limits.head_seconds:g} s")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Say why and hang up; say nothing to a client that said nothing, or that is in the middle of an answer."""
        self._closing = True
        self._stop()
        silent = self._in_head and not self._size and status is HTTPStatus.REQUEST_TIMEOUT
        if not silent and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
            body = written(error_body(f"the head of the request {why}"))
            lines = (
                f"HTTP/1.1 {status.value} {status.phrase}",
                f"content-type: {JSON_TYPE}",
                f"content-length: {len(body)}",
                "connection: close",
            )
            self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self.transport.close()
