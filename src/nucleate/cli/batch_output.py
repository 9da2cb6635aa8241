"""The output of a batch: a file of records that resumes after interruptions, and the results of a run.

If a process is killed while writing, the next run removes the incomplete last record. A lock keeps two processes from
writing to one file, except on Windows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from nucleate.batch.batch_records import JsonLine, has_failed
from nucleate.cli.argument_parser import UsageError

if TYPE_CHECKING:
    from nucleate.batch.batch_runner import LineResult

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_FIRST = b'{"id": "line-'
_ID = re.compile(r"line-([1-9]\d{0,11})-([0-9a-f]{16})")


class BatchOutput:
    """The records of a batch, in a file or a pipe.

    path: - is stdout, which cannot be resumed, as a pipe. source: the input. overwrite: discard existing records.
    retry: discard the records of failed lines. Raises UsageError for a file that is not the output of this input.
    """

    def __init__(self, path: str, source: BinaryIO, *, overwrite: bool = False, retry: bool = False) -> None:
        self.path, self.failed, self.count = path, 0, 0  #: failed, count: of existing records
        self._digests = array("Q")  # by line number; 0: no record
        self.resumes = path != "-" and (not Path(path).exists() or Path(path).is_file())
        """Whether another run can resume."""
        if not self.resumes:
            self._fd = sys.stdout.fileno() if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND)
            return
        self._fd = _open(path)
        try:
            if _is_same_file(self._fd, source):
                raise UsageError(f"{path} is also the input: the output must be another file")
            os.ftruncate(self._fd, 0 if overwrite else self._read(retry=retry))
            if retry:
                self._remove_failed()
        except BaseException:
            os.close(self._fd)  # this releases the lock
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.path != "-":
            os.close(self._fd)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        _write(self._fd, json.dumps(record, allow_nan=False).encode() + b"\n")

    def match_lines(self, lines: Iterable[JsonLine]) -> Iterator[tuple[JsonLine, bool]]:
        """Yield each line and whether it has a record. Raises UsageError if the records are of another input."""
        found = 0
        for line in lines:
            known = self._digests[line.number] if line.number < len(self._digests) else 0
            if known not in (0, line.digest):
                raise self._mismatch(f"its record of line {line.number} is of another input")
            found += known != 0
            yield line, known != 0
        if found < self.count:
            raise self._mismatch("it has records of lines that are not in the input")

    def _mismatch(self, reason: str) -> UsageError:
        return UsageError(f"{self.path}: {reason}; use another output file or --overwrite")

    def _read(self, *, retry: bool) -> int:
        """Read the existing records. Returns the length of the file without an incomplete last record."""
        end = 0
        for raw, number, digest, failed in self._records():
            end += len(raw)
            if failed and retry:
                continue
            self.failed += failed
            if number >= len(self._digests):
                self._digests.frombytes(bytes(8 * (number + 1 - len(self._digests))))
            self.count += not self._digests[number]
            self._digests[number] = digest
        return end

    def _records(self) -> Iterator[tuple[bytes, int, int, bool]]:
        """Yield the complete records: raw, the number and digest of the line, and whether it failed."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for place, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and (raw.startswith(_FIRST) or _FIRST.startswith(raw)):
                    return
                try:
                    record = json.loads(raw)
                    number, digest = _ID.fullmatch(record["id"]).groups()  # type: ignore[union-attr]
                    yield raw, int(number), int(digest, 16), has_failed(record)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    raise self._mismatch(f"line {place} is not a record of nucleate batch") from None

    def _remove_failed(self) -> None:
        """Remove the records of failed lines, by replacing the file."""
        path = os.path.realpath(self.path)
        new = os.open(f"{path}.new", _FLAGS | os.O_TRUNC, 0o666)  # safe: the file itself is locked
        _lock(new, self.path)
        for raw, _, _, failed in self._records():
            if not failed:
                _write(new, raw)
        shutil.copymode(path, f"{path}.new")
        os.fsync(new)
        Path(f"{path}.new").replace(path)
        os.close(self._fd)
        self._fd = new


def _open(path: str) -> int:
    """Open and lock a file; again, if another process has replaced it meanwhile."""
    while True:
        file = os.open(path, _FLAGS, 0o666)
        _lock(file, path)
        try:
            if os.path.samestat(os.fstat(file), Path(path).stat()):
                return file
        except FileNotFoundError:
            pass
        os.close(file)


def _lock(file: int, path: str) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{path} is locked by another process") from None


def _is_same_file(file: int, source: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.fstat(source.fileno()))
    except (OSError, ValueError):  # the source is not a real file
        return False


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


PROGRESS_SECONDS = 0.2  # between updates of the progress bar


class BatchResults:
    """The results of a run, as records in a file, failures on stderr and numbers. progress: a bar that counts lines."""

    def __init__(self, output: BatchOutput, progress: Any) -> None:
        self.done = self.failed = self.tokens = 0  #: tokens: generated, also those of lines in progress
        self._output, self._progress = output, progress
        self._start, self._updated = time.perf_counter(), 0.0

    @property
    def rate(self) -> float:
        """Generated tokens per second, over the whole run."""
        return self.tokens / max(time.perf_counter() - self._start, 1e-9)

    def add(self, result: LineResult) -> None:
        """Write a record."""
        self._output.write(result.record)
        if result.failure is None:
            self.done += 1
        else:
            self.failed += 1
            short = textwrap.shorten(result.failure.message, 200, placeholder=" ...")  # the record has the full message
            self._progress.write(f"nucleate: line {result.entry.number}: {short}", file=sys.stderr)
        self._progress.update(1)

    def skip(self) -> None:
        """Count a line that has a record."""
        self._progress.update(1)

    def show(self, tokens: int) -> None:
        """Show the number of generated tokens so far, as a rate."""
        self.tokens, now = tokens, time.perf_counter()
        if now > self._updated + PROGRESS_SECONDS:
            self._updated = now
            self._progress.set_postfix_str(f"{self.rate:.0f} tokens/s, {self.failed} failed")
