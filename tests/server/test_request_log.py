"""The log: one line per event, for any input, without blocking."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.server import request_log as module
from nucleate.server.request_log import LOGGERS, MAX_FIELD, LogFormat, RequestLog, configure

FORMS = pytest.mark.parametrize("form", ["json", "text"])
REQUEST: dict[str, Any] = {"id": "r-1", "method": "POST", "route": "/v1/completions", "status": 200, "seconds": 0.25}
NASTY = [
    "a\nb",
    "\r\n",
    "\x1b[2J",
    "\x00",
    "\u2028",
    "\x85",
    "\u202e",
    "\ud800",
    '"',
    "\\",
    '", "level": "x',
    "\x9b31m",
]
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def lines(write: Any, form: LogFormat = "json", level: str = "info", **more: Any) -> list[str]:
    stream = io.StringIO()
    with configure(stream, log_format=form, level=level):
        write(RequestLog(**more))
    text = stream.getvalue()
    assert text == "" or text.endswith("\n")
    return text.split("\n")[:-1]


def one(write: Any, **more: Any) -> dict[str, Any]:
    (line,) = lines(write, **more)
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert isinstance(told, dict)
    return told


def test_a_request_as_json() -> None:
    told = one(
        lambda log: log.request(
            **{**REQUEST, "seconds": 0.25000049},
            client="127.0.0.1:5000",
            stream=True,
            structured_outputs="json_schema",
            prompt_tokens=5,
            completion_tokens=7,
            time_to_first_token_seconds=0.0123456789,
            finish_reasons=("stop", "length"),
        )
    )
    at = datetime.fromisoformat(told.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert told == {
        **REQUEST,
        "level": "info",
        "event": "request",
        "client": "127.0.0.1:5000",
        "stream": True,
        "structured_outputs": "json_schema",
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "time_to_first_token_seconds": 0.012346,
        "finish_reasons": ["stop", "length"],
    }


def test_a_request_as_text() -> None:
    more: dict[str, Any] = {"client": "::1", "stream": False, "finish_reasons": ["stop", "stop"], "disconnected": True}
    (line,) = lines(lambda log: log.request(**REQUEST, **more), form="text")
    assert re.fullmatch(
        TIME + r" info    request id=r-1 method=POST route=/v1/completions status=200 seconds=0\.25 "
        r"client=::1 stream=no finish_reasons=stop,stop disconnected=yes",
        line,
    )


def test_an_empty_list() -> None:
    (line,) = lines(lambda log: log.request(**REQUEST, finish_reasons=[]), form="text")
    assert line.endswith(" finish_reasons=none")


def test_what_was_not_so_is_left_out() -> None:
    assert one(lambda log: log.request(**REQUEST)).keys() == {"time", "level", "event", *REQUEST}


def test_the_time_is_utc_with_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.time, "time", lambda: 1_700_000_000.0)
    assert one(lambda log: log.event("x"))["time"] == "2023-11-14T22:13:20.000Z"


@FORMS
@pytest.mark.parametrize("value", NASTY)
def test_nothing_a_client_sends_makes_another_line(form: LogFormat, value: str) -> None:
    def write(log: RequestLog) -> None:
        log.request(**{**REQUEST, "id": value, "route": value, "method": value}, client=value, prompt=value)
        logging.getLogger("uvicorn.error").warning("told: %s", value)

    made = lines(write, form, prompts=True)
    assert len(made) == 2
    assert all(line.isprintable() for line in made)
    if form == "json":
        told = [json.loads(line) for line in made]
        assert [told[0][name] for name in ("id", "route", "method", "client", "prompt")] == [value] * 5
        assert told[1]["event"] == f"told: {value}".strip()


@FORMS
@settings(max_examples=tiers.count(12, 50))
@given(value=st.text(max_size=30))
def test_any_text(form: LogFormat, value: str) -> None:
    made = lines(lambda log: log.request(**{**REQUEST, "route": value}), form, "debug")
    assert len(made) == 1
    assert made[0].isprintable()
    if form == "json":
        assert json.loads(made[0])["route"] == value
    elif value != "/v1/completions":
        words = re.fullmatch(r'(.* method=POST) route=("(?:[^"\\]|\\.)*"|[^" ]+) status=200 seconds=0\.25', made[0])
        assert words is not None


@pytest.mark.parametrize("value", ["x status=500", "x\nstatus=500", '" status=500 "', "\\", '\\" status=500'])
def test_a_value_of_the_text_form_looks_like_one_value(value: str) -> None:
    (line,) = lines(lambda log: log.request(**{**REQUEST, "route": value}), form="text")
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "QUOTED", line)
    assert "status=500" not in outside
    assert outside.count("status=200") == 1
    assert "route=QUOTED" in outside


def test_prompts_only_if_asked_for_and_never_all_of_a_long_one() -> None:
    assert "secret" not in str(one(lambda log: log.request(**REQUEST, prompt="secret")))
    assert one(lambda log: log.request(**REQUEST, prompt="secret"), prompts=True)["prompt"] == "secret"
    told = one(lambda log: log.request(**REQUEST, prompt="x" * 100_000), prompts=True)
    assert told["prompt"] == "x" * 2000 + "..."
    assert one(lambda log: log.request(**REQUEST, prompt="x" * 2000), prompts=True)["prompt"] == "x" * 2000


def test_no_field_is_long() -> None:
    long = "\U0001f600" * 100_000
    told = one(lambda log: log.request(**{**REQUEST, "route": long, "id": long}))
    assert len(told["route"]) == len(told["id"]) == MAX_FIELD + 3
    told = one(lambda log: logging.getLogger("uvicorn.error").info("%s", long))
    assert len(told["event"]) == MAX_FIELD + 3


def raised(message: str) -> BaseException:
    def inner() -> None:
        raise RuntimeError(message)

    try:
        inner()
    except RuntimeError as error:
        return error


def test_a_traceback_is_a_field() -> None:
    error = raised("went\nwrong")
    told = one(lambda log: log.request(**{**REQUEST, "status": 500}, error=error))
    assert told["level"] == "error"
    assert told["traceback"].startswith("Traceback (most recent call last):\n")
    assert told["traceback"].endswith("RuntimeError: went\nwrong")
    assert "in inner" in told["traceback"]


def test_a_traceback_for_people_cannot_look_like_lines_of_the_log() -> None:
    error = raised("went\n2026-01-01T00:00:00.000Z info    request forged\r2026-\x1b[2J")
    first, *rest = lines(lambda log: log.event("failed", logging.ERROR, error), form="text")
    assert re.fullmatch(TIME + " error   failed", first)
    assert rest[0] == "    | Traceback (most recent call last):"
    assert len(rest) > 4
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)


def test_a_traceback_is_not_endless() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1) if n % 2 else other(n - 1)
        raise RuntimeError("x" * 100_000)

    def other(n: int) -> None:
        deep(n - 1)

    try:
        deep(300)
    except RuntimeError as error:
        told = one(lambda log, error=error: log.event("failed", logging.ERROR, error))
    assert len(told["traceback"]) <= 20_000
    assert told["traceback"].endswith("RuntimeError: " + "x" * (500 - len("RuntimeError: ")) + "...")


def test_levels() -> None:
    def write(log: RequestLog) -> None:
        log.request(**REQUEST)
        log.request(**{**REQUEST, "status": 503})
        log.request(**{**REQUEST, "status": 200}, error=raised("x"))
        log.request(**{**REQUEST, "route": "/health"})
        log.request(**{**REQUEST, "route": "/health", "status": 503})
        log.request(**{**REQUEST, "route": "/metrics", "status": 401})

    def levels(level: str) -> list[str]:
        return [json.loads(line)["level"] for line in lines(write, level=level)]

    assert levels("info") == ["info", "error", "error", "error", "info"]
    assert levels("debug") == ["info", "error", "error", "debug", "error", "info"]
    assert levels("ERROR") == ["error", "error", "error"]
    assert levels("critical") == []
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        lines(write, level="loud")


def test_events_and_other_programs() -> None:
    told = one(lambda log: log.event("ready", host="::", port=8000, seconds=float("nan"), left=None))
    assert {**told, "time": ""} == {
        "time": "",
        "level": "info",
        "event": "ready",
        "host": "::",
        "port": 8000,
        "seconds": "nan",
    }
    told = one(lambda log: log.event("%s %d"))
    assert told["event"] == "%s %d"
    for name in ("uvicorn.error", "uvicorn", "asyncio", "nucleate"):
        told = one(lambda log, name=name: logging.getLogger(name).warning("a %s", "b", extra={"fields": 3}))
        assert {**told, "time": ""} == {"time": "", "level": "warning", "event": "a b", "logger": name}

    def fail(log: RequestLog) -> None:
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")

    told = one(fail)
    assert told["event"] == "Exception in ASGI application"
    assert told["traceback"].endswith("ValueError: x")


def test_loggers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "level", 33)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)

    def state() -> list[Any]:
        found = [logging.getLogger(name) for name in LOGGERS]
        return [(logger.level, logger.propagate, list(logger.handlers)) for logger in found]

    before, threads = state(), threading.active_count()

    def fail() -> None:
        with configure(io.StringIO(), log_format="json", level="info"):
            assert state() != before
            assert threading.active_count() == threads + 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert state() == before
    assert threading.active_count() == threads


def test_nothing_goes_to_the_root_too(caplog: pytest.LogCaptureFixture) -> None:
    lines(lambda log: [log.event("once"), logging.getLogger("uvicorn.error").error("once")])
    assert not caplog.records


class Stuck(io.StringIO):
    """A stream that takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        self.go.wait()
        return super().write(text)


