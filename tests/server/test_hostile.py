"""Hostile clients: no request, slow reader or malformed input affects other requests or the memory of the server."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiers
from malformed_requests import GARBAGE, Bad, malformed
from server_process import Answer, Server, wait_until
from stream_clients import Stream, Wire, raw, text_of, together

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # threads that stay awake starve the others where tests run side by side
SECRETS = (b"Traceback", str(ROOT).encode(), b"site-packages", sys.prefix.encode(), b".py")
STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
PATH = "/v1/completions"
GAP = 10.0
"""Seconds between two frames of a neighbour's stream at the most, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that has little patience with bodies."""
    impatient = {
        "nucleate.server.request_context.BODY_TIMEOUT_SECONDS": 1,
        "nucleate.server.generation_endpoint.KEEP_ALIVE_SECONDS": 0.5,
    }
    with Server("--max-request-body-bytes", "262144", environment=ONE_THREAD, constants=impatient) as running:
        yield running.warmed()
        assert "Traceback" not in running.log


def memory(server: Server) -> float:
    """MiB."""
    return psutil.Process(server.process.pid).memory_info().rss / 2**20


def worked(server: Server) -> float:
    """Seconds of processor time."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def idle(server: Server, seconds: float = 10.0) -> float:
    """Seconds until nothing runs."""
    names = ("nucleate_num_requests_running", "nucleate_num_requests_waiting")
    return wait_until(lambda: not any(map(server.metric, names)), seconds)


def check_error(answer: Answer, status: int, field: str | tuple[str, ...] | None = None) -> Any:
    """An answer is OpenAI's error object, and tells nothing of this machine."""
    assert answer.status == status, answer.data
    assert not [secret for secret in SECRETS if secret in answer.data], answer.data
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json["error"]
    assert answer.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"]
    assert len(answer.data) < 8000
    fields = field if isinstance(field, tuple) else (field,)
    assert error["param"] in fields, error
    return error


def refused(server: Server, bad: Bad) -> None:
    answer = server.request(bad.method, bad.path, bad.data, bad.headers)
    try:
        check_error(answer, bad.status, bad.field)
    except (AssertionError, KeyError, ValueError) as error:
        raise AssertionError(f"{bad.name}: {bad.data[:200]!r}\n{answer.status} {answer.data[:500]!r}") from error


def test_a_thousand_malformed_requests_hurt_nobody(server: Server) -> None:
    length = tiers.count(150, 600)
    neighbours = [{**STORY, "seed": seed, "max_tokens": length} for seed in range(5)]
    alone = [server.request("POST", PATH, body).json["choices"][0]["text"] for body in neighbours]
    kinds, failures = malformed(tiers.count(80, 1000)), list[str]()

    def storm(left: list[Bad]) -> None:
        rounds = [0] * len(neighbours)

        def work(place: int) -> None:
            if place < len(neighbours):
                while left or not rounds[place]:
                    check_stream(Stream(server, neighbours[place]).wait(), alone[place])
                    rounds[place] += 1
            while left:
                with suppress(IndexError):
                    _collect(failures, server, left.pop())

        together(len(neighbours) + 4, work)
        idle(server)

    start = worked(server)
    storm(kinds[::5])
    before = memory(server)  # with all that is loaded once
    storm([bad for place, bad in enumerate(kinds) if place % 5])
    assert not failures, f"{len(failures)} of {len(kinds)}:\n" + "\n".join(failures[:40])
    assert worked(server) - start < 60
    assert memory(server) - before < 64


def _collect(failures: list[str], server: Server, bad: Bad) -> None:
    try:
        refused(server, bad)
    except Exception as error:  # noqa: BLE001  # of the connection, too: the neighbours wait for the end of this
        failures.append(f"{bad.name}: {error!r}"[:2000])


def check_stream(stream: Stream, text: str) -> None:
    """A stream ended whole, with this text, and its frames came without long waits."""
    assert stream.whole, (stream.status, stream.error, stream.frames[-3:])
    assert stream.text == text
    assert max((after - before for before, after in pairwise(stream.times)), default=0) < GAP


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_gets_a_400_and_no_more(server: Server, garbage: bytes) -> None:
    with Wire(server, seconds=10) as wire:
        wire.send(garbage)
        data = b""
        while more := wire.socket.recv(65536):  # to the end: the connection is closed
            data += more
    assert data.startswith(b"HTTP/1.1 400 "), data
    assert not [secret for secret in SECRETS if secret in data]
    assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize("kind", ["path", "one header", "many headers"])
def test_heads_have_a_size(server: Server, kind: str) -> None:
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


