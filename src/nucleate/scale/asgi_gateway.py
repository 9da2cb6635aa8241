"""The ingress of a Serve application: an ASGI application that passes requests to the replica of their routing key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from nucleate.scale.routing_key import routing_key
from nucleate.server.http_errors import HTTPError, error_response, is_anthropic, unavailable
from nucleate.server.openai.json_encoding import encode_json

ATTEMPTS = 3
"""Replicas that a request is sent to, as long as they die before the response starts."""
SCOPE_FIELDS = (
    *("type", "asgi", "http_version", "method", "path", "raw_path", "query_string", "root_path", "scheme", "headers"),
    *("client", "server"),
)
"""The fields of an ASGI scope that replicas get: the others belong to a process."""

Messages = AsyncIterator[list[Message]]


class Gateway:
    """Passes requests on, and their responses back as they are generated.

    open_stream: sends a scope, a body and a routing key (None: any replica) to a replica, and returns its response as
    ASGI messages. lost, full: the exceptions of a dead replica, and of a queue without room. max_body_bytes: a longer
    body is passed on up to there, and a replica rejects it.
    """

    def __init__(
        self,
        open_stream: Callable[[dict[str, Any], bytes, str | None], Messages],
        *,
        max_body_bytes: int,
        lost: tuple[type[BaseException], ...],
        full: tuple[type[BaseException], ...],
    ) -> None:
        self._open_stream, self._max_body_bytes = open_stream, max_body_bytes
        self._lost, self._full = lost, full

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
                async for messages in self._open_stream(fields, body, key):
                    for message in messages:
                        await response.send(message)
            except self._full:
                await response.fail(unavailable("All replicas are at capacity. Retry after 1 s.", "queue_full"))
            except self._lost:
                if not response.content_type:
                    continue  # nothing was sent: another replica can answer
                await response.fail(_lost())
            return
        await response.fail(_lost())

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnects."""
        data, more = bytearray(), True
        while more and len(data) <= self._max_body_bytes:
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
