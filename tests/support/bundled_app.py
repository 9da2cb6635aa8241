"""The ASGI application with the bundled model, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from asgi_client import alive

import nucleate as nc
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service

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