def test_an_offer_of_another_protocol_is_passed_over(server: Server) -> None:
    """As Java's HttpClient sends with its first request: Upgrade: h2c."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    answer = server.request("POST", PATH, {**STORY, "max_tokens": 3}, offer)
    assert answer.status == 200, answer.data


@pytest.mark.slow
def test_a_head_must_arrive_in_time() -> None:
    impatient = {"nucleate.server.http_protocol.HEAD_TIMEOUT_SECONDS": 0.5}
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


def test_a_connection_above_the_maximum_gets_status_503() -> None:
    with Server("--max-connections", "4", environment=ONE_THREAD) as server:
        held = [Wire(server) for _ in range(4)]
        try:
            wait_until(lambda: server.request("GET", "/v1/models").status == 503)
        finally:
            for wire in held:
                wire.__exit__()
        wait_until(lambda: server.request("GET", "/v1/models").status == 200)


def test_bodies_without_an_end(server: Server) -> None:
    """Slow, endless, too large: an error that names no field, then the connection is closed."""
    typed = {"content-type": "application/json"}
    chunked = raw("POST", PATH, headers={**typed, "content-length": "", "transfer-encoding": "chunked"})
    slow = raw("POST", PATH, headers={**typed, "content-length": "50"}) + b'{"prompt":'
    large = raw("POST", PATH, headers={**typed, "content-length": "262145"})
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    kinds = ((slow, b"", 408), (chunked, b"", 408), (chunked + b"5\r\n[1, 2\r\n", b"", 408))
    kinds += ((large, b"", 413), (chunked, piece, 413))
    stream = Stream(server, {**STORY, "max_tokens": 900})

    def work(place: int) -> None:
        head, more, status = kinds[place]
        with Wire(server, seconds=10) as wire:
            wire.send(head)
            for _ in range(16 if more else 0):
                try:
                    wire.send(more)
                except OSError:
                    break
            assert wire.head() == status
            assert wire.answer is not None
            told = {name.lower(): value for name, value in wire.answer.getheaders()}
            check_error(Answer(status, told, wire.read()), status)
            assert told["connection"] == "close"
            with suppress(ConnectionResetError):  # of what it had not read
                assert not wire.socket.recv(1)

    start = time.perf_counter()
    together(len(kinds), work)
    assert time.perf_counter() - start < 30
    assert stream.wait().whole


def test_disconnected_clients_leave_no_requests(server: Server) -> None:
    rng, before = random.Random(0), memory(server)
    delays = [rng.random() * 0.5 for _ in range(200)]
    stream = Stream(server, {**STORY, "seed": 5, "max_tokens": 300})
    disconnects = server.metric("nucleate_client_disconnects_total")

    def work(place: int) -> None:
        for number in range(place, 200, 20):
            body = {**STORY, "max_tokens": 900, "n": 1 + number % 3, "stream": bool(number % 4)}
            with Wire(server) as wire:
                wire.send(raw("POST", PATH, json.dumps(body).encode())[: None if number % 10 else 120])
                time.sleep(delays[number])
                if number % 2:  # a reset
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    together(20, work)
    assert stream.wait().whole
    assert idle(server) < 5
    wait_until(lambda: server.metric("nucleate_client_disconnects_total") - disconnects >= 190, 5)
    assert memory(server) - before < 64
    assert server.request("POST", PATH, {**STORY, "max_tokens": 3}).status == 200


@pytest.mark.slow
def test_a_client_that_does_not_read_is_waited_for(server: Server) -> None:
    body = {**STORY, "seed": 3, "n": 8, "max_tokens": 900, "logprobs": 20, "stream": True}  # 6 MB: sockets hold 4
    before = memory(server)
    with Wire(server, receive=4096) as wire:
        wire.send(raw("POST", PATH, json.dumps(body).encode()))
        wait_until(lambda: server.metric("nucleate_num_requests_running") >= 8)
        drawn = -1.0
        while drawn != (drawn := server.metric("nucleate_sampled_tokens_total")):  # until it waits
            time.sleep(0.5)
        assert server.metric("nucleate_num_requests_running") + server.metric("nucleate_num_requests_waiting") == 8
        assert server.request("POST", PATH, {**STORY, "max_tokens": 50}).status == 200
        assert memory(server) - before < 48
        assert wire.head() == 200
        bodies = [json.loads(frame) for frame in wire.frames() if frame != "[DONE]"]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 8
    assert sum(len(choice["token_ids"]) for choice in choices) == 8 * 900
    whole = server.request("POST", PATH, {**STORY, "seed": 3, "max_tokens": 900})
    assert text_of(bodies) == whole.json["choices"][0]["text"]
    idle(server)


def test_patterns_that_backtrack_cost_others_nothing(server: Server) -> None:
    """Each is refused, or its search is cut off: the neighbour's stream goes on."""
    neighbour = {**STORY, "seed": 8, "max_tokens": 400}
    alone = server.request("POST", PATH, neighbour).json["choices"][0]["text"]
    stream = Stream(server, neighbour)
    for pattern in (r"(\w+\s?)+$X", "(a|a)+$X", r"(.*)*X", r"^(([a-z ])+.)+[A-Z]([a-z])+$", r"(?:.|\s)*?(?:.|\s)*?X"):
        answer = server.request("POST", PATH, {**STORY, "stop_regex": [pattern], "max_tokens": 200, "seed": 1})
        if answer.status != 200:
            check_error(answer, answer.status, "stop_regex" if answer.status == 400 else None)
    check_stream(stream.wait(), alone)


