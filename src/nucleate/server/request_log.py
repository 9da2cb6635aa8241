"""The log of a server: a line per event, as JSON or for people. Knows no HTTP, and by itself no prompt.

Whoever logs never waits for what the lines go to: they are queued, and a thread writes them. Nothing that a client sent
can make a line that looks like another: control characters are escaped in both forms.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, Literal, TextIO

LOGGERS = ("nucleate", "uvicorn", "asyncio")
"""Whose records go to the log, with all loggers below them."""

ROOM = 4_096
"""Lines that may wait to be written; more are dropped."""

PATIENCE = 5.0
"""Seconds that the end waits for the last lines to be written, if nobody takes them."""

LONGEST, LONGEST_LINE, LONGEST_TRACEBACK = 2_000, 500, 20_000
"""Characters of a field; of a line of a traceback, as messages of errors may quote what was asked; of a traceback."""

QUIET = frozenset({"/health", "/metrics"})
"""Routes that programs ask every few seconds: told at level debug, unless something is wrong."""

Form = Literal["json", "text"]


class RequestLog:
    """What the server tells of itself. prompts: whether the log may hold text of prompts."""

    def __init__(self, *, prompts: bool = False) -> None:
        self.prompts = prompts
        self._logger = logging.getLogger("nucleate.server")

    def request(self, *, error: BaseException | None = None, prompt: str | None = None, **fields: Any) -> None:
        """A request is over, with a status and a route: the path that was routed, or what was asked for if none was.

        error: what nobody expected; its traceback is logged, and must go nowhere else. prompt: logged, cut to 2,000
        characters, only if the log may hold prompts.
        """
        wrong = error is not None or fields["status"] >= 500
        quiet = fields["route"] in QUIET and fields["status"] < 400
        level = logging.ERROR if wrong else logging.DEBUG if quiet else logging.INFO
        self.event("request", level, error, **fields, prompt=prompt if self.prompts else None)

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
    lines: SimpleQueue[Any] = SimpleQueue()
    handler = _Queue(lines)
    handler.setFormatter(_JSON() if form == "json" else _Text())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    writer = threading.Thread(target=_write_all, args=(lines, stream), daemon=True)
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
        lines.put(None)
        writer.join(PATIENCE)
        handler.close()


class _Queue(QueueHandler):
    """Makes a line of a record, and queues it if there is room."""

    queue: SimpleQueue[Any]

    def prepare(self, record: logging.LogRecord) -> str:
        """Here, not on the thread that writes: a traceback holds on to all that its functions held."""
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        if self.queue.qsize() < ROOM:
            self.queue.put(record)


def _write_all(lines: SimpleQueue[Any], stream: TextIO) -> None:
    """Write lines until there is a None instead of one.

    Not by a handler, and not by a buffered stream: both have locks that Python takes as it exits, and a stream that
    nobody reads would keep the server from stopping.
    """
    for line in iter(lines.get, None):
        with suppress(OSError, ValueError):  # it was closed, or a disk is full: the next lines may have more luck
            try:
                number = stream.fileno()
            except (AttributeError, OSError, ValueError):  # it is no file
                stream.write(f"{line}\n")
            else:
                _write(number, f"{line}\n".encode(errors="backslashreplace"))


def _write(number: int, data: bytes) -> None:
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
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else repr(value)
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
    return text if re.fullmatch(r"[A-Za-z0-9_./:@+\[\]-]+", text) else json.dumps(text)


def _escaped(text: str) -> str:
    """Without line ends, and without what a terminal would take for an order."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
