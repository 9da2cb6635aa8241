"""Hostile clients: no request, slow reader or malformed input affects other requests or the memory of the server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import tiers
from malformed_requests import GARBAGE, Bad, malformed
from server_process import ONE_THREAD, Answer, Server, wait_until
from stream_clients import Stream, Wire, raw, text_of, together

ROOT = Path(__file__).parents[2]
SECRETS = (b"Traceback", str(ROOT).encode(), b"site-packages", sys.prefix.encode(), b".py")
STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
PATH = "/v1/completions"
GAP = 15.0
"""Maximum seconds between two frames of another client's stream, on a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with a short timeout for request bodies."""
    impatient = {
        "nucleate.server.request_context.BODY_TIMEOUT_SECONDS": 1,
        "nucleate.server.generation_endpoint.KEEP_ALIVE_SECONDS": 0.5,
        "nucleate.server.request_context.LINGER_SECONDS": 2,
    }
    with Server("--max-request-body-bytes", "262144", environment=ONE_THREAD, constants=impatient) as running:
        yield running.warmed()
        assert "Traceback" not in running.log


def memory(server: Server) -> float:
    """Resident memory of the server, in MiB."""
    return psutil.Process(server.process.pid).memory_info().rss / 2**20


def worked(server: Server) -> float:
    """CPU time of the server, in seconds."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def check_error(response: Answer, status: int, field: str | tuple[str, ...] | None = None) -> Any:
    """Check that a response is OpenAI's error object and reveals nothing about the machine."""
    assert response.status == status, response.data
    assert not [secret for secret in SECRETS if secret in response.data], response.data
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json["error"]
    assert response.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"]
    assert len(response.data) < 8000
    fields = field if isinstance(field, tuple) else (field,)
    assert error["param"] in fields, error
    return error


def assert_rejected(server: Server, bad: Bad) -> None:
    response = server.request(bad.method, bad.path, bad.data, bad.headers)
    try:
        check_error(response, bad.status, bad.field)
    except (AssertionError, KeyError, ValueError) as error:
        raise AssertionError(f"{bad.name}: {bad.data[:200]!r}\n{response.status} {response.data[:500]!r}") from error


@pytest.mark.slow
def test_a_thousand_malformed_requests_affect_no_other_request(server: Server) -> None:
    length = tiers.count(150, 600)
    neighbours = [{**STORY, "seed": seed, "max_tokens": length} for seed in range(5)]
    alone = [server.request("POST", PATH, body).json["choices"][0]["text"] for body in neighbours]
    kinds, failures = malformed(tiers.count(80, 1000)), list[str]()

    def storm(remaining: list[Bad]) -> None:
        rounds = [0] * len(neighbours)

        def work(index: int) -> None:
            if index < len(neighbours):
                while remaining or not rounds[index]:
                    check_stream(Stream(server, neighbours[index]).wait(), alone[index])
                    rounds[index] += 1
            while remaining:
                with suppress(IndexError):
                    _collect(failures, server, remaining.pop())

        together(len(neighbours) + 4, work)
        wait_until(server.is_idle, 60)

    start = worked(server)
    storm(kinds[::5])
    before = memory(server)  # after everything has been loaded
    storm([bad for index, bad in enumerate(kinds) if index % 5])
    assert not failures, f"{len(failures)} of {len(kinds)}:\n" + "\n".join(failures[:40])
    assert worked(server) - start < 60
    assert memory(server) - before < 64


def _collect(failures: list[str], server: Server, bad: Bad) -> None:
    try:
        assert_rejected(server, bad)
    except Exception as error:  # noqa: BLE001  # of the connection, too: the neighbours wait for the end of this
        failures.append(f"{bad.name}: {error!r}"[:2000])


def check_stream(stream: Stream, text: str) -> None:
    """Check that a stream ended normally, has this text, and its frames came without long pauses."""
    assert stream.whole, (stream.status, stream.error, stream.frames[-3:])
    assert stream.text == text
    assert max((after - before for before, after in pairwise(stream.times)), default=0) < GAP


@pytest.mark.slow
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_gets_only_a_400(server: Server, garbage: bytes) -> None:
    with Wire(server, seconds=10) as wire:
        wire.send(garbage)
        data = b""
        while more := wire.socket.recv(65536):  # until the connection is closed
            data += more
    assert data.startswith(b"HTTP/1.1 400 "), data
    assert not [secret for secret in SECRETS if secret in data]
    assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize("kind", ["path", "one header", "many headers"])
