"""Process a JSONL file of requests.

An input line is a request of OpenAI's Batch API, a prompt as a JSON string, or an object with prompt or messages and
any sampling parameters. Each line gets one record in the output, in the order of completion. Run the same command again
to resume after an interruption. A line that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from nucleate.batch.batch_records import JsonLine, lines
from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.batch_output import BatchOutput, BatchResults
from nucleate.cli.flag_values import read_values
from nucleate.cli.structured_flags import check_structured
from nucleate.cli.watermark_flags import add_watermark

if TYPE_CHECKING:
    from nucleate.batch.batch_records import BatchRequest

USAGE = "[OPTIONS] INPUT OUTPUT"
COMMON = {
    "INPUT": "Input file; - reads stdin.",
    "OUTPUT": "Output file to append records to; - is stdout.",
    "--model": "Folder, GGUF file or hub id (default: bundled).",
    "--max-tokens": "Maximum tokens per completion.",
    "--temperature": "Sampling temperature; 0 is greedy.",
    "--top-p": "Nucleus sampling: keep this probability mass.",
    "--seed": "Seed for reproducible output.",
    "--n": "Completions per prompt (default: 1).",
    "--max-num-seqs": "Maximum sequences that run at once (default: 64).",
    "--retry-errors": "Process lines that failed before again.",
    "--overwrite": "Discard the existing content of OUTPUT.",
    "--json-schema": "Generate JSON that conforms to a schema.",
}
"""The options of ``--help``."""
PREFETCH = 2
"""Requests in the engine per sequence that it can run, so that it never idles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="Input file; - reads stdin.")
    text = "Output file, to which records are appended; - writes to stdout."
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help=text)
    parser.add_argument("-o", "--output", dest="output_flag", metavar="OUTPUT", help="The same as OUTPUT.")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--overwrite", action="store_true", help="Discard the existing content of OUTPUT.")
    before.add_argument("--retry-errors", action="store_true", help="Process lines that failed before again.")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="Show a progress bar (default: if stderr is a terminal).",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="Process the lines with Ray Data: local (start Ray on this machine), auto (the cluster that this machine "
        "is part of) or the address of a cluster. Needs the extra ray (default: one process, without Ray).",
    )
    parser.add_argument(
        "--ray-actors",
        metavar="N",
        type=int,
        help="With --ray: number of engines (default: one per GPU of the cluster; without GPUs, one per machine).",
    )
    flags.add_name(parser)
    flags.add_model(parser)
    flags.add_engine(parser)
    flags.add_speculation(parser)
    add_watermark(parser)
    flags.add_sampling(parser)


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
        from nucleate.llm import LLM

        self._llm = LLM(**flags.model_options(arguments))
        self._engine = self._llm.new_engine(**flags.engine_options(arguments))
        self._values, self._name = values, flags.model_name(arguments)
        self._in_progress = PREFETCH * arguments.max_num_seqs
        self.runtime = self._llm.model.runtime
        check_structured(self._engine, values.get("structured_outputs"))

    def process(self, entries: Iterator[tuple[JsonLine, BatchRequest]], results: BatchResults) -> None:
        """Process lines."""
        from nucleate.batch.batch_runner import BatchRun

        batch = BatchRun(self._llm, self._engine, self._values, self._name, results.add)
        for _, entry in entries:
            batch.start(entry)
            while len(self._engine) >= self._in_progress:
                batch.step()
                results.show(batch.tokens)
        while len(self._engine):
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
            flags.model_name(arguments),
            address=arguments.ray,
            count=arguments.ray_actors,
        )
        self.runtime = f"{self._actors.count} Ray actor{'s' * (self._actors.count > 1)}"

    def process(self, entries: Iterator[tuple[JsonLine, BatchRequest]], results: BatchResults) -> None:
        """Process lines."""
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
