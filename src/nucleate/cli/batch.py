"""Process a JSONL file of requests.

An input line is a request of OpenAI's Batch API, a prompt as a JSON string, or an object with prompt or messages and
any sampling parameters. Each line gets one record in the output, in the order of completion. Run the same command again
to resume after an interruption. A line that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import sys
import textwrap
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from nucleate.batch.batch_records import JsonLine, has_failed, lines
from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.cli.sampling_flags import add_sampling, read_values

if TYPE_CHECKING:
    from nucleate.batch.batch_records import BatchRequest
    from nucleate.batch.batch_runner import LineResult

USAGE = "[OPTIONS] INPUT OUTPUT"
COMMON = (
    *("INPUT", "OUTPUT", "--model", "--max-tokens", "--temperature", "--top-p"),
    *("--seed", "--n", "--max-num-seqs", "--retry-errors", "--overwrite", "--json-schema"),
)
EXISTING = (
    Flag("--overwrite", "Discard the existing content of OUTPUT."),
    Flag("--retry-errors", "Process lines that failed before again."),
)
RAY = (
    Flag(
        "--ray ADDRESS",
        "Process the lines with Ray Data: local (start Ray on this machine), auto (the cluster that this machine is "
        "part of) or the address of a cluster. Needs the extra ray (default: one process, without Ray).",
    ),
    Flag(
        "--ray-actors N",
        "With --ray: number of engines (default: one per GPU of the cluster; without GPUs, one per machine).",
    ),
)
PREFETCH = 2
"""Requests in the engine per sequence that it can run, so that it never idles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="Input file; - reads stdin.")
    text = "Output file, to which records are appended; - writes to stdout."
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help=text)
    parser.add_argument("-o", "--output", dest="output_flag", metavar="OUTPUT", help="The same as OUTPUT.")
    add_flags(parser.add_mutually_exclusive_group(), EXISTING)
    add_flags(parser, (flags.PROGRESS, *RAY))
    flags.add_name(parser)
    flags.add_model(parser, engine=True)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    values = read_values(arguments)
    if (arguments.output is None) == (arguments.output_flag is None):
        raise UsageError("set the output file once: as OUTPUT, or with -o; - is stdout")
    arguments.output = arguments.output or arguments.output_flag
    if arguments.ray_actors is not None and (arguments.ray is None or arguments.ray_actors < 1):
        raise UsageError("--ray-actors needs --ray, and must be at least 1")
    with open_input(arguments.input) as source:
        options = {"overwrite": arguments.overwrite, "retry": arguments.retry_errors}
        with BatchOutput(arguments.output, source, **options) as output:
            total = count_lines(source, output)
            if total == output.count:
                return report(output, None, interrupted=False)
            return process(arguments, values, source, output, total)


def open_input(path: str) -> AbstractContextManager[BinaryIO]:
    """Open an input file; - is stdin."""
    if path != "-":
        return Path(path).open("rb")
    if sys.stdin is None:
        raise UsageError("nothing to read: stdin is closed")
    return nullcontext(sys.stdin.buffer)


def count_lines(source: BinaryIO, output: BatchOutput) -> int | None:
    """Count the input lines, if the source can be read twice. Raises UsageError if the output is of another input."""
    try:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
    except (OSError, ValueError):  # not a real file
        return None
    start = source.tell()
    total = sum(1 for _ in output.match_lines(lines(source)))
    source.seek(start)
    return total


def process(
    arguments: argparse.Namespace, values: dict[str, Any], source: BinaryIO, output: BatchOutput, total: int | None
) -> int:
    """Process the lines without a record. Returns the exit status."""
    from nucleate.llm import progress_bar

    engines = RayEngines(arguments, values) if arguments.ray is not None else LocalEngine(arguments, values)
    show = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    interrupted = False
    with progress_bar(total=total, unit="line", shown=show) as progress:
        results = BatchResults(output, progress)
        try:
            engines.process(pending(source, output, results), results)
        except KeyboardInterrupt:
            interrupted = True
    return report(output, results, engines.runtime, interrupted=interrupted)


def pending(source: BinaryIO, output: BatchOutput, results: BatchResults) -> Iterator[tuple[JsonLine, BatchRequest]]:
    """Yield the lines without a record."""
    from nucleate.batch.batch_records import LineReader

    reader = LineReader()
    for line, done in output.match_lines(lines(source)):
        entry = reader.read(line)
        if done:
            results.skip()
        else:
            yield line, entry


class LocalEngine:
    """One engine in this process."""

    def __init__(self, arguments: argparse.Namespace, values: dict[str, Any]) -> None:
        from nucleate.batch.batch_runner import BatchRun
        from nucleate.llm import LLM

        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(**flags.engine_options(arguments))
        self._batch = BatchRun(llm, engine, values, flags.model_names(arguments)[0])
        self._in_progress = PREFETCH * arguments.max_num_seqs
        self.runtime = llm.model.runtime

    def process(self, entries: Iterator[tuple[JsonLine, BatchRequest]], results: BatchResults) -> None:
        batch = self._batch
        batch.deliver = results.add
        for _, entry in entries:
            batch.start(entry)
            while len(batch.engine) >= self._in_progress:
                batch.step()
                results.show(batch.tokens)
        while len(batch.engine):
            batch.step()
            results.show(batch.tokens)


class RayEngines:
    """An engine in each of several Ray actors."""

    def __init__(self, arguments: argparse.Namespace, values: dict[str, Any]) -> None:
        from nucleate.scale.data import BatchActors
        from nucleate.scale.ray_extra import missing_ray

        if message := missing_ray():
            raise UsageError(f"--ray: {message}")
        self._actors = BatchActors(
            flags.model_options(arguments),
            flags.engine_options(arguments),
            values,
            flags.model_names(arguments)[0],
            address=arguments.ray,
            count=arguments.ray_actors,
        )
        self.runtime = f"{self._actors.count} Ray actor{'s' * (self._actors.count > 1)}"

    def process(self, entries: Iterator[tuple[JsonLine, BatchRequest]], results: BatchResults) -> None:
        tokens = 0
        for result in self._actors.process(entries):
            tokens += result.tokens
            results.add(result)
            results.show(tokens)


def report(output: BatchOutput, results: BatchResults | None, runtime: str = "", *, interrupted: bool) -> int:
    """Print the statistics of a run, and return its exit status."""
    failed, statistics = output.failed, ""
    parts = [f"{output.count} lines done before" + f" ({output.failed} of them failed)" * (output.failed > 0)]
    if results is not None:
        failed += results.failed
        parts = [f"{results.done} lines done", f"{results.failed} failed", *(parts if output.count else [])]
        statistics = f"; {results.tokens} tokens, {results.rate:.0f} tokens/s on {runtime}"
    print(f"[{', '.join(parts)}{statistics}]", file=sys.stderr)
    if interrupted and output.resumes:
        print("nucleate: interrupted; run the same command again to resume", file=sys.stderr)
    return 130 if interrupted else int(failed > 0)


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
