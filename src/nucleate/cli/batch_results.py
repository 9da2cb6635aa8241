"""Writes the results of a batch, and shows and counts them."""

from __future__ import annotations

import sys
import textwrap
import time
from typing import Any

from nucleate.batch.batch_runner import LineResult
from nucleate.cli.batch_output import BatchOutput

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
