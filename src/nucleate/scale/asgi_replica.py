"""A replica of the server without a socket: requests are ASGI scopes and bodies, responses are ASGI messages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from nucleate.jit.warmup import warm
from nucleate.llm import LLM
from nucleate.server.access import APIKeys
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.run import SWITCH_SECONDS
from nucleate.server.service import REGEX_SECONDS, Service

FLUSH_SECONDS = 0.05
"""Time within which the events of a stream travel together, after the first: each message costs Ray about a
millisecond, in the gateway and in the replica."""
MAX_PENDING_MESSAGES = 256
"""Messages of a response that wait to be sent. The endpoint waits meanwhile, and pauses the request in the engine."""
REPLICA_HEADER = b"x-nucleate-replica"


class AsgiReplica:
    """A model, its engine and the ASGI application, between ``start`` and ``stop``.

    llm, engine: keyword arguments of ``LLM`` and ``LLM.new_engine``. params: parameters that a request does not set.
    limits: fields of ``ServerLimits``. name: the model name. keys: accepted API keys. replica: its name,
    for the response header ``x-nucleate-replica``. Raises ParameterError and ModelError.
    """

    def __init__(
        self,
        llm: Mapping[str, Any],
        engine: Mapping[str, Any],
        params: Mapping[str, Any],
        limits: Mapping[str, Any],
        *,
        name: str,
        keys: frozenset[str] = frozenset(),
        replica: str = "",
    ) -> None:
        model = LLM(**llm)
        new = model.new_engine(**engine, regex_seconds=REGEX_SECONDS)
        warm(background=True, also=new.runner.warm)
        self.service = Service(model, new, name, model.default_params.override(**params), ServerLimits(**limits))
        self._app: ASGIApp = application(self.service, RequestLog(), keys=APIKeys(keys))
        self._running = self.service.running()
        self._header = (REPLICA_HEADER, replica.encode())

    async def start(self) -> None:
        """Start the engine, whose thread then gets the GIL as fast as in ``nucleate serve``."""
        sys.setswitchinterval(SWITCH_SECONDS)
        await self._running.__aenter__()

    async def stop(self) -> None:
        """Stop the engine. Requests in flight end with an error."""
        await self._running.__aexit__(None, None, None)

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yield the response to a request as ASGI messages: the first ones at once, further ones per FLUSH_SECONDS.

        If the caller closes or cancels this generator, the application sees a disconnected client.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue(MAX_PENDING_MESSAGES)
        requests: asyncio.Queue[Message] = asyncio.Queue()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.create_task(self._answer(scope, requests, messages))
        try:
            while found := await _available(messages, task):
                yield _merged(found)
                if "body" in found[-1]:
                    await asyncio.wait({task}, timeout=FLUSH_SECONDS)
            await task
        finally:
            requests.put_nowait({"type": "http.disconnect"})
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _answer(
        self, scope: dict[str, Any], requests: asyncio.Queue[Message], messages: asyncio.Queue[Message]
    ) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await messages.put(message)

        await self._app(scope, requests.get, send)


async def _available(messages: asyncio.Queue[Message], task: asyncio.Task[None]) -> list[Message]:
    """Return the messages so far, but at least one; none if the task has ended and all are taken."""
    if messages.empty() and not task.done():
        waiting = asyncio.ensure_future(messages.get())
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            found = [waiting.result()] if waiting.done() else []
            waiting.cancel()
    else:
        found = []
    while not messages.empty():
        found.append(messages.get_nowait())
    return found


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with successive parts of a body as one."""
    made: list[Message] = []
    for message in messages:
        if made and "body" in message and "body" in made[-1]:
            made[-1] = {**message, "body": made[-1]["body"] + message["body"]}
        else:
            made.append(message)
    return made
