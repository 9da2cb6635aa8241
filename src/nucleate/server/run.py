"""Runs the ASGI application with uvicorn until a signal stops it: its socket, its TLS certificate, its HTTP protocol.

uvicorn's HTTP/1.1 protocol gets limits on the size and arrival time of the request head. uvicorn has no options for
these limits with httptools (``h11_max_incomplete_event_size`` applies to h11 only, which is slower), nor for requests
that offer another protocol, after whose head httptools stops.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nucleate.parameters.parameter import ParameterError
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service

SWITCH_SECONDS = 0.0005
"""A thread that waits for the GIL gets it after this time: the engine needs it often in a step. Python's default is ten
times as long, and a large body that is encoded on another thread would slow down every step by it several times."""
BACKLOG, ACCEPTS_PER_ITERATION = 2048, 16
"""Connections that wait to be accepted, and that the event loop accepts at a time: streams wait for the latter."""
ABORT_SECONDS = 5.0
"""Additional time for aborted streams to send their last frames."""


@contextmanager
def default_sigint_handler() -> Iterator[None]:
    """While the server starts, SIGINT ends the process at once: KeyboardInterrupt would break imports on threads."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(
    app: ASGIApp,
    service: Service,
    log: RequestLog,
    bound: socket.socket,
    on_hangup: Callable[[], None] = lambda: None,
    certificate: Certificate | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then reject new requests and wait for those in flight, up to the timeout.

    A second signal stops the server at once. on_hangup: called on SIGHUP. certificate: for HTTPS. Returns the exit
    status: 1 if the engine has failed, else 0.
    """
    config = uvicorn.Config(
        app,
        http=HTTPProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=service.limits.max_connections,
        backlog=ACCEPTS_PER_ITERATION,
        timeout_keep_alive=service.limits.keep_alive_seconds,
        timeout_notify=0,  # run the callback below every second
        timeout_graceful_shutdown=int(service.limits.shutdown_timeout_seconds + ABORT_SECONDS) + 1,
    )
    config.load()
    config.ssl = None if certificate is None else certificate.context
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # the model and all modules are never garbage
    gc.set_threshold(50_000, 20, 100)  # a large body creates many objects: avoid a pause for each
    server = _Server(config, service, log, on_hangup)
    config.callback_notify = partial(_check_engine, server, service, log)
    server.run(sockets=[bound])
    return int(service.engine.stopped is not None and service.engine.stopped.__cause__ is not None)


async def _check_engine(server: uvicorn.Server, service: Service, log: RequestLog) -> None:
    """Stop the server if the engine has stopped. Runs once per second."""
    if service.engine.stopped is not None and not server.should_exit:
        log.event("engine stopped", 50, service.engine.stopped)
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, which logs its start and end, and aborts requests when the shutdown timeout has passed.

    uvicorn's own ``timeout_graceful_shutdown`` cancels requests without a response, so it is only the last resort.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, log: RequestLog, on_hangup: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._log, self._on_hangup = service, log, on_hangup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)  # uvicorn's one option sets this and the accepted connections per iteration
        if hasattr(signal, "SIGHUP"):  # not on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        for bound in sockets or ():
            self._log.event("ready", url=url_of(bound, tls=self.config.ssl is not None))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        timeout = self._service.limits.shutdown_timeout_seconds
        self._log.event("shutting down", requests_in_flight=self._service.num_requests, timeout_seconds=timeout)
        timer = asyncio.get_running_loop().call_later(timeout, self._service.abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._log.event("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second. uvicorn's method would also raise the signal at the end."""
        self._service.drain()
        if self.should_exit:
            self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # it would log every request that is cut off
        self.should_exit = True


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


class Certificate:
    """A certificate with its chain and private key, as PEM. keyfile: None if the key is in ``certfile``.

    ``context`` serves new connections. Raises ParameterError if the files cannot be loaded.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self.context = self._load(_context())

    def reload(self) -> None:
        """Read the files again. New connections use the new certificate. Raises ParameterError, without any effect."""
        self._load(_context())  # a pair that does not match would leave the context unusable
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        files = str(self._certfile) if self._keyfile is None else f"{self._certfile} with the key {self._keyfile}"
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            text = str(reason).replace("_", " ").lower() if isinstance(error, ssl.SSLError) else reason
            raise ParameterError("ssl_certfile", f"TLS certificate {files} cannot be loaded: {text}") from None
        return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP port. port: 0 for any free port. Raises OSError."""
    bound = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        error.filename = f"{host}:{port}"
        raise
    return bound


@contextmanager
def bind_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix domain socket, and remove its file at the end. The umask decides who may connect. Raises OSError.

    The file of a server that was killed is replaced; another file, or a socket in use, is an error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            _remove_unused(path)
            bound.bind(os.fspath(path))
        except OSError as error:  # such as a path that is too long
            raise OSError(error.errno or 0, error.strerror or str(error), str(path)) from None
        own = path.stat().st_ino
        try:
            yield bound
        finally:
            with suppress(OSError):
                if path.stat().st_ino == own:
                    path.unlink()


def _remove_unused(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(EADDRINUSE, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))


def url_of(bound: socket.socket, *, tls: bool) -> str:
    """Return the address for the log: a URL, or ``unix:PATH``."""
    name = bound.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
