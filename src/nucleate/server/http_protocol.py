"""uvicorn's HTTP/1.1 protocol with limits on the size and arrival time of the request head.

uvicorn has no options for these limits with httptools (``h11_max_incomplete_event_size`` applies to h11 only, which is
slower), nor for requests that offer another protocol, after whose head httptools stops.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
"""Maximum size of the request line and headers."""
HEAD_TIMEOUT_SECONDS = 10.0
"""Maximum time for them to arrive."""


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
        self._size += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head and self._size > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers exceed the maximum of {MAX_HEAD_BYTES} bytes.")

    def _parse(self, data: bytes) -> None:
        """Parse, as if no request offered another protocol (``Upgrade``), as Java's clients offer HTTP/2.

        The parser stops after such a head, and would take the body for the next request. So a new parser reads the head
        without the offer, and then what follows. The parser knows where the head ends, however its bytes were received.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as stop:
                rest, head = rest[stop.args[0] :], self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return  # see ``_parse``
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._size = True, 0
        super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The head that has been parsed, without the offer of another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *kept, b"", b""])

    def _check_head(self) -> None:
        """Raise ValueError, which becomes status 400, for a request that a proxy in front may read differently."""
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            raise ValueError(f"HTTP version {version!r}")
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("method CONNECT, which asks for a tunnel")
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