def test_no_more_than_the_limits_allow() -> None:
    flags = ("--max-num-seqs", "2", "--max-queued-seqs", "1", "--max-concurrent-requests", "4")
    flags += ("--max-choices-per-request", "8")
    with Server(*flags, environment=ONE_THREAD) as server:
        held = [Stream(server, {**STORY, "max_tokens": 700}) for _ in range(3)]
        wait_until(lambda: server.metric("nucleate_num_requests_running") == 2)
        wait_until(lambda: server.metric("nucleate_num_requests_waiting") == 1)
        for stream in (False, True):  # a stream has not begun, so it is an ordinary error too
            answer = server.request("POST", PATH, {**STORY, "stream": stream})
            assert check_error(answer, 503)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        with Wire(server) as slow:
            slow.send(raw("POST", PATH, headers={"content-length": "5"}))
            statuses: list[int] = []

            def full() -> bool:
                answer = server.request("POST", PATH, {**STORY, "max_tokens": 1})
                error = check_error(answer, 503)
                assert answer.headers["retry-after"]
                statuses.append(answer.status)
                return error["code"] == "too_many_requests"

            wait_until(full)
        for stream in held:
            assert stream.wait().whole
        assert server.request("POST", PATH, {**STORY, "max_tokens": 1}).status == 200
        assert server.request("POST", PATH, {**STORY, "max_tokens": 1, "n": 8}).status == 200  # alone it may be large
        check_error(server.request("POST", PATH, {**STORY, "n": 9}), 400, "n")


def test_time_keys_and_origins() -> None:
    """A server with keys, an origin, and little time for each request."""
    flags = (
        "--request-timeout-seconds",
        "0.5",
        "--api-key",
        "k1",
        "--api-key",
        "k2",
        "--allow-origin",
        "https://a.example",
    )
    long = {**STORY, "max_tokens": 900, "n": 32}
    with Server(*flags, environment=ONE_THREAD) as server:
        for headers in ({}, {"authorization": "Bearer k3"}, {"authorization": "k1"}, {"authorization": "Basic k1"}):
            for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing")):
                error = check_error(server.request(method, path, b"{}" if method == "POST" else None, headers), 401)
                assert error["code"] == "invalid_api_key"
        assert server.request("GET", "/health").status == 200
        for key in ("k1", "k2"):
            assert server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status == 200
        headers = {"authorization": "Bearer k1"}
        assert check_error(server.request("POST", PATH, long, headers), 504)["code"] == "timeout"
        stream = Stream(server, long, headers).wait()
        assert stream.frames[-1] == "[DONE]"
        error = stream.bodies[-1]["error"]
        assert (error["code"], error["type"]) == ("timeout", "server_error")
        wait_until(lambda: not server.metric("nucleate_num_requests_running", headers))
        check_origins(server, headers)


def check_origins(server: Server, headers: dict[str, str]) -> None:
    origin = {"origin": "https://a.example", **headers}
    told = server.request("GET", "/v1/models", headers=origin).headers
    assert told["access-control-allow-origin"] == "https://a.example"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    before = server.request("OPTIONS", PATH, headers={"origin": "https://a.example", **asks})
    assert before.status == 200
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    other = server.request("GET", "/v1/models", headers={**origin, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    refusal = server.request("POST", PATH, {}, origin)
    check_error(refusal, 400, "prompt")
    assert refusal.headers["access-control-allow-origin"] == "https://a.example"


def test_no_origin_is_allowed_by_default(server: Server) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("OPTIONS", PATH), ("POST", PATH)):
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        answer = server.request(method, path, {} if method == "POST" else None, headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    program, told = ROOT / "benchmarks" / "server.py", tmp_path / "server.json"
    command = [sys.executable, str(program), "--quick", "--json", str(told)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **ONE_THREAD}, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(told.read_text())
    assert results["held"]["errors"] == results["leaving"]["answers left"] == 0
    assert results["held"]["tokens"] > 0
    assert {"engine", "streams", "whole"} == results["overhead"].keys()
