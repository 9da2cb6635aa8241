"""The log of a server: a line per event, as JSON or for people. Knows no HTTP, and by itself no prompt.

Whoever logs never waits for what the lines go to: they are queued, and a thread writes them. Nothing that a client sent
can make a line that looks like another: control characters are escaped in both forms.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal, TextIO

LOGGERS = ("nucleate", "uvicorn", "asyncio")
"""Whose records go to the log, with all loggers below them."""

ROOM = 4_096
"""Lines that may wait to be written; more are dropped."""

PATIENCE = 5.0
"""Seconds that the end waits for the last lines to be written, if nobody takes them; and between two lines that tell of
dropped ones."""

LONGEST, LONGEST_LINE, LONGEST_TRACEBACK = 2_000, 500, 20_000
"""Characters of a field; of a line of a traceback, as messages of errors may quote what was asked; of a traceback."""

QUIET = frozenset({"/health", "/metrics"})
"""Routes that programs ask every few seconds: told at level debug, unless something is wrong."""

Form = Literal["json", "text"]


class Log:
    """What the server tells of itself. prompts: whether the log may hold text of prompts."""

    def __init__(self, *, prompts: bool = False) -> None:
        self.prompts = prompts
        self._logger = logging.getLogger("nucleate.server")

    def request(
        self,
        *,
        id: str,
        method: str,
        route: str,
        status: int,
        seconds: float,
        client: str | None = None,
        stream: bool | None = None,
        structured: str | None = None,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        first_token_seconds: float | None = None,
        finish_reasons: Sequence[str] | None = None,
        disconnected: bool = False,
        error: BaseException | None = None,
        prompt: str | None = None,
    ) -> None:
        """A request is over.

        route: the path that was routed, or what was asked for if none was. What is None is left out. disconnected:
        the client left before the end. error: what nobody expected; its traceback is logged, and must go nowhere else.
        structured: the kind of form that was asked for, never the form itself.
        prompt: logged, cut to 2,000 characters, only if the log may hold prompts.
        """
        fields = {
            "id": id,
            "client": client,
            "method": method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "stream": stream,
            "structured": structured,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "first_token_seconds": None if first_token_seconds is None else round(first_token_seconds, 6),
            "finish_reasons": None if finish_reasons is None else list(finish_reasons),
            "disconnected": disconnected or None,
            "prompt": prompt if self.prompts else None,
        }
        wrong = error is not None or status >= 500
        quiet = route in QUIET and status < 400
        level = logging.ERROR if wrong else logging.DEBUG if quiet else logging.INFO
        self.event("request", level, error, **fields)

    def event(
        self, event: str, level: int = logging.INFO, error: BaseException | None = None, /, **fields: Any
    ) -> None:
        """Something else has happened. fields: JSON values; what is None is left out."""
        told = {name: _plain(value) for name, value in fields.items() if value is not None}
        self._logger.log(level, event, exc_info=error, extra={"fields": told})


@contextmanager
def configure(stream: TextIO, *, form: Form, level: str) -> Iterator[None]:
    """While this lasts, what the server, uvicorn and asyncio log goes to a stream, a line per event.

    stream: usually sys.stderr. form: "json", an object per line, or "text". level: the least that is told, such as
    "info". At the end the lines that wait are written, if the stream takes them. Raises ValueError for another level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}")
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    handler = _Queue(lines)
    handler.setFormatter(_JSON() if form == "json" else _Text())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    writer = _Writer(lines, handler, stream)
    writer.start()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(number)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old)
            logger.propagate = propagate
        writer.stop()
        handler.close()


class _Queue(QueueHandler):
    """Makes a line of a record, and queues it if there is room."""

    def __init__(self, lines: queue.SimpleQueue[Any]) -> None:
        super().__init__(lines)
        self._lines = lines
        self.dropped = 0  # all in all

    def prepare(self, record: logging.LogRecord) -> str:
        """Here, not on the thread that writes: a traceback holds on to all that its functions held."""
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        if self._lines.qsize() < ROOM:
            self._lines.put(record)
        else:
            self.dropped += 1


class _Writer(QueueListener):
    """Writes lines on a thread of its own.

    Not by a handler, and not by a buffered stream: both have locks that Python takes as it exits, and a stream that
    nobody reads would keep the server from stopping.
    """

    def __init__(self, lines: queue.SimpleQueue[Any], handler: _Queue, stream: TextIO) -> None:
        super().__init__(lines)
        self._handler, self._stream = handler, stream
        self._lost = 0  # lines that could not be written
        self._told, self._when = 0, float("-inf")  # of those dropped and lost; when it was told last

    def handle(self, record: Any) -> None:
        self._tell_dropped()
        self._write(record)

    def stop(self) -> None:
        """Wait for the last lines, but not forever."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if not self._thread.is_alive():
                self._when = float("-inf")
                self._tell_dropped()
        self._thread = None

    def _tell_dropped(self) -> None:
        """Now and then, not for each."""
        dropped, now = self._handler.dropped + self._lost, time.monotonic()
        if dropped > self._told and now - self._when >= PATIENCE:
            fields = {"dropped": dropped - self._told}
            made = {"msg": "lines of this log were dropped", "levelname": "WARNING", "fields": fields}
            self._write(self._handler.format(logging.makeLogRecord(made)))
            self._told, self._when = dropped, now

    def _write(self, line: str) -> None:
        try:
            number = self._stream.fileno()
        except (AttributeError, OSError, ValueError):  # it is no file
            number = -1
        try:
            if number < 0:
                self._stream.write(line + "\n")
            else:
                _write_all(number, f"{line}\n".encode(errors="backslashreplace"))
        except (OSError, ValueError):  # it was closed, or a disk is full: the next lines may have more luck
            self._lost += 1


def _write_all(number: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:  # it does not wait by itself: this thread may
            time.sleep(0.01)


class _JSON(logging.Formatter):
    """An object per line, of ASCII characters only."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"time": _time(record), "level": record.levelname.lower(), **_fields(record)}, default=repr)


class _Text(logging.Formatter):
    """A short line for people. A traceback follows it, indented, so that it cannot be taken for other lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        trace = fields.pop("traceback", "")
        told = " ".join(f"{name}={_word(value)}" for name, value in fields.items() if name != "event")
        event = _escaped(fields["event"])
        line = f"{_time(record)} {record.levelname.lower():<7} {event} {told}".rstrip()
        return "\n".join([line, *(f"    | {_escaped(part)}" for part in trace.split("\n") if part)])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record tells; of other programs' loggers their message."""
    own = getattr(record, "fields", None)
    if isinstance(own, dict):
        fields = {"event": record.getMessage(), **own}
    else:
        fields = {"event": _cut(record.getMessage().strip(), LONGEST), "logger": record.name}
    if record.exc_info and record.exc_info[1] is not None:
        lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip().split("\n")
        fields["traceback"] = "\n".join(_cut(line, LONGEST_LINE) for line in lines)[-LONGEST_TRACEBACK:]
    return fields


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """A field of a bounded length, and a number that JSON can write."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return _cut(value, LONGEST) if isinstance(value, str) else value


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _word(value: Any) -> str:
    """A value of the text form: as it is if it is a plain word, else in quotes, so that it cannot look like more."""
    if isinstance(value, list | tuple):
        return ",".join(map(_word, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if re.fullmatch(r"[A-Za-z0-9_./:@+\[\]-]+", text):
        return text
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escaped(text: str) -> str:
    """Without line ends, and without what a terminal would take for an order."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
