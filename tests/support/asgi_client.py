"""Calls the ASGI application without a socket; a test controls when the client reads and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import nucleate as nc
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service

JSON = (b"content-type", b"application/json")


class Call:
    """A request and its response so far."""

    def __init__(self, app: Any, method: str, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.status, self.headers, self.data, self.over = 0, {}, b"", False
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status
            assert not self.over
            self.data += message.get("body", b"")
            self.over = not message.get("more_body", False)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def frames(self) -> list[Any]:
        """The decoded data of a stream's frames; comments unchanged."""
        made = []
        for frame in self.data.decode().split("\n\n")[:-1]:
            kind, _, data = frame.partition(": ")
            made.append(frame if kind != "data" else data if data == "[DONE]" else json.loads(data))
        return made


def begin(app: Any, path: str, body: Any = None, method: str = "", headers: tuple = (JSON,)) -> Call:
    """Start a request. body: JSON or bytes; without a body it is a GET request."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Call(app, method or ("GET" if body is None else "POST"), path, data, tuple(headers))


async def ask(app: Any, path: str, body: Any = None, **rest: Any) -> Call:
    """Send a request and wait for the response."""
    call = begin(app, path, body, **rest)
    await asyncio.wait_for(call.task, 60)
    return call


@asynccontextmanager
async def alive(app: Any) -> AsyncIterator[Any]:
    """Run the application's lifespan."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, incoming.get, outgoing.put))
    incoming.put_nowait({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await task


NAME = "tiny"
Use = Callable[[Any, Service], Awaitable[None]]


def serve(llm: nc.LLM, use: Use, **options: Any) -> None:
    """Run a coroutine function with the application; afterwards, no request is in flight."""
    service = Service(llm, llm.new_engine(), NAME, llm.default_params, options.pop("limits", ServerLimits()))

    async def main() -> None:
        async with alive(application(service, RequestLog(), **options)) as app:
            await asyncio.wait_for(use(app, service), 120)
            assert service.num_requests == service.num_sequences == 0

    asyncio.run(main())


def events(call: Any) -> list[dict[str, Any]]:
    """The data of the named events of a stream; each has the name as its type."""
    made = []
    for frame in call.data.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert made[-1]["type"] == name.removeprefix("event: ")
    return made


async def until(true: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
