"""The rows of a Sampler that the CPU samples: with the fused kernel, the composed path or the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.readiness import compiled
from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import ParameterError, unknown
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.numba.fused.edit_program import EditProgram
from nucleate.sampling.backends.numba.fused.fused_sampler import NOT_DRAWN, RowSelection, RowTable
from nucleate.sampling.cpu_paths import fused, report, runner
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import LogitsInput, contiguous_layout, contiguous_mask_layout, like, mask_layout, masks
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Pipeline, Tap

KEPT_BATCHES = 32
"""Batches that are remembered, one per set of rows."""


@dataclass(slots=True)
class SamplerRow:
    """The state of a row for its next step."""

    stages: Pipeline
    memory: IncrementalHistory
    seed: int
    tap: Tap | None = None  #: of a row that the fused kernel can run, as is the program
    program: EditProgram | None = None

    def move(self, stages: Pipeline) -> None:
        """Set the stages of the next step. The tuple stays the same object if no stage has changed its state."""
        if stages is not self.stages and any(old is not new for old, new in zip(self.stages, stages, strict=True)):
            self.stages = stages


class RowBatch(NamedTuple):
    """The rows of a call, kept for the next call as long as no row is added or removed."""

    requested: list[int] | None  #: None: all
    numbers: list[int]
    rows: list[SamplerRow]
    shape: tuple[int, int]
    seeds: NDArray[np.uint64]  #: not to be written to: calls share them
    places: list[int]  #: of those that run through the fused kernel
    part: RowSelection  #: these
    memories: list[IncrementalHistory] | None  #: if all do, and nothing more is to be done for them


Step = tuple[Any, Sequence[StepLogprobs | None] | None, Mapping[int, str], NDArray[np.uint64]]
"""The fields of a ``SamplerOutput``, in order."""


class HostBatch:
    """Runs steps of rows on the CPU.

    size: V. backend: as in ``sample``. rows: all rows of the sampler by number. Raises ParameterError for an unknown
    backend.
    """

    def __init__(self, size: int, backend: str, rows: Mapping[int, SamplerRow]) -> None:
        self._compiled = compiled(backend, 0)  # raises for an unknown backend
        self._size, self._backend, self._rows = size, backend, rows
        self._table = RowTable()  # the rows that run through the fused kernel
        self._batch: RowBatch | None = None  # of the last step
        self._batches: dict[tuple[int, ...] | None, RowBatch] = {}

    def fast(self, scores: int) -> bool:
        """Whether a call with so many scores uses compiled kernels. Once loaded, they stay loaded."""
        if not self._compiled:
            self._compiled = compiled(self._backend, scores)
        return self._compiled

    def add(self, number: int, row: SamplerRow, chain: FusedPipeline) -> None:
        """Add a row of the fused kernel. Other rows need no entry."""
        row.tap, row.program = chain.tap, EditProgram(chain.edits, row.memory, self._size) if chain.edits else None
        at = row.program.commands_at if row.program else (0, 0)
        self._table.add(number, chain.numbers, at, row.seed, len(row.memory.output))

    def remove(self, number: int) -> None:
        """Remove a row."""
        if number in self._table.slots:
            self._table.remove(number)

    def forget(self) -> None:
        """Drop remembered batches: rows were added or removed."""
        self._batch = None
        self._batches.clear()

    def push(self, number: int, row: SamplerRow, token: int) -> None:
        """Append a token that was not sampled here."""
        row.memory.push(token)
        self._count(number)

    def batch(self, requested: list[int] | None) -> RowBatch:
        """The rows of a call, cached: to verify drafts, callers ask for all rows, for fewer, and for all again."""
        key = None if requested is None else tuple(requested)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= KEPT_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._gathered(requested)
        return batch

    def _gathered(self, requested: list[int] | None) -> RowBatch:
        """The rows of a call."""
        numbers = list(self._rows) if requested is None else requested
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rows has one row twice, got {numbers!r:.60}")
        rows, slots = [known(self._rows, row) for row in numbers], self._table.slots
        places = [place for place, row in enumerate(numbers) if row in slots]
        part = self._table.select([numbers[place] for place in places], places)
        more = len(places) < len(rows) or any(row.tap or (row.program and row.program.is_dynamic) for row in rows)
        memories = None if more else [row.memory for row in rows]
        seeds = np.array([row.seed for row in rows], np.uint64)
        seeds.flags.writeable = False
        return RowBatch(requested, numbers, rows, (len(rows), self._size), seeds, places, part, memories)

    def step(self, requested: list[int] | None, logits_RV: Any, mask: Any) -> Step:
        """A step of these rows: one kernel call if the fused kernel runs all of them and none reports logprobs."""
        batch = self._batch
        if batch is None or batch.requested != requested:
            batch = self._batch = self.batch(requested)
        memories, (count, size) = batch.memories, batch.shape
        layout = contiguous_layout(logits_RV, batch.shape) if memories else None
        bitmask = contiguous_mask_layout(mask, count, size) if memories else None
        if not memories or layout is None or bitmask is None or not self.fast(count * size):
            return self._step(LogitsInput(logits_RV), batch, mask, None)
        part = batch.part
        fused()(size).draw(layout, count, part.control, bitmask)
        tokens_R = part.tokens.copy()
        tokens = tokens_R.tolist()
        if NOT_DRAWN in tokens:
            return self._step(LogitsInput(logits_RV), batch, mask, tokens_R)
        for memory, token in zip(memories, tokens, strict=True):
            memory.push(token)
        return like(logits_RV, tokens_R), None, {}, batch.seeds

    def _step(self, logits: LogitsInput, batch: RowBatch, mask: Any, drawn: NDArray[np.int64] | None) -> Step:
        """A step of any rows. drawn: the tokens that the fused kernel has drawn already."""
        count = len(batch.rows)
        if logits.shape != batch.shape:
            raise ValueError(f"logits must have the shape {list(batch.shape)}, got {list(logits.shape)}")
        masks_R = masks(mask, count, self._size)
        fast = count > 0 and self.fast(count * self._size)
        tokens_R = np.full(count, NOT_DRAWN, np.int64) if drawn is None else drawn
        if fast and drawn is None and batch.places:
            self._draw_chains(logits, batch, masks_R, tokens_R)
        errors: dict[int, str] = {}
        reported: dict[int, StepLogprobs] = {}
        for place, (row, token) in enumerate(zip(batch.rows, tokens_R.tolist(), strict=True)):
            if token >= 0:
                row_logprobs = None if row.tap is None else report(logits[place], token, row.tap.wanted)
            else:
                alone = self._draw_alone(logits[place], batch.numbers[place], row, masks_R[place], fast)
                if isinstance(alone, str):
                    errors[place] = alone
                    continue
                token, row_logprobs = alone
                tokens_R[place] = token
            row.memory.push(token)
            if row_logprobs is not None:
                reported[place] = row_logprobs
        logprobs = tuple(reported.get(place) for place in range(count)) if reported else None
        return logits.like(tokens_R), logprobs, errors, batch.seeds

    def _draw_chains(self, logits: LogitsInput, batch: RowBatch, masks_R: Any, tokens_R: NDArray[np.int64]) -> None:
        """Draw the rows that run through the fused kernel; those that it cannot draw from stay NOT_DRAWN."""
        for row in batch.rows:
            if row.program is not None:
                row.program.refresh()
        fused()(self._size).draw(logits.layout(), len(batch.places), batch.part.control, mask_layout(masks_R))
        tokens_R[batch.places] = batch.part.tokens

    def _draw_alone(
        self, logits_V: NDArray[np.float32], number: int, row: SamplerRow, mask_W: NDArray[np.int32] | None, fast: bool
    ) -> tuple[int, StepLogprobs | None] | str:
        """Sample one row with the composed path or the reference; or the reason why it cannot be sampled."""
        stages = row.stages if mask_W is None else with_mask(row.stages)
        row.memory.mask = mask_W
        try:
            result = runner(fast)(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            plain = isinstance(error, reference.RowError | ParameterError)
            return str(error) if plain else f"{type(error).__name__}: {error}"
        row.move(result.stages if stages is row.stages else without_mask(result.stages))
        self._count(number)
        return result.token, result.logprobs

    def alone(
        self, number: int, logits_V: NDArray[np.float32], mask_W: NDArray[np.int32] | None
    ) -> tuple[int, StepLogprobs | None] | str:
        """Sample one row and append the token; or the reason why it cannot be sampled."""
        row = self._rows[number]
        drawn = self._draw_alone(logits_V, number, row, mask_W, self.fast(self._size))
        if not isinstance(drawn, str):
            row.memory.push(drawn[0])
        return drawn

    def _count(self, number: int) -> None:
        """Advance the step of a row in the table of the fused kernel."""
        if number in self._table.slots:
            self._table.advance(number)


def known(rows: Mapping[int, SamplerRow], number: int) -> SamplerRow:
    """The row with a number. Raises ParameterError if there is none."""
    if number not in rows:
        raise unknown(str(number), map(str, rows), "row")
    return rows[number]
