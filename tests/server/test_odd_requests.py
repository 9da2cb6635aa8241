"""Odd requests and hostile grammars: each gets an answer or an error in time, and delays no other request."""

from __future__ import annotations

import functools
import json
import runpy
import threading
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import tiers
from odd_requests import Odd, odd_requests
from request_bodies import BODIES
from server_process import ONE_THREAD, Answer, Server, wait_until
from stream_clients import Stream, together
from test_hostile import GAP, SECRETS, STORY, check_error, memory, worked

COUNT = tiers.count(150, 20_000)
WORKERS = 3
_KINDS = {"invalid_prompt": "invalid_request_error"}
"""The types of errors by their codes in the Responses API."""
USUAL_GAP = 0.5
"""Maximum seconds between 99 of 100 frames of another client's stream, and for a health check."""
NEIGHBOUR = {**STORY, "seed": 5, "max_tokens": 900}
PERMISSIVE = (
    *("--scheduling-policy", "priority", "--max-logprobs", "-1", "--unknown-fields", "ignore"),
    *("--reasoning-parser", "qwen3"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(environment=ONE_THREAD) as running:
        assert running.request("POST", PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "ok"}}).status == 200
        yield running.warmed()
        assert "Traceback" not in running.log
        assert '"status":500' not in running.log.replace(" ", "")


@pytest.fixture(scope="module")
def permissive() -> Iterator[Server]:
    with Server(*PERMISSIVE, environment=ONE_THREAD) as running:
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


@functools.cache
def requests() -> list[Odd]:
    return odd_requests(max(COUNT, 400))


@pytest.mark.slow
def test_every_endpoint_and_protocol_is_covered() -> None:
    made = requests()[:400]
    assert {odd.path for odd in made} == {*BODIES}
    assert sum(odd.must_work for odd in made) > 20
    assert any(len(odd.data) > 9 * 10**6 for odd in made)
    assert made[:9] == odd_requests(9)  # seeded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server", pytest.param("permissive", marks=pytest.mark.slow)])
def test_odd_requests(request: pytest.FixtureRequest, name: str) -> None:
    server = request.getfixturevalue(name)
    alone = server.request("POST", "/v1/completions", NEIGHBOUR).json["choices"][0]["text"]
    todo, failures = list(enumerate(requests()[:COUNT])), list[str]()
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
    wait_until(server.is_idle, 60)


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


TEXTS = Path(__file__).parents[1] / "structured_output" / "test_hostile_grammars.py"
SECONDS = 2.0
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
SUBJECT = {PATH: {"prompt": "Once"}, CHAT: {"messages": [{"role": "user", "content": "Hello"}]}}
OTHER = {**NEIGHBOUR, "max_tokens": 400}
AMBIGUOUS = {
    "two of itself": {"grammar": "start: s\ns: s s | /[a-z ]/"},
    "three of itself": {"grammar": 'start: s\ns: s s s | s s | /[a-z]+/ | " "'},
    "nothing too": {"grammar": 'start: s\ns: s s | "" | /[a-z ]/'},
    "many vowels": {"regex": "([a-z ]*[aeiou][a-z ]*){200}"},
}


def bodies() -> Iterator[tuple[str, str, str, bytes]]:
    """The grammars of the library's tests as requests: a name, the path, the field, the body."""
    cases = runpy.run_path(str(TEXTS))["CASES"]
    paths = cycle(SUBJECT)
    for constraint_kind, name, value in cases:
        if name == "numbers as names":  # in JSON they are valid strings
            continue
        kinds = ("json_schema", "json") if constraint_kind == "json_schema" else (constraint_kind,)
        ways: list[tuple[str, Any]] = [("structured_outputs", {kind: value}) for kind in kinds]
        if constraint_kind == "json_schema" and isinstance(value, dict):
            named = {"name": "x", "schema": value}
            ways.append(("response_format", {"type": "json_schema", "json_schema": named}))
        for field, constraint in ways:
            path = next(paths)
            try:
                data = json.dumps({**SUBJECT[path], field: constraint, "max_tokens": 5}).encode()
            except (TypeError, ValueError, RecursionError):
                continue  # not JSON, so no client can send it
            yield f"{field} {constraint_kind} {name}", path, field, data


