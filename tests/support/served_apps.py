"""The ASGI application without a socket, with a toy model or with the bundled one; a test controls its client."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from toy_models import PagedToy, Toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service, ServiceOptions

JSON = (b"content-type", b"application/json")
SIZE = 4096
TEXT = {"prompt": [7, 8, 9], "max_tokens": 30, "ignore_eos": True, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 3}
NOISE = np.random.default_rng(0).normal(0, 2, (50, SIZE)).astype(np.float32)
Use = Callable[[Any, Service], Awaitable[None]]
Rule = Callable[[tuple[int, ...]], np.ndarray]


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


def rule(seen: tuple[int, ...]) -> np.ndarray:
    """The logits of the toy model: noise that depends on all tokens."""
    return NOISE[hash(seen) % len(NOISE)]


def slowly(seen: tuple[int, ...]) -> np.ndarray:
    """The same, 2 ms later."""
    time.sleep(0.002)
    return rule(seen)


def serve_toy(llm: nc.LLM, use: Use, of: Rule = rule, limits: ServerLimits | None = None, **options: Any) -> None:
    """Run a coroutine function with an application whose model has no weights.

    of: the rule of the model. engine, service: options of the Engine and of ServiceOptions; the others are those of
    ``application``.
    """
    runner = PagedToy(Toy(of, SIZE, 256), 400, 4)
    engine = Engine(runner, llm.tokenizer, backend="reference", **options.pop("engine", {}))
    own = ServiceOptions(**options.pop("service", {}))
    _serve(Service(llm, engine, "toy", nc.SamplingParams(), limits or ServerLimits(), own), engine, use, **options)


def serve_bundled(
    llm: nc.LLM, use: Use, limits: ServerLimits | None = None, reasoning_parser: str | None = None, **options: Any
) -> None:
    """Run a coroutine function with an application that has the bundled model under the name "tiny"."""
    llm = llm if reasoning_parser is None else nc.LLM(reasoning_parser=reasoning_parser)
    engine = llm.new_engine()
    _serve(Service(llm, engine, "tiny", llm.default_params, limits or ServerLimits()), engine, use, **options)


def _serve(service: Service, engine: Engine, use: Use, **options: Any) -> None:
    """Afterwards, no request is in flight and the engine is empty."""

    async def main() -> None:
        async with alive(application(service, RequestLog(), **options)) as app:
            await asyncio.wait_for(use(app, service), 120)
            assert service.num_requests == service.num_sequences == 0
            await asyncio.wait_for(until(lambda: not len(engine)), 60)

    asyncio.run(main())


def _as_test(serve: Callable[..., None], options: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        wanted = inspect.signature(test).parameters
        fixtures = [one for name, one in wanted.items() if name not in ("app", "service", "llm")]

        @functools.wraps(test)
        def run(llm: nc.LLM, **values: Any) -> None:
            async def use(app: Any, service: Service) -> None:
                known = {"app": app, "service": service, "llm": llm, **values}
                await test(**{name: known[name] for name in wanted})

            serve(llm, use, **options)

        own = inspect.Parameter("llm", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([own, *fixtures])  # type: ignore[attr-defined]
        return run

    return decorate


def toy_app(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of a coroutine function with the parameters ``app``, ``service``, ``llm`` and fixtures.

    The options are those of ``serve_toy``.
    """
    return _as_test(serve_toy, options)


def bundled_app(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same with the bundled model; the options are those of ``serve_bundled``."""
    return _as_test(serve_bundled, options)


def check_error(call: Any, status: int, **fields: Any) -> dict[str, Any]:
    """Check that a response is OpenAI's error object with these fields. Returns the error."""
    assert call.status == status
    assert call.over
    assert call.headers["content-type"] == "application/json"
    assert call.headers["x-request-id"].startswith("req_")
    error = call.json["error"]
    assert call.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert {name: error[name] for name in fields} == fields
    assert "Traceback" not in error["message"]
    assert "/src/" not in error["message"]
    return error


def ids_of(parts: list[Any]) -> list[int]:
    return [token for part in parts for token in part["token_ids"]]


def text_of(choice: Any) -> str:
    """The text of a choice of a completion or a chat completion."""
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(parts: list[Any]) -> str:
    """The text of the choices of a stream."""
    return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


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


async def longest_hold(task: asyncio.Future[Any]) -> float:
    """The largest share of a task's time for which the event loop was blocked at once.

    Less than 50 ms counts as nothing: two threads of Python alternate every 5 ms, a large share of a short task.
    """
    start = last = time.perf_counter()
    worst = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    return worst / (last - start) if worst >= 0.05 else 0.0
