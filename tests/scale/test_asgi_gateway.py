"""The gateway and the replica of the Serve application, without Ray."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import nucleate as nc
from nucleate.scale.asgi_relay import ATTEMPTS, FLUSH_SECONDS, AsgiReplica, Gateway

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"content-type", b"application/json")],
}
STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENT = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


class LostError(Exception):
    """A replica has died."""


class FullError(Exception):
    """All queues are full."""


class Replicas:
    """Replicas that send these messages, or raise these errors, one list per attempt."""

    def __init__(self, *attempts: list[Any]) -> None:
        self.attempts, self.calls = [*attempts], []

    async def open_stream(self, scope: dict[str, Any], body: bytes, key: str | None) -> AsyncIterator[list[Any]]:
        self.calls.append((scope, body, key))
        for item in self.attempts.pop(0):
            if isinstance(item, Exception):
                raise item
            yield [item]


def ask(replicas: Replicas, path: str = "/v1/completions", body: bytes = b'{"prompt": "x"}') -> list[Any]:
    """The messages that a client gets."""
    sent: list[Any] = []
    given = [{"type": "http.request", "body": body[:5], "more_body": True}, {"type": "http.request", "body": body[5:]}]

    async def receive() -> Any:
        return given.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    gateway = Gateway(replicas.open_stream, max_body_bytes=100, lost=(LostError,), full=(FullError,))
    asyncio.run(gateway({**SCOPE, "path": path, "app": object()}, receive, send))
    return sent


def test_messages_are_passed_on() -> None:
    replicas = Replicas([STREAM, EVENT, END])
    assert ask(replicas) == [STREAM, EVENT, END]
    ((scope, body, key),) = replicas.calls
    assert (scope["path"], body, len(key), "app" in scope) == ("/v1/completions", b'{"prompt": "x"}', 32, False)


def test_a_replica_that_dies_before_the_response_is_replaced_by_another() -> None:
    replicas = Replicas([LostError()], [LostError()], [STREAM, END])
    assert ask(replicas) == [STREAM, END]
    assert len(replicas.calls) == 3


def test_a_request_that_kills_every_replica_is_an_error() -> None:
    replicas = Replicas(*[[LostError()]] * ATTEMPTS)
    start, body = ask(replicas)
    assert start["status"] == 503
    assert (b"retry-after", b"1") not in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "replica_lost"


def test_full_queues_are_status_503() -> None:
    start, body = ask(Replicas([FullError()]))
    assert (start["status"], (b"retry-after", b"1") in start["headers"]) == (503, True)
    assert json.loads(body["body"])["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("path", "content_type", "expected"),
    [
        ("/v1/completions", b"text/event-stream", b'data: {"error":{"message":"The replica'),
        ("/v1/messages", b"text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/api/chat", b"application/x-ndjson", b'{"error":"The replica'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_an_error(path: str, content_type: bytes, expected: bytes) -> None:
    start = {**STREAM, "headers": [(b"content-type", content_type)]}
    replicas = Replicas([start, EVENT, LostError()])
    *_, last = ask(replicas, path)
    assert last["body"].startswith(expected)
    assert not last.get("more_body")
    assert len(replicas.calls) == 1


def test_a_response_of_known_length_is_cut_off() -> None:
    start = {**STREAM, "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")]}
    with pytest.raises(ConnectionError, match="was lost"):
        ask(Replicas([start, EVENT, LostError()]))


def test_a_body_that_is_too_long_is_cut() -> None:
    replicas = Replicas([STREAM, END])
    ask(replicas, body=b"x" * 10_000)
    assert 100 < len(replicas.calls[0][1]) <= 10_000


def serve(use: Callable[[AsgiReplica], Any]) -> None:
    """Run a coroutine function with a replica."""

    async def main() -> None:
        replica = AsgiReplica({}, {}, {"temperature": 0.7}, {}, name="tiny", replica="r1")
        await replica.start()
        try:
            await asyncio.wait_for(use(replica), 60)
        finally:
            await replica.stop()

    asyncio.run(main())


def request(**body: Any) -> tuple[dict[str, Any], bytes]:
    return {**SCOPE, "query_string": b"", "client": None}, json.dumps(body).encode()


def test_a_replica_answers_as_the_library(llm: nc.LLM) -> None:
    async def use(replica: AsgiReplica) -> None:
        batches = [batch async for batch in replica.respond(*request(prompt="Once", seed=2, max_tokens=9, stream=True))]
        messages = [message for batch in batches for message in batch]
        assert all(batches)
        assert (b"x-nucleate-replica", b"r1") in messages[0]["headers"]
        data = b"".join(message.get("body", b"") for message in messages).decode()
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        params = nc.SamplingParams(seed=2, max_tokens=9, temperature=0.7)
        assert text == llm.generate("Once", llm.default_params.override(**params.to_dict()))[0].text
        assert data.endswith("data: [DONE]\n\n")

    serve(use)


@pytest.mark.slow
def test_events_travel_together_but_the_first_ones_at_once() -> None:
    async def use(replica: AsgiReplica) -> None:
        start, count, sizes = time.perf_counter(), 0, []
        body = {"prompt": "Once", "seed": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async for batch in replica.respond(*request(**body)):
            if not sizes and "body" in batch[-1]:
                assert time.perf_counter() - start < 1.0
            sizes.append(sum(message.get("body", b"").count(b"data: {") for message in batch))
            count += len(batch)
        assert 300 < sum(sizes) <= 400  # parts of characters have no event
        assert count <= (time.perf_counter() - start) / FLUSH_SECONDS + 4  # start, the first, the last two
        assert count < 200

    serve(use)


def test_a_reader_that_leaves_frees_the_engine() -> None:
    async def use(replica: AsgiReplica) -> None:
        response = replica.respond(*request(prompt="Once", n=8, max_tokens=900, ignore_eos=True, stream=True))
        await anext(response)
        await anext(response)
        assert (replica.service.num_requests, replica.service.num_sequences) == (1, 8)
        await response.aclose()
        assert (replica.service.num_requests, replica.service.num_sequences) == (0, 0)

    serve(use)
