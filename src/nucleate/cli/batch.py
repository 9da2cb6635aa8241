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
from typing import TYPE_CHECKING, Any, BinaryIO

from nucleate.cli import flags
from nucleate.cli.batch_output import BatchOutput
from nucleate.cli.jsonl import lines, open_input
from nucleate.cli.structured_flags import check_structured
from nucleate.cli.watermark_flags import add_watermark

if TYPE_CHECKING:
    from nucleate.cli.batch_runner import BatchRun

USAGE = "[OPTIONS] INPUT OUTPUT"
COMMON = {
    "INPUT": "Input file; - reads stdin.",
    "OUTPUT": "Output file to append records to; - is stdout.",
    "--model": "Folder or Hugging Face id (default: bundled).",
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
    parser.add_argument(
        "output", metavar="OUTPUT", help="Output file, to which records are appended; - writes to stdout."
    )
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--overwrite", action="store_true", help="Discard the existing content of OUTPUT.")
    before.add_argument("--retry-errors", action="store_true", help="Process lines that failed before again.")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="Show a progress bar (default: if stderr is a terminal).",
    )
    flags.add_name(parser)
    flags.add_model(parser)
    flags.add_engine(parser)
    flags.add_speculation(parser)
    add_watermark(parser)
    flags.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    values = flags.read_values(arguments)
    with open_input(arguments.input) as source:
        options = {"overwrite": arguments.overwrite, "retry": arguments.retry_errors}
        with BatchOutput(arguments.output, source, **options) as output:
            total = count_lines(source, output)
            if total == output.count:
                return report(output, None, interrupted=False)
            return process(arguments, values, source, output, total)


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
    from nucleate.cli.batch_runner import BatchRun
    from nucleate.llm import LLM, progress_bar

    llm = LLM(**flags.model_options(arguments))
    engine, name = llm.new_engine(**flags.engine_options(arguments)), flags.model_name(arguments)
    check_structured(engine, values.get("structured_outputs"))
    show = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    interrupted = False
    with progress_bar(total=total, unit="line", shown=show) as progress:
        batch = BatchRun(llm, engine, values, name, output, progress)
        try:
            for line, done in output.match_lines(lines(source)):
                batch.skip(line) if done else batch.start(line)
                while len(engine) >= PREFETCH * arguments.max_num_seqs:
                    batch.step()
            while len(engine):
                batch.step()
        except KeyboardInterrupt:
            interrupted = True
    return report(output, batch, interrupted=interrupted)


def report(output: BatchOutput, batch: BatchRun | None, *, interrupted: bool) -> int:
    """Print the statistics of a run, and return its exit status."""
    failed, statistics = output.failed, ""
    parts = [f"{output.count} lines done before" + f" ({output.failed} of them failed)" * (output.failed > 0)]
    if batch is not None:
        failed += batch.failed
        parts = [f"{batch.done} lines done", f"{batch.failed} failed", *(parts if output.count else [])]
        statistics = f"; {batch.tokens} tokens, {batch.rate:.0f} tokens/s on {batch.llm.model.runtime}"
    print(f"[{', '.join(parts)}{statistics}]", file=sys.stderr)
    if interrupted and output.resumes:
        print("nucleate: interrupted; run the same command again to resume", file=sys.stderr)
    return 130 if interrupted else int(failed > 0)
