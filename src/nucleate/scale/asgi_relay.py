"""Passes requests of a Serve application to its replicas as ASGI messages, and their responses back. Needs no Ray.

The gateway is an ASGI application in the ingress: it passes a request to the replica of its routing key. A replica is a
server without a socket: requests are ASGI scopes and bodies, responses are ASGI messages.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nucleate.jit.kernel_libraries import warm
from nucleate.llm import LLM
from nucleate.server.access import APIKeys
from nucleate.server.app import application
from nucleate.server.http_errors import HTTPError, error_response, is_anthropic, unavailable
from nucleate.server.limits import ServerLimits
from nucleate.server.openai.json_encoding import encode_json
from nucleate.server.request_log import RequestLog
from nucleate.server.run import SWITCH_SECONDS
from nucleate.server.service import REGEX_SECONDS, Service

ATTEMPTS = 3
"""Replicas that a request is sent to, as long as they die before the response starts."""
SCOPE_FIELDS = (
    *("type", "asgi", "http_version", "method", "path", "raw_path", "query_string", "root_path", "scheme", "headers"),
    *("client", "server"),
)
"""The fields of an ASGI scope that replicas get: the others belong to a process."""

Messages = AsyncIterator[list[Message]]


@dataclass(frozen=True)
class Gateway:
    """Passes requests on, and their responses back as they are generated.

    open_stream: sends a scope, a body and a routing key (None: any replica) to a replica, and returns its response as
    ASGI messages. lost, full: the exceptions of a dead replica, and of a queue without room. max_body_bytes: a longer
    body is passed on up to there, and a replica rejects it.
    """

    open_stream: Callable[[dict[str, Any], bytes, str | None], Messages]
    max_body_bytes: int
    lost: tuple[type[BaseException], ...]
    full: tuple[type[BaseException], ...]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await self._read(receive)
        if body is None:
            return
        fields = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        key = routing_key(body) if scope["method"] == "POST" else None
        response = _Response(scope, send)
        for _ in range(ATTEMPTS):
            try:
                async for messages in self.open_stream(fields, body, key):
                    for message in messages:
                        await response.send(message)
            except self.full:
                await response.fail(unavailable("All replicas are at capacity. Retry after 1 s.", "queue_full"))
            except self.lost:
                if not response.content_type:
                    continue  # nothing was sent: another replica can answer
                await response.fail(_lost())
            return
        await response.fail(_lost())

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnects."""
        data, more = bytearray(), True
        while more and len(data) <= self.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            data += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(data)


class _Response:
    """The response to a client. content_type: once it has started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.content_type = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.content_type = dict(message["headers"]).get(b"content-type", b"-")
        await self._send(message)

    async def fail(self, error: HTTPError) -> None:
        """Send an error: as the response, or as the end of a stream. A response of known length is cut off."""
        body = encode_json(error_response(self._scope, error))
        if not self.content_type:
            headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": error.status, "headers": pairs})
            await self._send({"type": "http.response.body", "body": body})
        elif self.content_type.startswith(b"text/event-stream"):
            name = b"event: error\n" if is_anthropic(self._scope) else b""
            await self._send({"type": "http.response.body", "body": name + b"data: " + body + b"\n\n"})
        elif b"ndjson" in self.content_type:
            await self._send({"type": "http.response.body", "body": body + b"\n"})
        else:
            raise ConnectionError(error.message)


def _lost() -> HTTPError:
    return HTTPError(503, "The replica of this request was lost.", code="replica_lost", kind="engine")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{event}.complete"})
        if event == "shutdown":
            return


KEY_CHARACTERS = 1024
"""Characters of each part of a prompt that count, from its beginning."""
_LEADING_ROLES = ("system", "developer")
_INSTRUCTIONS = ("instructions", "system")  # of the Responses API; of Anthropic's and Ollama's
_SUBJECTS = ("messages", "input", "prompt")


def routing_key(body: bytes) -> str | None:
    """Return the routing key of a request body; None if it has no prompt.

    It is a hash of the beginning of the instructions (or system messages) and of the beginning of the first message
    after them, or of the prompt. So the turns of a conversation have one key, as have questions about one document;
    different conversations with the same system message have different ones, and spread over the replicas.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    parts = [json.dumps(part)[:KEY_CHARACTERS] for part in _parts(value)]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest() if parts else None


def _parts(body: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a prompt that make the key."""
    subject = next((body[name] for name in _SUBJECTS if body.get(name)), None)
    if subject is None:
        return
    yield from (body[name] for name in _INSTRUCTIONS if body.get(name))
    first = subject[0] if isinstance(subject, list) and subject else None
    if not isinstance(first, dict):
        yield first if isinstance(first, str | list) else subject  # the first of several prompts, or the only one
        return
    for message in subject:  # the system messages at the beginning, and the first message after them
        if not isinstance(message, dict):
            return
        yield message.get("content")
        if message.get("role") not in _LEADING_ROLES:
            return


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

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await messages.put(message)

        task = asyncio.ensure_future(self._app(scope, requests.get, send))
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


async def _available(messages: asyncio.Queue[Message], task: asyncio.Future[None]) -> list[Message]:
    """Return the messages so far, but at least one; none if the task has ended and all are taken."""
    waiting = asyncio.ensure_future(messages.get())
    either: set[asyncio.Future[Any]] = {waiting, task}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        found = [waiting.result()] if waiting.done() else []
        waiting.cancel()
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
