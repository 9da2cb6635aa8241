"""A load generator for an OpenAI-compatible server, with low CPU cost. Records the arrival time of every token.

Runs as a separate process and reads jobs as JSON lines from stdin (see ``Job``); it prints one line of results per job.
It parses as little of HTTP and server-sent events as necessary while it measures.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from time import perf_counter
from typing import Any, NamedTuple

END = b"\r\n0\r\n\r\n"  # end of a chunked body


class LoadRequest(NamedTuple):
    """A prompt, the number of output tokens, and the seed."""

    prompt_ids: list[int]
    tokens: int
    seed: int


def workload(count: int, size: int, seed: int) -> list[LoadRequest]:
    """Prompts and outputs of 16 to 256 tokens. size: vocabulary size."""
    rng = random.Random(seed)
    return [
        LoadRequest(
            [rng.randrange(8, size) for _ in range(rng.randint(16, 256))], rng.randint(16, 256), rng.getrandbits(32)
        )
        for _ in range(count)
    ]


SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "ignore_eos": True}


@dataclass(frozen=True)
class Job:
    """Requests to send.

    at_once: connections, each with one request at a time. seconds: repeat the requests for this time, then finish the
    running ones; None: send each once. keep: return the token ids of the outputs. leave: open the connections within
    this time in seconds, and close each at a random time, at most as much later.
    """

    host: str
    port: int
    requests: Sequence[LoadRequest]
    at_once: int = 64
    stream: bool = True
    seconds: float | None = None
    keep: bool = False
    leave: float | None = None

    def request(self, one: LoadRequest) -> bytes:
        """The request as bytes."""
        fields = {"prompt": one.prompt_ids, "max_tokens": one.tokens, "seed": one.seed, "stream": self.stream}
        body = json.dumps({**fields, **SAMPLED}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(eq=False)
class Response:
    """A response: its bytes with their arrival times."""

    begun: float = 0.0
    status: int = 0
    data: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def frames(self) -> Iterator[tuple[float, bytes]]:
        """The events of a stream, each with its arrival time."""
        rest = b""
        for now, data in zip(self.times, self.data, strict=True):
            *complete, rest = (rest + data).split(b"\n\n")
            for frame in complete:
                _, prefix, event = frame.partition(b"data: ")
                if prefix:  # not a comment
                    yield now, event


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.response, self.head, self.tail, self.left = Response(), b"", b"", -1
        self.transport: Any = None
        self.done: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send_request(self, request: bytes) -> asyncio.Future[Response]:
        """Send a request. Returns the complete response."""
        self.head, self.tail, self.left = b"", b"", -1
        self.response, self.done = Response(perf_counter()), asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if not self.response.status:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.response.status = int(head[9:12])
            _, declared, length = head.lower().partition(b"content-length: ")
            self.left = int(length.partition(b"\r\n")[0]) if declared else -1
        if data:
            self.response.data.append(data)
            self.response.times.append(now)
        if self.left >= 0:
            self.left -= len(data)
            complete = self.left <= 0
        else:
            self.tail = (self.tail + data)[-len(END) :]
            complete = self.tail == END
        if complete and self.done is not None and not self.done.done():
            self.done.set_result(self.response)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))


async def run(job: Job) -> dict[str, Any]:
    """The results of a job."""
    encoded = [job.request(one) for one in job.requests]
    responses: list[tuple[int, Response]] = []
    errors: list[str] = []
    start, cpu = perf_counter(), _cpu()
    numbers = iter(range(len(encoded))) if job.seconds is None else _until(start + job.seconds)

    async def work() -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, job.host, job.port)
            for number in numbers:
                response = await connection.send_request(encoded[number % len(encoded)])
                responses.append((number, response))
                if job.seconds is not None:
                    _thin(response)
            connection.transport.close()
        except (OSError, ValueError) as error:
            errors.append(repr(error))

    await asyncio.gather(*(work() for _ in range(job.at_once)))
    result = {"seconds": perf_counter() - start, "client cpu seconds": _cpu() - cpu}
    return {**result, **_report(job, responses, errors)}


async def leave(job: Job) -> dict[str, Any]:
    """Clients that disconnect at random times, half of them with a reset."""
    assert job.leave is not None  # noqa: S101
    rng, begun, spread = random.Random(0), 0, job.leave

    async def work(number: int, request: bytes) -> None:
        nonlocal begun
        await asyncio.sleep(rng.random() * spread)
        _, connection = await asyncio.get_running_loop().create_connection(Connection, job.host, job.port)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() * spread):
                await connection.send_request(request)
        begun += bool(connection.response.data)
        (connection.transport.abort if number % 2 else connection.transport.close)()

    await asyncio.gather(*(work(number, job.request(one)) for number, one in enumerate(job.requests)))
    return {"left": len(job.requests), "of them in mid-stream": begun}


def _until(end: float) -> Iterator[int]:
    for number in count():
        if perf_counter() >= end:
            return
        yield number


def _thin(response: Response) -> None:
    """Reduce a stream to its times and its end, to save memory."""
    frames = [(now, b"") for now, _ in response.frames()]
    end = response.data[-1][-1000:] if len(response.data) == 1 else b"".join(response.data[-4:])[-1000:]
    response.times = [now for now, _ in frames]
    response.data = [b"data: \n\n"] * (len(frames) - 1) + [b"data: " + end.replace(b"\n\n", b"") + b"\n\n"]


def _report(job: Job, responses: list[tuple[int, Response]], errors: list[str]) -> dict[str, Any]:
    first, between, tokens, ids = [], [], 0, {}
    for number, response in responses:
        request = job.requests[number % len(job.requests)]
        frames = list(response.frames()) if job.stream else [(0.0, b"".join(response.data))]
        if response.status != 200 or not any(b'"finish_reason":"length"' in data for _, data in frames[-2:]):
            errors.append(f"{response.status}: {b''.join(response.data)[-200:]!r}")
            continue
        tokens += request.tokens
        if job.stream:
            first.append(frames[0][0] - response.begun)
            times = [now for now, _ in frames[:-1]]  # without [DONE]
            between += [after - before for before, after in pairwise(times)]
        if job.keep:
            bodies = [json.loads(data) for _, data in frames if data != b"[DONE]"]
            ids[number] = [token for body in bodies for token in body["choices"][0]["token_ids"]]
    result = {"answers": len(responses), "tokens": tokens, "errors": len(errors), "first errors": errors[:5]}
    spread = {"first token": quantiles(first), "between tokens": quantiles(between)} if job.stream else {}
    return {
        **result,
        **spread,
        **({"token ids": [ids.get(number) for number in range(len(job.requests))]} if ids else {}),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the maximum."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(seconds)}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    for line in sys.stdin:
        given = json.loads(line)
        job = Job(**{**given, "requests": [LoadRequest(*one) for one in given["requests"]]})
        print(json.dumps(asyncio.run(run(job) if job.leave is None else leave(job))), flush=True)


if __name__ == "__main__":
    main()
