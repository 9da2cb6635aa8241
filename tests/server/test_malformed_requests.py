"""Odd requests to all endpoints: each gets an answer, or an error in the format of its API, and delays no other one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import tiers
from odd_requests import Odd, odd_requests
from request_bodies import BODIES
from server_process import Answer, Server
from stream_clients import Stream, together
from test_hostile import ONE_THREAD, SECRETS, STORY, idle

COUNT = tiers.count(250, 20_000)
WORKERS = 3
GAP = 5.0
"""Maximum seconds between two frames of another client's stream, and for a health check, on a busy machine."""
_KINDS = {"invalid_prompt": "invalid_request_error"}
"""The types of errors by their codes in the Responses API."""
USUAL_GAP = 0.5
"""Maximum seconds of 99 of 100 of them."""
NEIGHBOUR = {**STORY, "seed": 5, "max_tokens": 900}
SERVERS = {
    "default": (),
    "permissive": (
        *("--scheduling-policy", "priority", "--max-logprobs", "-1", "--unknown-fields", "ignore"),
        *("--reasoning-parser", "qwen3"),
    ),
}


@pytest.fixture(scope="module", params=["default", pytest.param("permissive", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(*SERVERS[request.param], environment=ONE_THREAD) as running:
        yield running.warmed()
        assert "Traceback" not in running.log


def problem(odd: Odd, answer: Answer) -> str | None:
    """Return what is wrong with an answer."""
    if [secret for secret in SECRETS if secret in answer.data]:
        return "it reveals something about the machine"
    if answer.status == 200:
        return _failure(answer)
    if odd.must_work:
        return "the request is valid"
    if answer.status == 503 and answer.headers.get("retry-after"):
        return None  # it has more sequences than the queue has room for
    if not 400 <= answer.status < 500:
        return "the status"
    if len(answer.data) > 8000:
        return "the length"
    try:
        return _wrong_error(odd, answer)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        return f"the format: {error!r}"


def _failure(answer: Answer) -> str | None:
    """Return the error that a stream ends with, unless the request is at fault."""
    lines = answer.data[-4000:].split(b"\n")
    for line in [part for part in lines if b'"error":{' in part or b'"error":"' in part]:
        body = json.loads(line.removeprefix(b"data: "))
        error = body.get("error") or body.get("response", {}).get("error")
        if isinstance(error, str) and not error.startswith(("Generation failed", "Internal server error")):
            continue
        if isinstance(error, dict) and "invalid_request_error" in (error.get("type"), _KINDS.get(error.get("code"))):
            continue
        return f"a stream that fails: {error}"
    return None


def _wrong_error(odd: Odd, answer: Answer) -> str | None:
    """Return what is wrong with an error: it has the format of its API and says which field is wrong."""
    body = answer.json
    if odd.path.startswith("/api/"):
        assert body.keys() == {"error"}
        return None if isinstance(body["error"], str) and body["error"] else "no message"
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if odd.path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error", "request_id"}
        known = ("invalid_request_error", "not_found_error", "request_too_large")
        return None if (body["type"], error["type"] in known) == ("error", True) else "the type"
    assert body.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return "no param" if error["param"] is None and answer.status != 413 else None


def test_every_endpoint_and_protocol_is_covered() -> None:
    made = odd_requests(400)
    assert {odd.path for odd in made} == {*BODIES}
    assert sum(odd.must_work for odd in made) > 20
    assert any(len(odd.data) > 9 * 10**6 for odd in made)
    assert made[:9] == odd_requests(9)  # seeded


def test_odd_requests(server: Server) -> None:
    alone = server.request("POST", "/v1/completions", NEIGHBOUR).json["choices"][0]["text"]
    todo, failures = list(enumerate(odd_requests(COUNT))), list[str]()
    working, done, seconds = [WORKERS], threading.Event(), list[float]()

    def stream() -> None:
        while not done.is_set():
            one = Stream(server, NEIGHBOUR).wait(300)
            if one.status == 503:
                continue
            assert one.whole, (one.status, one.error)
            assert one.text == alone
            seconds.extend(after - before for before, after in pairwise(one.times))

    def check_health() -> None:
        while not done.is_set():
            start = time.perf_counter()
            assert server.request("GET", "/health").status == 200
            seconds.append(time.perf_counter() - start)
            done.wait(0.05)

    def send() -> None:
        try:
            while todo:
                try:
                    number, odd = todo.pop()
                except IndexError:
                    return
                _send(server, number, odd, failures)
        finally:
            working[0] -= 1
            if not working[0]:
                done.set()

    together(2 + WORKERS, lambda index: (stream, check_health)[index]() if index < 2 else send())
    assert not failures, f"{len(failures)} of {COUNT}:\n" + "\n".join(failures[:30])
    assert max(seconds) < GAP
    assert sorted(seconds)[int(0.99 * len(seconds))] < USUAL_GAP
    idle(server)


def _send(server: Server, number: int, odd: Odd, failures: list[str]) -> None:
    try:
        answer = server.request("POST", odd.path, odd.data)
        wrong, found = problem(odd, answer), (answer.status, answer.data[:500])
    except Exception as error:  # noqa: BLE001  # of the connection, too
        wrong, found = repr(error), (0, b"")
    if wrong is not None:
        failures.append(f"{number} {odd.path} {odd.data[:600]!r}: {wrong}: {found}")


def test_error_checks_can_fail() -> None:
    def wrong(path: str, status: int, body: Any, *, must_work: bool = False) -> str | None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return problem(Odd(path, b"{}", must_work), Answer(status, {}, data))

    openai = {"message": "temperature must be", "type": "invalid_request_error", "param": "temperature", "code": None}
    assert wrong("/v1/responses", 400, {"error": openai}) is None
    assert wrong("/v1/responses", 400, {"error": openai}, must_work=True)
    assert wrong("/v1/responses", 500, {"error": openai})
    assert wrong("/v1/responses", 400, {"error": {**openai, "param": None}})
    assert wrong("/v1/messages", 400, {"error": openai})
    assert wrong("/api/chat", 400, {"error": openai})
    assert wrong("/api/chat", 400, {"error": "x"}) is None
    assert wrong("/api/chat", 400, b"Traceback")
    failed = {**openai, "message": "Generation failed: invalid logits", "param": None, "type": "server_error"}
    assert wrong("/v1/completions", 200, b'data: {"error":' + json.dumps(failed).encode() + b"}\n\n")
