"""A client that costs little: many requests at a time to a server of OpenAI's API, and when their tokens came.

A process of its own, told what to do by JSON lines on stdin: each is a job (see ``Job``), and gets a line with what was
seen. It reads no more of HTTP and of server-sent events than it must, and parses answers when the clock has stopped.
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

END = b"\r\n0\r\n\r\n"  # of a chunked body


class Asked(NamedTuple):
    """A prompt, how many tokens are to follow, and the seed of their draws."""

    prompt_ids: list[int]
    tokens: int
    seed: int


def workload(requests: int, size: int, seed: int) -> list[Asked]:
    """Prompts and answers of 16 to 256 tokens. size: of the vocabulary."""
    rng = random.Random(seed)
    return [
        Asked([rng.randrange(8, size) for _ in range(rng.randint(16, 256))], rng.randint(16, 256), rng.getrandbits(32))
        for _ in range(requests)
    ]


SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "ignore_eos": True}


@dataclass(frozen=True)
class Job:
    """Requests to send.

    at_once: connections, each with one request at a time. seconds: go on with the same ones for so long, then let the
    last ones end; None: each once. keep: give the token ids of the answers. leave: connections are opened within this
    time, and each is closed at a random moment up to as much later, whatever has come.
    """

    host: str
    port: int
    asked: Sequence[Asked]
    at_once: int = 64
    stream: bool = True
    seconds: float | None = None
    keep: bool = False
    leave: float | None = None

    def request(self, one: Asked) -> bytes:
        """All of it, as it is sent."""
        said = {"prompt": one.prompt_ids, "max_tokens": one.tokens, "seed": one.seed, "stream": self.stream}
        body = json.dumps({**said, **SAMPLED}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(eq=False)
class Seen:
    """An answer: its bytes with their times, as they came."""

    begun: float = 0.0
    status: int = 0
    data: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def frames(self) -> Iterator[tuple[float, bytes]]:
        """The frames of a stream, each with the time when its end came."""
        rest = b""
        for now, data in zip(self.times, self.data, strict=True):
            *whole, rest = (rest + data).split(b"\n\n")
            for frame in whole:
                _, told, said = frame.partition(b"data: ")
                if told:  # it is no comment
                    yield now, said


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.seen, self.head, self.tail, self.left = Seen(), b"", b"", -1
        self.transport: Any = None
        self.done: asyncio.Future[Seen] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[Seen]:
        """Send a request; the answer when it is whole."""
        self.head, self.tail, self.left = b"", b"", -1
        self.seen, self.done = Seen(perf_counter()), asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if not self.seen.status:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.seen.status = int(head[9:12])
            _, declared, length = head.lower().partition(b"content-length: ")
            self.left = int(length.partition(b"\r\n")[0]) if declared else -1
        if data:
            self.seen.data.append(data)
            self.seen.times.append(now)
        if self.left >= 0:
            self.left -= len(data)
            whole = self.left <= 0
        else:
            self.tail = (self.tail + data)[-len(END) :]
            whole = self.tail == END
        if whole and self.done is not None and not self.done.done():
            self.done.set_result(self.seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))


async def run(job: Job) -> dict[str, Any]:
    """What was seen of a job."""
    requests = [job.request(one) for one in job.asked]
    seen: list[tuple[int, Seen]] = []
    errors: list[str] = []
    start, cpu = perf_counter(), _cpu()
    numbers = iter(range(len(requests))) if job.seconds is None else _until(start + job.seconds)

    async def work() -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, job.host, job.port)
            for number in numbers:
                answer = await connection.ask(requests[number % len(requests)])
                seen.append((number, answer))
                if job.seconds is not None:
                    _thin(answer)
            connection.transport.close()
        except (OSError, ValueError) as error:
            errors.append(repr(error))

    await asyncio.gather(*(work() for _ in range(job.at_once)))
    told = {"seconds": perf_counter() - start, "client cpu seconds": _cpu() - cpu}
    return {**told, **_report(job, seen, errors)}


async def leave(job: Job) -> dict[str, Any]:
    """Clients that go away at random moments, half of them with a reset."""
    assert job.leave is not None  # noqa: S101
    rng, begun, spread = random.Random(0), 0, job.leave

    async def work(number: int, request: bytes) -> None:
        nonlocal begun
        await asyncio.sleep(rng.random() * spread)
        _, connection = await asyncio.get_running_loop().create_connection(Connection, job.host, job.port)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() * spread):
                await connection.ask(request)
        begun += bool(connection.seen.data)
        (connection.transport.abort if number % 2 else connection.transport.close)()

    await asyncio.gather(*(work(number, job.request(one)) for number, one in enumerate(job.asked)))
    return {"left": len(job.asked), "of them in mid-stream": begun}


def _until(end: float) -> Iterator[int]:
    for number in count():
        if perf_counter() >= end:
            return
        yield number


def _thin(answer: Seen) -> None:
    """Keep of a stream what its times and its end say: a minute of streams is a lot."""
    frames = [(now, b"") for now, _ in answer.frames()]
    end = answer.data[-1][-1000:] if len(answer.data) == 1 else b"".join(answer.data[-4:])[-1000:]
    answer.times = [now for now, _ in frames]
    answer.data = [b"data: \n\n"] * (len(frames) - 1) + [b"data: " + end.replace(b"\n\n", b"") + b"\n\n"]


def _report(job: Job, seen: list[tuple[int, Seen]], errors: list[str]) -> dict[str, Any]:
    first, between, tokens, ids = [], [], 0, {}
    for number, answer in seen:
        asked = job.asked[number % len(job.asked)]
        frames = list(answer.frames()) if job.stream else [(0.0, b"".join(answer.data))]
        if answer.status != 200 or not any(b'"finish_reason":"length"' in data for _, data in frames[-2:]):
            errors.append(f"{answer.status}: {b''.join(answer.data)[-200:]!r}")
            continue
        tokens += asked.tokens
        if job.stream:
            first.append(frames[0][0] - answer.begun)
            times = [now for now, _ in frames[:-1]]  # without [DONE]
            between += [after - before for before, after in pairwise(times)]
        if job.keep:
            bodies = [json.loads(data) for _, data in frames if data != b"[DONE]"]
            ids[number] = [token for body in bodies for token in body["choices"][0]["token_ids"]]
    told = {"answers": len(seen), "tokens": tokens, "errors": len(errors), "first errors": errors[:5]}
    spread = {"first token": quantiles(first), "between tokens": quantiles(between)} if job.stream else {}
    return {**told, **spread, **({"token ids": [ids.get(number) for number in range(len(job.asked))]} if ids else {})}


def quantiles(seconds: list[float]) -> dict[str, float]:
    """What half, and 99 of 100, do not exceed; and the worst."""
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
        job = Job(**{**given, "asked": [Asked(*one) for one in given["asked"]]})
        print(json.dumps(asyncio.run(run(job) if job.leave is None else leave(job))), flush=True)


if __name__ == "__main__":
    main()