def test_the_header_size_is_limited(server: Server, kind: str) -> None:
    begin = b"GET /" if kind == "path" else b"GET /health HTTP/1.1\r\nhost: x\r\nx: "
    more = b"a" * 50_000 + (b"\r\nx: " if kind == "many headers" else b"")
    with Wire(server, seconds=10) as wire, suppress(ConnectionError):
        wire.send(begin)
        for _ in range(100):
            wire.send(more)
        wire.send(b" HTTP/1.1\r\nhost: x\r\n\r\n" if kind == "path" else b"\r\n\r\n")
        assert wire.socket.recv(13) in (b"HTTP/1.1 431 ", b"HTTP/1.1 414 ", b"HTTP/1.1 400 ")
        assert not wire.socket.recv(65_536).startswith(b"OK")
    assert server.request("GET", "/health").status == 200


def test_http_1_0_needs_no_host(server: Server) -> None:
    with Wire(server) as wire:
        wire.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert wire.head() == 200


def test_an_upgrade_to_another_protocol_is_ignored(server: Server) -> None:
    """Upgrade: h2c, as Java's HttpClient sends it with its first request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    response = server.request("POST", PATH, {**STORY, "max_tokens": 3}, offer)
    assert response.status == 200, response.data


@pytest.mark.slow
def test_headers_must_arrive_in_time() -> None:
    impatient = {"nucleate.server.run.HEAD_TIMEOUT_SECONDS": 0.5}
    with Server(environment=ONE_THREAD, constants=impatient) as server:
        for begin in (b"", b"GET /", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
            with Wire(server, seconds=10) as wire:
                wire.send(begin)
                assert not wire.socket.recv(1)
        with Wire(server, seconds=10) as wire:  # the time between two requests is another one
            wire.send(raw("GET", "/health"))
            assert wire.head() == 200
            wire.read()
            time.sleep(1)
            wire.send(raw("GET", "/health"))
            assert wire.head() == 200


@pytest.mark.slow
def test_a_connection_above_the_maximum_gets_status_503() -> None:
    with Server("--max-connections", "4", environment=ONE_THREAD) as server:
        connections = [Wire(server) for _ in range(4)]
        try:
            wait_until(lambda: server.request("GET", "/v1/models").status == 503)
        finally:
            for wire in connections:
                wire.__exit__()
        wait_until(lambda: server.request("GET", "/v1/models").status == 200)


@pytest.mark.slow
def test_request_bodies_without_an_end(server: Server) -> None:
    """Slow, endless and too large bodies: an error without a field, then the connection is closed."""
    typed = {"content-type": "application/json"}
    chunked = raw("POST", PATH, headers={**typed, "content-length": "", "transfer-encoding": "chunked"})
    slow = raw("POST", PATH, headers={**typed, "content-length": "50"}) + b'{"prompt":'
    large = raw("POST", PATH, headers={**typed, "content-length": "262145"})
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    kinds = ((slow, b"", 408), (chunked, b"", 408), (chunked + b"5\r\n[1, 2\r\n", b"", 408))
    kinds += ((large, b"", 413), (chunked, chunk, 413))
    stream = Stream(server, {**STORY, "max_tokens": 900})

    def work(index: int) -> None:
        head, more, status = kinds[index]
        with Wire(server, seconds=10) as wire:
            wire.send(head)
            for _ in range(16 if more else 0):
                try:
                    wire.send(more)
                except OSError:
                    break
            assert wire.head() == status
            assert wire.answer is not None
            response_headers = {name.lower(): value for name, value in wire.answer.getheaders()}
            check_error(Answer(status, response_headers, wire.read()), status)
            assert response_headers["connection"] == "close"
            with suppress(ConnectionResetError):  # the unread part of the body
                assert not wire.socket.recv(1)

    start = time.perf_counter()
    together(len(kinds), work)
    assert time.perf_counter() - start < 30
    assert stream.wait().whole


@pytest.mark.parametrize("megabytes", [1, 40])
def test_a_client_that_sends_a_large_body_first_gets_the_error(server: Server, megabytes: int) -> None:
    """The connection is not reset while the client sends: most clients read the response after that."""
    for path in (PATH, "/v1/messages", "/nothing"):
        response = server.request("POST", path, b'{"prompt": "' + b"x" * (megabytes * 10**6) + b'"}')
        assert response.status == (404 if path == "/nothing" else 413)
        if path != "/nothing":
            assert response.headers["connection"] == "close"


@pytest.mark.slow
def test_disconnected_clients_leave_no_requests(server: Server) -> None:
    rng, before = random.Random(0), memory(server)
    delays = [rng.random() * 0.5 for _ in range(200)]
    stream = Stream(server, {**STORY, "seed": 5, "max_tokens": 300})
    disconnects = server.metric("nucleate_client_disconnects_total")

    def work(index: int) -> None:
        for number in range(index, 200, 20):
            body = {**STORY, "max_tokens": 900, "n": 1 + number % 3, "stream": bool(number % 4)}
            with Wire(server) as wire:
                wire.send(raw("POST", PATH, json.dumps(body).encode())[: None if number % 10 else 120])
                time.sleep(delays[number])
                if number % 2:  # a reset
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    together(20, work)
    assert stream.wait().whole
    wait_until(server.is_idle, 60)
    wait_until(lambda: server.metric("nucleate_client_disconnects_total") - disconnects >= 190, 5)
    assert memory(server) - before < 64
    assert server.request("POST", PATH, {**STORY, "max_tokens": 3}).status == 200


@pytest.mark.exhaustive
def test_a_slow_client_causes_back_pressure(server: Server) -> None:
    # 6 MB: socket buffers hold 4
    body = {**STORY, "seed": 3, "n": 8, "max_tokens": 900, "logprobs": 20, "stream": True}
    before = memory(server)
    with Wire(server, receive=4096) as wire:
        wire.send(raw("POST", PATH, json.dumps(body).encode()))
        wait_until(lambda: server.metric("nucleate_num_requests_running") >= 8)
        sampled = -1.0
        while sampled != (sampled := server.metric("nucleate_sampled_tokens_total")):  # until the engine pauses
            time.sleep(0.5)
        assert server.metric("nucleate_num_requests_running") + server.metric("nucleate_num_requests_waiting") == 8
        assert server.request("POST", PATH, {**STORY, "max_tokens": 50}).status == 200
        assert memory(server) - before < 48
        assert wire.head() == 200
        bodies = [json.loads(frame) for frame in wire.frames() if frame != "[DONE]"]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 8
    assert sum(len(choice["token_ids"]) for choice in choices) == 8 * 900
    expected = server.request("POST", PATH, {**STORY, "seed": 3, "max_tokens": 900})
    assert text_of(bodies) == expected.json["choices"][0]["text"]
    wait_until(server.is_idle, 60)


@pytest.mark.slow
def test_backtracking_patterns_do_not_delay_other_requests(server: Server) -> None:
    """Each pattern is rejected, or its search is cut off: the other client's stream continues."""
    neighbour = {**STORY, "seed": 8, "max_tokens": 400}
    alone = server.request("POST", PATH, neighbour).json["choices"][0]["text"]
    stream = Stream(server, neighbour)
    for pattern in (r"(\w+\s?)+$X", "(a|a)+$X", r"(.*)*X", r"^(([a-z ])+.)+[A-Z]([a-z])+$", r"(?:.|\s)*?(?:.|\s)*?X"):
        response = server.request("POST", PATH, {**STORY, "stop_regex": [pattern], "max_tokens": 200, "seed": 1})
        if response.status != 200:
            check_error(response, response.status, "stop_regex" if response.status == 400 else None)
    check_stream(stream.wait(), alone)


