"""Answer the lines of a file, many at a time.

A line of the input is a request as OpenAI's Batch API has it, a prompt as a JSON string, or an object with prompt or
messages and any sampling parameters. Each gets a line in the output, as they finish. The same command again, after
whatever ended it, goes on where it was. A line that fails is reported, and the others go on.
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

if TYPE_CHECKING:
    from nucleate.cli.batch_runner import BatchRun

USAGE = "[OPTIONS] INPUT OUTPUT"
AHEAD = 2
"""Requests at hand for each answer that the engine can work on, so that none of its places is ever empty."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="the file of lines; - reads stdin")
    parser.add_argument(
        "output", metavar="OUTPUT", help="the file of answers, to which they are added; - writes to stdout"
    )
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--overwrite", action="store_true", help="forget the answers that are in OUTPUT")
    before.add_argument("--retry-errors", action="store_true", help="try the lines that failed before once more")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show a bar [default: if stderr is a terminal]"
    )
    flags.add_name(parser)
    flags.add_model(parser)
    flags.add_engine(parser)
    flags.add_speculation(parser)
    flags.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    values = flags.given(arguments)
    with open_input(arguments.input) as source:
        anew = {"overwrite": arguments.overwrite, "retry": arguments.retry_errors}
        with BatchOutput(arguments.output, source, **anew) as journal:
            total = survey(source, journal)
            if total == journal.count:
                return told(journal, None, interrupted=False)
            return answer(arguments, values, source, journal, total)


def survey(source: BinaryIO, journal: BatchOutput) -> int | None:
    """How many lines there are, if the source can be read twice. Raises UsageError if they are not the journal's."""
    try:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
    except (OSError, ValueError):  # no real file
        return None
    start = source.tell()
    total = sum(1 for _ in journal.checked(lines(source)))
    source.seek(start)
    return total


def answer(
    arguments: argparse.Namespace, values: dict[str, Any], source: BinaryIO, journal: BatchOutput, total: int | None
) -> int:
    """Answer the lines that have no record yet. Returns the exit status."""
    from nucleate.cli.batch_runner import BatchRun
    from nucleate.llm import LLM, progress_bar

    llm = LLM(**flags.model_options(arguments))
    engine, called = llm.new_engine(**flags.engine_options(arguments)), flags.model_name(arguments)
    check_structured(engine, values.get("structured_outputs"))
    shown = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    interrupted = False
    with progress_bar(total=total, unit="line", shown=shown) as progress:
        batch = BatchRun(llm, engine, values, called, journal, progress)
        try:
            for line, known in journal.checked(lines(source)):
                batch.skip(line) if known else batch.begin(line)
                while len(engine) >= AHEAD * arguments.max_num_seqs:
                    batch.step()
            while len(engine):
                batch.step()
        except KeyboardInterrupt:
            interrupted = True
    return told(journal, batch, interrupted=interrupted)


def told(journal: BatchOutput, batch: BatchRun | None, *, interrupted: bool) -> int:
    """Print the figures of a run, and return its exit status."""
    failed, figures = journal.failed, ""
    parts = [f"{journal.count} done before" + f" ({journal.failed} of them failed)" * (journal.failed > 0)]
    if batch is not None:
        failed += batch.failed
        parts = [f"{batch.done} lines done", f"{batch.failed} failed", *(parts if journal.count else [])]
        figures = f"; {batch.tokens} tokens, {batch.rate:.0f} tokens/s on {batch.llm.model.runtime}"
    print(f"[{', '.join(parts)}{figures}]", file=sys.stderr)
    if interrupted and journal.resumes:
        print("nucleate: interrupted; the same command again goes on from here", file=sys.stderr)
    return 130 if interrupted else int(failed > 0)
