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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.server import request_log as module
from nucleate.server.request_log import LOGGERS, MAX_FIELD, LogFormat, RequestLog, configure

FORMATS = pytest.mark.parametrize("log_format", ["json", "text"])
REQUEST: dict[str, Any] = {"id": "r-1", "method": "POST", "route": "/v1/completions", "status": 200, "seconds": 0.25}
NASTY = (
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
)
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def lines(write: Any, log_format: LogFormat = "json", level: str = "info", **more: Any) -> list[str]:
    stream = io.StringIO()
    with configure(stream, log_format=log_format, level=level):
        write(RequestLog(**more))
    text = stream.getvalue()
    assert text == "" or text.endswith("\n")
    return text.split("\n")[:-1]


def one(write: Any, **more: Any) -> dict[str, Any]:
    (line,) = lines(write, **more)
    assert line.isascii()
    assert line.isprintable()
    record = json.loads(line)
    assert isinstance(record, dict)
    return record


def test_a_request_as_json() -> None:
    fields = {"client": "127.0.0.1:5000", "stream": True, "structured_outputs": "json_schema", "prompt_tokens": 5}
    precise: dict[str, Any] = {"seconds": 0.25000049, "time_to_first_token_seconds": 0.0123456789}
    record = one(lambda log: log.request(**{**REQUEST, **precise}, **fields, finish_reasons=("stop", "length")))
    at = datetime.fromisoformat(record.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert record == {
        **REQUEST,
        "level": "info",
        "event": "request",
        **fields,
        "time_to_first_token_seconds": 0.012346,
        "finish_reasons": ["stop", "length"],
    }
    assert one(lambda log: log.request(**REQUEST)).keys() == {"time", "level", "event", *REQUEST}


def test_a_request_as_text() -> None:
    more: dict[str, Any] = {"client": "::1", "stream": False, "finish_reasons": ["stop", "stop"], "disconnected": True}
    (line,) = lines(lambda log: log.request(**REQUEST, **more), log_format="text")
    assert re.fullmatch(
        TIME + r" info    request id=r-1 method=POST route=/v1/completions status=200 seconds=0\.25 "
        r"client=::1 stream=no finish_reasons=stop,stop disconnected=yes",
        line,
    )
    (line,) = lines(lambda log: log.request(**REQUEST, finish_reasons=[]), log_format="text")
    assert line.endswith(" finish_reasons=none")


def test_the_time_is_utc_with_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.time, "time", lambda: 1_700_000_000.0)
    monkeypatch.setattr(logging.time, "time_ns", lambda: 1_700_000_000_000_000_000)  # of Python 3.13
    assert one(lambda log: log.event("x"))["time"] == "2023-11-14T22:13:20.000Z"


@FORMATS
@pytest.mark.parametrize("value", NASTY)
def test_client_input_never_adds_a_line(log_format: LogFormat, value: str) -> None:
    def write(log: RequestLog) -> None:
        log.request(**{**REQUEST, "id": value, "route": value, "method": value}, client=value, prompt=value)
        logging.getLogger("uvicorn.error").warning("message: %s", value)

    made = lines(write, log_format, prompts=True)
    assert len(made) == 2
    assert all(line.isprintable() for line in made)
    if log_format == "json":
        records = [json.loads(line) for line in made]
        assert [records[0][name] for name in ("id", "route", "method", "client", "prompt")] == [value] * 5
        assert records[1]["event"] == f"message: {value}".strip()


@FORMATS
@settings(max_examples=tiers.count(12, 50))
@given(value=st.text(max_size=30))
def test_any_text(log_format: LogFormat, value: str) -> None:
    made = lines(lambda log: log.request(**{**REQUEST, "route": value}), log_format, "debug")
    assert len(made) == 1
    assert made[0].isprintable()
    if log_format == "json":
        assert json.loads(made[0])["route"] == value
    elif value != "/v1/completions":
        words = re.fullmatch(r'(.* method=POST) route=("(?:[^"\\]|\\.)*"|[^" ]+) status=200 seconds=0\.25', made[0])
        assert words is not None


def test_prompts_are_logged_only_if_requested_and_truncated() -> None:
    assert "secret" not in str(one(lambda log: log.request(**REQUEST, prompt="secret")))
    assert one(lambda log: log.request(**REQUEST, prompt="secret"), prompts=True)["prompt"] == "secret"
    record = one(lambda log: log.request(**REQUEST, prompt="x" * 100_000), prompts=True)
    assert record["prompt"] == "x" * 2000 + "..."
    assert one(lambda log: log.request(**REQUEST, prompt="x" * 2000), prompts=True)["prompt"] == "x" * 2000


def test_long_fields_are_truncated() -> None:
    long = "\U0001f600" * 100_000
    record = one(lambda log: log.request(**{**REQUEST, "route": long, "id": long}))
    assert len(record["route"]) == len(record["id"]) == MAX_FIELD + 3
    record = one(lambda log: logging.getLogger("uvicorn.error").info("%s", long))
    assert len(record["event"]) == MAX_FIELD + 3