HOSTILE = list(bodies())


def timed_request(server: Server, path: str, data: bytes) -> tuple[Answer, float]:
    """The response, and the CPU seconds of the server, which do not depend on the load of the machine."""
    start, before = time.perf_counter(), worked(server)
    response = server.request("POST", path, data)
    return response, min(time.perf_counter() - start, worked(server) - before)


def test_there_are_enough_cases() -> None:
    assert len(HOSTILE) >= 150
    assert len({name.split(" ", 2)[2] for name, *_ in HOSTILE}) >= 100
    for field in ("response_format", "structured_outputs"):
        assert sum(name.startswith(f"{field} ") for name, *_ in HOSTILE) >= 40


@pytest.mark.slow
def test_every_hostile_grammar_is_a_clear_error_in_time(server: Server) -> None:
    alone = server.request("POST", PATH, OTHER).json["choices"][0]["text"]
    before, failures, streams = memory(server), list[str](), list[Stream]()
    for number, (name, path, field, data) in enumerate(HOSTILE[:: tiers.count(5, 1)]):
        if number % 40 == 0:
            streams.append(Stream(server, OTHER))
        response, took = timed_request(server, path, data)
        try:
            error = check_error(response, 400, (field, "body"))
            assert took < SECONDS, took
            assert error["param"] == field or b"NaN" in data or b'"twice' in data or b": 1e999" in data
            assert error["message"].startswith((field, "body must be JSON")) or field in error["message"]
            assert len(error["message"]) < 500
        except AssertionError as failure:
            failures.append(f"{name}: {failure!s:.300}")
    assert not failures, f"{len(failures)} of {len(HOSTILE)}:\n" + "\n".join(failures[:30])
    for stream in streams:
        stream.wait()
        assert stream.whole
        assert stream.text == alone
        assert max(after - earlier for earlier, after in pairwise(stream.times)) < GAP
    wait_until(server.is_idle, 60)
    assert memory(server) - before < 128
    good = server.request("POST", PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "still [0-9]"}})
    assert good.json["choices"][0]["text"].startswith("still ")


@pytest.mark.slow
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_grammar_that_is_slow_at_every_token_ends_only_its_own_request(server: Server, name: str) -> None:
    alone = server.request("POST", PATH, OTHER).json["choices"][0]["text"]
    stream = Stream(server, OTHER)
    ambiguous = {
        "prompt": "Once",
        "structured_outputs": AMBIGUOUS[name],
        "max_tokens": 300,
        "ignore_eos": True,
        "seed": 1,
    }
    responses: list[Answer | None] = [None] * 2

    def run_request(index: int) -> None:
        responses[index] = server.request("POST", PATH, {**ambiguous, "seed": index}, seconds=300)

    together(len(responses), run_request)
    stream.wait()
    assert stream.whole
    assert stream.text == alone
    assert max(after - earlier for earlier, after in pairwise(stream.times)) < GAP
    for response in responses:
        assert response is not None
        if response.status != 200:
            error = check_error(response, 400, "structured_outputs")
            assert (
                "structured_outputs: the output cannot satisfy its structured-output constraint: " in error["message"]
            )
    wait_until(server.is_idle, 60)


@pytest.mark.slow
def test_a_slow_grammar_ends_its_stream_with_an_error(server: Server) -> None:
    fields = {"structured_outputs": AMBIGUOUS["two of itself"], "ignore_eos": True, "seed": 1}
    stream = Stream(server, {"prompt": "Once", "max_tokens": 900, **fields}).wait()
    assert stream.frames[-1] == "[DONE]"
    error = stream.bodies[-1]["error"]
    assert (error["param"], error["type"]) == ("structured_outputs", "invalid_request_error")
    assert "took too long" in error["message"]
    assert len(stream.bodies) > 1  # a part of the text came
    assert server.request("GET", "/health").status == 200
