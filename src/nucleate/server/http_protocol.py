"""HTTP/1.1 as uvicorn reads it, with what it has no option for: bounds of the head of a request. Knows no route."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 2**16
"""Bytes of a request's path and headers."""
HEAD_SECONDS = 10.0
"""In which they must arrive."""

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class HTTPProtocol(HttpToolsProtocol):
    """A connection."""

    _in_head, _size = True, 0  # bytes of the head so far
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # The parser leaves out the body of a request that offers another protocol, as Java's does with HTTP/2.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        self._size += len(data)
        super().data_received(data)
        if self._in_head and self._size > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The path and headers may have at most {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._size = True, 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