def raised(message: str) -> BaseException:
    def inner() -> None:
        raise RuntimeError(message)

    try:
        inner()
    except RuntimeError as error:
        return error


def test_a_traceback_is_a_field() -> None:
    error = raised("went\nwrong")
    record = one(lambda log: log.request(**{**REQUEST, "status": 500}, error=error))
    assert record["level"] == "error"
    assert record["traceback"].startswith("Traceback (most recent call last):\n")
    assert record["traceback"].endswith("RuntimeError: went\nwrong")
    assert "in inner" in record["traceback"]


def test_a_traceback_in_the_text_format_cannot_look_like_log_lines() -> None:
    error = raised("went\n2026-01-01T00:00:00.000Z info    request forged\r2026-\x1b[2J")
    first, *rest = lines(lambda log: log.event("failed", logging.ERROR, error), log_format="text")
    assert re.fullmatch(TIME + " error   failed", first)
    assert rest[0] == "    | Traceback (most recent call last):"
    assert len(rest) > 4
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)


def test_a_traceback_has_a_maximum_length() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1) if n % 2 else other(n - 1)
        raise RuntimeError("x" * 100_000)

    def other(n: int) -> None:
        deep(n - 1)

    try:
        deep(300)
    except RuntimeError as error:
        record = one(lambda log, error=error: log.event("failed", logging.ERROR, error))
    assert len(record["traceback"]) <= 20_000
    assert record["traceback"].endswith("RuntimeError: " + "x" * (500 - len("RuntimeError: ")) + "...")


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


def test_events_of_the_server_and_of_libraries() -> None:
    record = one(lambda log: log.event("ready", host="::", port=8000, seconds=float("nan"), left=None))
    record.pop("time")
    assert record == {"level": "info", "event": "ready", "host": "::", "port": 8000, "seconds": "nan"}
    assert one(lambda log: log.event("%s %d"))["event"] == "%s %d"
    for name in ("uvicorn.error", "uvicorn", "asyncio", "nucleate"):
        record = one(lambda log, name=name: logging.getLogger(name).warning("a %s", "b", extra={"fields": 3}))
        record.pop("time")
        assert record == {"level": "warning", "event": "a b", "logger": name}
    error = raised("x")
    message = "Exception in ASGI application\n"
    record = one(lambda log: logging.getLogger("uvicorn.error").error(message, exc_info=error))
    assert record["event"] == "Exception in ASGI application"
    assert record["traceback"].endswith("RuntimeError: x")


def test_loggers_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_passed_to_the_root_logger(caplog: pytest.LogCaptureFixture) -> None:
    lines(lambda log: [log.event("once"), logging.getLogger("uvicorn.error").error("once")])
    assert not caplog.records


class Stuck(io.StringIO):
    """A stream that blocks writes until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.started.set()
        self.go.wait()
        return super().write(text)


def test_a_stuck_stream_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_LINES", 100)
    stream, log = Stuck(), RequestLog()
    with configure(stream, log_format="json", level="info"):
        log.event("line", number=0)
        stream.started.wait()
        start = time.perf_counter()
        for number in range(1, 1000):
            log.event("line", number=number)
        assert time.perf_counter() - start < 30
        stream.go.set()
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["number"] for line in records] == list(range(101))


def test_logging_from_many_threads() -> None:
    """The last lines are written too."""

    def write(log: RequestLog) -> None:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(lambda: [log.event("x", n=n) for n in range(500)])

    assert sorted(json.loads(line)["n"] for line in lines(write)) == sorted([*range(500)] * 4)


@pytest.fixture
def pipe() -> Iterator[tuple[int, Any]]:
    read_end, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield read_end, stream


def test_a_non_blocking_pipe_gets_all_lines(pipe: tuple[int, Any]) -> None:
    read_end, stream = pipe
    os.set_blocking(stream.fileno(), False)
    found: list[bytes] = []

    def read() -> None:
        time.sleep(0.1)
        found.extend(iter(lambda: os.read(read_end, 1000), b""))

    thread = threading.Thread(target=read)
    thread.start()
    with configure(stream, log_format="json", level="info"):
        for number in range(200):  # lines that a pipe accepts in parts
            RequestLog().event("line", number=number, **dict.fromkeys("abcdef", "x" * 2000))
    stream.close()
    thread.join()
    os.close(read_end)
    records = [json.loads(line) for line in b"".join(found).splitlines()]
    assert [(line["number"], len(line["f"])) for line in records] == [(number, 2000) for number in range(200)]


def test_a_closed_pipe_or_stream_is_no_error(pipe: tuple[int, Any]) -> None:
    read_end, stream = pipe
    os.close(read_end)
    with configure(stream, log_format="json", level="info"):
        for _ in range(10):
            RequestLog().event("line")
    closed = io.StringIO()
    with configure(closed, log_format="json", level="info"):
        closed.close()
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


@pytest.mark.slow
def test_a_process_ends_though_its_log_is_not_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    enough = threading.Timer(60, child.kill)
    enough.start()
    with child:
        assert child.stdout is not None
        assert child.stdout.read() == "over\n"
        assert child.wait() == 0
    enough.cancel()
