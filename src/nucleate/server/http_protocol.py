"""uvicorn's HTTP/1.1 protocol with limits on the size and arrival time of the request head.

uvicorn has no options for these limits with httptools (``h11_max_incomplete_event_size`` applies to h11 only, which is
slower), nor for requests that offer a protocol upgrade, whose body httptools drops.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
"""Maximum size of the request line and headers."""
HEAD_TIMEOUT_SECONDS = 10.0
"""Maximum time for them to arrive."""

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class HTTPProtocol(HttpToolsProtocol):
    """One connection."""

    _in_head, _size = True, 0  # bytes of the head so far
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # The parser leaves out the body of a request that offers another protocol, as Java's does with HTTP/2.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        self._size += len(data)
        super().data_received(data)
        if self._in_head and self._size > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers exceed the maximum of {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._check_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._size = True, 0
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raise ValueError, which becomes status 400, for a request that a proxy in front may read differently."""
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            raise ValueError(f"HTTP version {version!r}")
        if (hosts := names.count(b"host")) != 1 and (hosts or version == "1.1"):
            raise ValueError(f"{hosts} Host headers")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise ValueError("a transfer encoding other than chunked")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
