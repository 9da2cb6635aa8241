"""Malformed, large and slow grammars: a clear error in time, and no effect on other requests."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import tiers
from server_process import Answer, Server
from stream_clients import Stream, together
from test_hostile import ONE_THREAD, check_error, idle, memory, worked

TEXTS = Path(__file__).parents[1] / "structured_output" / "test_hostile_grammars.py"
SECONDS = 2.0
GAP = 15.0
"""Maximum seconds between two frames of another client's stream, on a busy machine."""
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
SUBJECT = {PATH: {"prompt": "Once"}, CHAT: {"messages": [{"role": "user", "content": "Hello"}]}}
STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True, "seed": 5, "max_tokens": 400}
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
        ways: list[tuple[str, Any]] = [("structured_outputs", {constraint_kind: value})]
        ways.append(("structured_outputs", {"json" if constraint_kind == "json_schema" else constraint_kind: value}))
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


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(environment=ONE_THREAD) as running:
        assert running.request("POST", PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "ok"}}).status == 200
        yield running.warmed()
        assert "Traceback" not in running.log
        assert '"status":500' not in running.log.replace(" ", "")


def timed_request(server: Server, path: str, data: bytes) -> tuple[Answer, float]:
    """The response, and the CPU seconds of the server, which do not depend on the load of the machine."""
    start, before = time.perf_counter(), worked(server)
    response = server.request("POST", path, data)
    return response, min(time.perf_counter() - start, worked(server) - before)


def test_there_are_enough_cases() -> None:
    assert len(HOSTILE) >= 200
    assert len({name.split(" ", 2)[2] for name, *_ in HOSTILE}) >= 100
    for field in ("response_format", "structured_outputs"):
        assert sum(name.startswith(f"{field} ") for name, *_ in HOSTILE) >= 50


def test_every_hostile_grammar_is_a_clear_error_in_time(server: Server) -> None:
    alone = server.request("POST", PATH, STORY).json["choices"][0]["text"]
    before, failures, streams = memory(server), list[str](), list[Stream]()
    for number, (name, path, field, data) in enumerate(HOSTILE[:: tiers.count(5, 1)]):
        if number % 40 == 0:
            streams.append(Stream(server, STORY))
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
    idle(server)
    assert memory(server) - before < 128
    good = server.request("POST", PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "still [0-9]"}})
    assert good.json["choices"][0]["text"].startswith("still ")


@pytest.mark.slow
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_grammar_that_is_slow_at_every_token_ends_only_its_own_request(server: Server, name: str) -> None:
    alone = server.request("POST", PATH, STORY).json["choices"][0]["text"]
    stream = Stream(server, STORY)
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
    idle(server)


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
