"""Samples the rows of a Sampler on the CPU: with the fused kernel, the composed path or the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import compiled
from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import unknown
from nucleate.sampling import reference
from nucleate.sampling.cpu.fused_runner import (
    NOT_DRAWN,
    EditProgram,
    RowSelection,
    RowTable,
    draw_with_numpy,
    thread_runner,
)
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import (
    LogitsInput,
    RowId,
    check_shape,
    contiguous_layout,
    contiguous_mask_layout,
    like,
    mask_layout,
    masks,
)
from nucleate.sampling.pipeline import FusedPipeline
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.reference import add_values
from nucleate.sampling.stage import Draw, Pipeline, SampledToken, Shift, Tap


def row_path(fast: bool) -> Any:
    """The module that runs rows without the fused kernel: composed on the CPU (fast), or the reference.

    Both have ``run``, ``survivors`` and ``probabilities``.
    """
    if not fast:
        return reference
    from nucleate.sampling.cpu import evaluation  # rows of the fused kernel do not need it

    return evaluation


KEPT_STATES = 1024
"""Maximum number of tokens that ``rollback`` can take back from a row with stateful stages."""

KEPT_BATCHES = 32
"""Maximum number of cached RowBatches, one per list of rows."""


@dataclass(slots=True)
class SamplerRow:
    """The state of a row for its next step."""

    stages: Pipeline
    memory: IncrementalHistory
    seed: int
    tap: Tap | None = None  #: only of rows of the fused kernel
    program: EditProgram | None = None  #: likewise
    values: Shift | None = None  #: likewise: added to the logits before the kernel runs
    keyed: bool = False  #: likewise: whether the noise depends on the history, see ``Draw.noise_key``
    fused: FusedPipeline | None = None  #: likewise: for ``draw_with_numpy``
    past: deque[Pipeline] | None = None  #: the stages before each of the last tokens, if one has a state

    def move(self, stages: Pipeline) -> None:
        """Set the stages of the next step. The tuple stays the same object if no stage has changed its state."""
        if self.past is not None:
            self.past.append(self.stages)
        if stages is not self.stages and any(old is not new for old, new in zip(self.stages, stages, strict=True)):
            self.stages = stages


class RowBatch(NamedTuple):
    """The rows of a call. Reused by calls with the same rows until a row is added or removed."""

    numbers: list[RowId]
    rows: list[SamplerRow]
    shape: tuple[int, int]
    seeds: NDArray[np.uint64]  #: read-only, shared by calls
    positions: list[int]  #: positions of the rows of the fused kernel
    part: RowSelection  #: the same in the table
    appends: list[Callable[[int], None]] | None  #: of histories, if one kernel call and an append per row are a step


Step = tuple[Any, Sequence[StepLogprobs | None] | None, Mapping[int, str], NDArray[np.uint64]]
"""The fields of a ``SamplerOutput``, in order."""


class HostBatch:
    """Runs steps of rows on the CPU.

    size: V. backend: as in ``sample``. rows: all rows of the sampler by number. Raises ParameterError for an unknown
    backend.
    """

    def __init__(self, size: int, backend: str, rows: Mapping[RowId, SamplerRow]) -> None:
        self._compiled = compiled(backend, 0)  # raises for an unknown backend
        self._size, self._backend, self._rows = size, backend, rows
        self._table = RowTable()  # the rows of the fused kernel
        self._shifted = np.empty((0, size), np.float32)  # buffer for logits with values
        self._batches: dict[tuple[RowId, ...] | None, RowBatch] = {}

    def fast(self, scores: int) -> bool:
        """Whether a call with this number of scores uses compiled kernels. Once loaded, they stay loaded."""
        if not self._compiled:
            self._compiled = compiled(self._backend, scores)
        return self._compiled

    def add(self, number: RowId, row: SamplerRow, fused: FusedPipeline | str) -> None:
        """Add a row. fused: see ``PreparedPipeline``."""
        self.clear_cache()
        if isinstance(fused, str):
            return
        row.fused = fused
        row.tap, row.program = fused.tap, EditProgram(fused.edits, row.memory, self._size) if fused.edits else None
        row.values = fused.values
        row.keyed = isinstance(row.stages[-1], Draw) and row.stages[-1].keyed
        at = row.program.commands_at if row.program else (0, 0)
        self._table.add(number, fused.params, at, row.seed, len(row.memory.output))

    def remove(self, number: RowId) -> None:
        """Remove a row."""
        self.clear_cache()
        self._table.remove(number)

    def clear_cache(self) -> None:
        """Drop cached RowBatches, after rows were added or removed."""
        self._batches.clear()

    def push(self, number: RowId, token: int, updated: Pipeline | None = None) -> None:
        """Append a token that was not sampled here. updated: the stages after it; None: as if its probability was 1."""
        row = self._rows[number]
        row.memory.push(token)
        self._table.advance(number)
        row.move(updated or tuple(stage.update(SampledToken(token, 0.0, 0.0)) for stage in row.stages))

    def rollback(self, number: RowId, count: int, stages: Pipeline) -> None:
        """Take back the last tokens of a row. stages: those before these tokens."""
        row = self._rows[number]
        row.memory.pop(count)
        self._table.advance(number, -count)
        row.stages = stages
        for _ in range(min(count, len(row.past or ()))):
            row.past.pop()  # type: ignore[union-attr]

    def synchronise(self) -> None:
        """Nothing to do: histories and states are on the host."""

    def batch(self, requested: list[RowId] | None) -> RowBatch:
        """The rows of a call. Cached, as speculative decoding alternates between all rows and some of them."""
        key = None if requested is None else tuple(requested)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= KEPT_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._make_batch(requested)
        return batch

    def _make_batch(self, requested: list[RowId] | None) -> RowBatch:
        numbers = list(self._rows) if requested is None else requested
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rows has one row twice, got {numbers!r:.60}")
        rows, slots = [known(self._rows, row) for row in numbers], self._table.slots
        positions = [position for position, row in enumerate(numbers) if row in slots]
        part = self._table.select([numbers[position] for position in positions], positions)
        needs_more = len(positions) < len(rows) or any(
            row.tap or row.values or row.keyed or (row.program and row.program.dynamic) for row in rows
        )
        appends = None if needs_more else [row.memory.append for row in rows]
        seeds = np.array([row.seed for row in rows], np.uint64)
        seeds.flags.writeable = False
        return RowBatch(numbers, rows, (len(rows), self._size), seeds, positions, part, appends)

    def step(self, requested: list[RowId] | None, logits_RV: Any, mask: Any, *, append: bool = True) -> Step:
        """Sample a token per row: with one kernel call if the fused kernel runs all rows and none reports logprobs.

        append: advance the rows; otherwise they do not change.
        """
        batch = self.batch(requested)
        appends, (count, size) = batch.appends, batch.shape
        layout = contiguous_layout(logits_RV, batch.shape) if appends else None
        bitmask = contiguous_mask_layout(mask, count, size) if appends else None
        if not appends or layout is None or bitmask is None or not self.fast(count * size):
            return self._step(LogitsInput(logits_RV), batch, mask, None, append)
        part = batch.part
        thread_runner(size).draw(layout, count, part.control, bitmask)
        tokens_R = part.tokens.copy()
        tokens = tokens_R.tolist()
        if NOT_DRAWN in tokens:
            return self._step(LogitsInput(logits_RV), batch, mask, tokens_R, append)
        if append:
            for append_token, token in zip(appends, tokens, strict=True):
                append_token(token)
        else:
            self._table.entries["step"][[self._table.slots[number] for number in batch.numbers]] -= np.uint64(1)
        return like(logits_RV, tokens_R), None, {}, batch.seeds

    def _step(
        self, logits: LogitsInput, batch: RowBatch, mask: Any, sampled: NDArray[np.int64] | None, append: bool = True
    ) -> Step:
        """The general case of ``step``. sampled: tokens that the fused kernel has sampled already."""
        count = len(batch.rows)
        check_shape(logits.shape, *batch.shape)
        masks_R = masks(mask, count, self._size)
        fast = count > 0 and self.fast(count * self._size)
        tokens_R = np.full(count, NOT_DRAWN, np.int64) if sampled is None else sampled
        if fast and sampled is None and batch.positions:
            self._sample_fused(logits, batch, masks_R, tokens_R)
        errors: dict[int, str] = {}
        reported: dict[int, StepLogprobs] = {}
        for position, (row, token) in enumerate(zip(batch.rows, tokens_R.tolist(), strict=True)):
            if token < 0:
                result = self.sample_row(
                    batch.numbers[position], logits[position], masks_R[position], fast, append=append
                )
                if isinstance(result, str):
                    errors[position] = result
                    continue
                tokens_R[position], row_logprobs = result
            else:
                if append:
                    row.memory.push(token)
                else:
                    self._table.advance(batch.numbers[position], -1)
                row_logprobs = None
                if row.tap is not None:
                    row_logprobs = row_path(True).step_logprobs(logits[position], token, row.tap.request)
            if row_logprobs is not None:
                reported[position] = row_logprobs
        logprobs = tuple(reported.get(position) for position in range(count)) if reported else None
        return logits.like(tokens_R), logprobs, errors, batch.seeds

    def _sample_fused(self, logits: LogitsInput, batch: RowBatch, masks_R: Any, tokens_R: NDArray[np.int64]) -> None:
        """Sample the rows of the fused kernel. Rows that it cannot sample keep NOT_DRAWN."""
        has_values = any(row.values is not None for row in batch.rows)
        if has_values and len(self._shifted) < len(batch.rows):
            self._shifted = np.empty(batch.shape, np.float32)
        out_RV = self._shifted if has_values else None
        failed = [position for position in batch.positions if not self._prepare(logits, batch, position, out_RV)]
        layout = logits.layout() if out_RV is None else (out_RV, 0, out_RV.strides[0], 0)
        thread_runner(self._size).draw(layout, len(batch.positions), batch.part.control, mask_layout(masks_R))
        tokens_R[batch.positions] = batch.part.tokens
        tokens_R[failed] = NOT_DRAWN  # the general path returns the error

    def _prepare(self, logits: LogitsInput, batch: RowBatch, position: int, out_RV: NDArray[np.float32] | None) -> bool:
        """Update what the kernel reads of a row. Returns False if a stage raises an exception.

        out_RV: for the logits with the values of each row, if any row has some.
        """
        row, number = batch.rows[position], batch.numbers[position]
        if row.program is not None:
            row.program.refresh()
        try:
            if row.keyed:
                noise_key = reference.noise_of(row.stages, row.memory, row.seed, len(row.memory.output))
                self._table.set_noise(number, *noise_key)
            if row.values is not None and out_RV is not None:
                add_values(logits[position], row.values, row.memory, out_RV[position])
            elif out_RV is not None:
                out_RV[position] = logits[position]
        except Exception:  # noqa: BLE001  # a user-defined stage may raise anything
            return False
        return True

    def sample_row(
        self,
        number: RowId,
        logits_V: NDArray[np.float32],
        mask_W: NDArray[np.int32] | None,
        fast: bool | None = None,
        *,
        append: bool = True,
    ) -> tuple[int, StepLogprobs | None] | str:
        """Sample a row and append the token, or return an error message if it cannot be sampled.

        fast: whether to use the composed path, not the reference; by default as in a call with this row only. append:
        as in ``step``.
        """
        row, fast = self._rows[number], self.fast(self._size) if fast is None else fast
        stages = row.stages if mask_W is None else with_mask(row.stages)
        row.memory.mask = mask_W
        if not fast and row.fused is not None and self._backend == "auto":
            noise_key = reference.noise_of(row.stages, row.memory, row.seed, len(row.memory.output))
            token = draw_with_numpy(logits_V, row.fused, row.memory, *noise_key)
            if token != NOT_DRAWN:
                if append:
                    self._table.advance(number)
                    row.memory.push(token)
                return token, None
        try:
            result = row_path(fast).run(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            return reference.message_of(error)
        if not append:
            return result.token, result.logprobs
        row.move(result.stages if stages is row.stages else without_mask(result.stages))
        self._table.advance(number)
        row.memory.push(result.token)
        return result.token, result.logprobs


def known(rows: Mapping[RowId, SamplerRow], number: RowId) -> SamplerRow:
    """The row with this number. Raises ParameterError if there is none."""
    if number not in rows:
        raise unknown(str(number), map(str, rows), "row")
    return rows[number]
