"""Runs the ASGI application with uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nucleate.server.http_protocol import HTTPProtocol
from nucleate.server.listening_socket import url_of
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service
from nucleate.server.tls import Certificate

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