def test_a_stuck_stream_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_LINES", 100)
    stream, log = Stuck(), RequestLog()
    with configure(stream, log_format="json", level="info"):
        log.event("line", number=0)
        stream.begun.wait()
        start = time.perf_counter()
        for number in range(1, 1000):
            log.event("line", number=number)
        assert time.perf_counter() - start < 30
        stream.go.set()
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["number"] for line in told] == list(range(101))


def test_the_last_lines_are_written() -> None:
    assert len(lines(lambda log: [log.event("line", number=number) for number in range(2000)])) == 2000


def test_many_threads() -> None:
    def write(log: RequestLog) -> None:
        threads = [threading.Thread(target=lambda: [log.event("x", n=n) for n in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    made = lines(write)
    assert sorted(json.loads(line)["n"] for line in made) == sorted(list(range(100)) * 4)


@pytest.fixture
def pipe() -> Iterator[tuple[int, Any]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream


def test_a_pipe_that_does_not_wait_gets_all(pipe: tuple[int, Any]) -> None:
    reading, stream = pipe
    os.set_blocking(stream.fileno(), False)
    found: list[bytes] = []

    def read() -> None:
        time.sleep(0.1)
        found.extend(iter(lambda: os.read(reading, 1000), b""))

    thread = threading.Thread(target=read)
    thread.start()
    with configure(stream, log_format="json", level="info"):
        for number in range(200):  # lines that a pipe takes in parts
            RequestLog().event("line", number=number, **dict.fromkeys("abcdef", "x" * 2000))
    stream.close()
    thread.join()
    os.close(reading)
    told = [json.loads(line) for line in b"".join(found).splitlines()]
    assert [(line["number"], len(line["f"])) for line in told] == [(number, 2000) for number in range(200)]


def test_a_reader_that_went_away_is_no_error(pipe: tuple[int, Any]) -> None:
    reading, stream = pipe
    os.close(reading)
    with configure(stream, log_format="json", level="info"):
        for _ in range(10):
            RequestLog().event("line")


def test_a_stream_that_was_closed_is_no_error() -> None:
    stream = io.StringIO()
    with configure(stream, log_format="json", level="info"):
        stream.close()
        RequestLog().event("line")


SCRIPT = """
import sys
from nucleate.server import request_log as log
log.FLUSH_SECONDS = 0.3
with log.configure(sys.stderr, log_format="json", level="info"):
    for number in range(3000):
        log.RequestLog().event("line", number=number, text="x" * 200)
print("over")
"""


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    begun = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    enough = threading.Timer(60, begun.kill)
    enough.start()
    with begun:
        assert begun.stdout is not None
        assert begun.stdout.read() == "over\n"
        assert begun.wait() == 0
    enough.cancel()