@pytest.mark.slow
def test_a_burst_of_connections_delays_neither_health_checks_nor_streams(server: Server) -> None:
    story = {**STORY, "seed": 1, "max_tokens": 400}
    alone = server.request("POST", PATH, story).json["choices"][0]["text"]
    request = raw("POST", PATH, json.dumps({**STORY, "max_tokens": 1}).encode())
    address = urlsplit(server.url)

    async def statuses() -> list[bytes]:
        async def one() -> bytes:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(request)
            line = await reader.readline()
            writer.close()
            return line.split()[1]

        return await asyncio.gather(*[one() for _ in range(tiers.count(150, 700))])

    stream, seconds = Stream(server, story), list[float]()
    with ThreadPoolExecutor(1) as pool:
        burst = pool.submit(asyncio.run, statuses())
        while not burst.done():
            start = time.perf_counter()
            assert server.request("GET", "/health").status == 200
            seconds.append(time.perf_counter() - start)
    assert set(burst.result()) <= {b"200", b"503"}
    assert max(seconds) < GAP
    check_stream(stream.wait(), alone)


@pytest.mark.exhaustive
def test_the_latency_benchmark_runs(tmp_path: Path) -> None:
    program, report = ROOT / "benchmarks" / "server.py", tmp_path / "server.json"
    command = [sys.executable, str(program), "--quick", "--json", str(report)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **ONE_THREAD}, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())
    assert results["held"]["errors"] == results["leaving"]["answers left"] == 0
    assert results["held"]["tokens"] > 0
    assert {"engine", "streams", "whole"} == results["overhead"].keys()
