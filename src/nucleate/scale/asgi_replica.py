"""A replica of the server without a socket: requests are ASGI scopes and bodies, responses are ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from nucleate.jit.warmup import warm
from nucleate.llm import LLM
from nucleate.server.app import application
from nucleate.server.auth import APIKeys
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import REGEX_SECONDS, Service

MAX_PENDING_MESSAGES = 64
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
        """Start the engine."""
        await self._running.__aenter__()

    async def stop(self) -> None:
        """Stop the engine. Requests in flight end with an error."""
        await self._running.__aexit__(None, None, None)

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yield the response to a request as ASGI messages: as many as there are, but at least one at a time.

        If the caller closes or cancels this generator, the application sees a disconnected client.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_PENDING_MESSAGES)
        requests: asyncio.Queue[Message] = asyncio.Queue()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.create_task(self._answer(scope, requests, messages))
        try:
            while (message := await messages.get()) is not None:
                found, ended = [message], False
                while not messages.empty():
                    following = messages.get_nowait()
                    ended = following is None
                    found += [] if following is None else [following]
                yield found
                if ended:
                    break
            await task
        finally:
            requests.put_nowait({"type": "http.disconnect"})
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _answer(
        self, scope: dict[str, Any], requests: asyncio.Queue[Message], messages: asyncio.Queue[Message | None]
    ) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await messages.put(message)

        try:
            await self._app(scope, requests.get, send)
        finally:
            with suppress(asyncio.QueueFull):  # only if nobody reads any more
                messages.put_nowait(None)
