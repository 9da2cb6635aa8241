"""Structured logging of the server: one line per event, as JSON or text.

Lines are queued and written by a thread, so that logging never blocks. Control characters are escaped in both formats,
so that clients cannot forge lines.
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

from nucleate.parameters.keywords import with_suggestions

LOGGERS = ("nucleate", "uvicorn", "asyncio")
"""Loggers whose records, with those of their children, go to the log."""

MAX_QUEUED_LINES = 4_096
"""Maximum lines waiting to be written; further ones are dropped."""

FLUSH_SECONDS = 5.0
"""Maximum time to write the last lines at shutdown."""

MAX_FIELD, MAX_TRACEBACK_LINE, MAX_TRACEBACK = 2_000, 500, 20_000
"""Maximum characters of a field; of a line of a traceback, as error messages may quote requests; of a traceback."""

QUIET = frozenset({"/health", "/ping", "/load", "/metrics"})
"""Routes polled by monitoring: logged at level debug unless they fail."""

LogFormat = Literal["json", "text"]


@with_suggestions
class RequestLog:
    """Writes log events. prompts: whether to log the beginning of prompts."""

    def __init__(self, *, prompts: bool = False) -> None:
        self.prompts = prompts
        self._logger = logging.getLogger("nucleate.server")

    def request(self, *, error: BaseException | None = None, prompt: str | None = None, **fields: Any) -> None:
        """Log a finished request. fields: at least ``status`` and ``route``, the matched route or else the path.

        error: an unexpected exception, logged with its traceback. prompt: logged only if ``prompts`` is set, cut to
        2,000 characters.
        """
        failed = error is not None or fields["status"] >= 500
        quiet = fields["route"] in QUIET and fields["status"] < 400
        level = logging.ERROR if failed else logging.DEBUG if quiet else logging.INFO
        self.event("request", level, error, **fields, prompt=prompt if self.prompts else None)

    def event(
        self, event: str, level: int = logging.INFO, error: BaseException | None = None, /, **fields: Any
    ) -> None:
        """Log an event. fields: JSON values; None is left out."""
        present = {name: _json_value(value) for name, value in fields.items() if value is not None}
        self._logger.log(level, event, exc_info=error, extra={"fields": present})


@contextmanager
def configure(stream: TextIO, *, log_format: LogFormat, level: str) -> Iterator[None]:
    """Within this context, the server, uvicorn and asyncio log to a stream, one line per event.

    log_format: "json" (one object per line) or "text". level: the minimum level, such as "info". Queued lines are
    written at the end. Raises ValueError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    lines: SimpleQueue[Any] = SimpleQueue()
    handler = _Queue(lines)
    handler.setFormatter(_JSON() if log_format == "json" else _Text())
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
        writer.join(FLUSH_SECONDS)
        handler.close()


class _Queue(QueueHandler):
    """Formats records and queues the lines, unless the queue is full."""

    queue: SimpleQueue[Any]

    def prepare(self, record: logging.LogRecord) -> str:
        """Format now, not on the writer thread: a traceback keeps all local variables alive."""
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        if self.queue.qsize() < MAX_QUEUED_LINES:
            self.queue.put(record)


def _write_all(lines: SimpleQueue[Any], stream: TextIO) -> None:
    """Write lines until None arrives.

    Handlers and buffered streams have locks that Python takes at exit, so that a stream without a reader would keep the
    server from stopping. So this writes to the file descriptor.
    """
    for line in iter(lines.get, None):
        with suppress(OSError, ValueError):  # closed, or disk full: try the next lines
            try:
                number = stream.fileno()
            except (AttributeError, OSError, ValueError):  # not a file
                stream.write(f"{line}\n")
            else:
                _write(number, f"{line}\n".encode(errors="backslashreplace"))


def _write(number: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:  # non-blocking descriptor: wait here
            time.sleep(0.01)


class _JSON(logging.Formatter):
    """One JSON object per line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"time": _time(record), "level": record.levelname.lower(), **_fields(record)}, default=repr)


class _Text(logging.Formatter):
    """One readable line per event. A traceback follows, indented, so that it cannot look like other lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        trace = fields.pop("traceback", "")
        text = " ".join(f"{name}={_text_value(value)}" for name, value in fields.items() if name != "event")
        event = _escape(fields["event"])
        line = f"{_time(record)} {record.levelname.lower():<7} {event} {text}".rstrip()
        return "\n".join([line, *(f"    | {_escape(part)}" for part in trace.split("\n") if part)])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record; for other loggers, the message and the logger."""
    own = getattr(record, "fields", None)
    if isinstance(own, dict):
        fields = {"event": record.getMessage(), **own}
    else:
        fields = {"event": _truncate(record.getMessage().strip(), MAX_FIELD), "logger": record.name}
    if record.exc_info and record.exc_info[1] is not None:
        lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip().split("\n")
        fields["traceback"] = "\n".join(_truncate(line, MAX_TRACEBACK_LINE) for line in lines)[-MAX_TRACEBACK:]
    return fields


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_value(value: Any) -> Any:
    """Cut a long field, and make numbers valid JSON."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else repr(value)
    return _truncate(value, MAX_FIELD) if isinstance(value, str) else value


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _text_value(value: Any) -> str:
    """Format a value as text: a plain word as it is, anything else quoted."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text_value, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z0-9_./:@+\[\]-]+", text) else json.dumps(text)


def _escape(text: str) -> str:
    """Escape line ends and terminal control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
