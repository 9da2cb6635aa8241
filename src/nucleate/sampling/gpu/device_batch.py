"""The rows of a Sampler that run on a device, and their fallback to the CPU.

A step synchronises only if some row runs on the CPU.
"""

from __future__ import annotations

import logging
from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.gpu import torch_device
from nucleate.sampling.gpu.batch_state import MIN_RING_SIZE, BatchState, DecodeLoop, Forward, LogprobsReport
from nucleate.sampling.gpu.batch_view import BatchView, to_step_logprobs
from nucleate.sampling.gpu.torch_device import to_device
from nucleate.sampling.host_batch import HostBatch, SamplerRow, Step
from nucleate.sampling.inputs import RowId, check_shape, checked_logits, checked_mask, history
from nucleate.sampling.pipeline import FusedPipeline, to_fused_pipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.route import TENSOR_BACKENDS, dispatch
from nucleate.sampling.signature import with_state
from nucleate.sampling.stage import Pipeline

MAX_CACHED_CALLS = 32
"""Maximum number of cached StepCalls, one per list of rows."""

TOO_LARGE = "a score exceeds the range of float32"

logger = logging.getLogger("nucleate")

Scores = NDArray[np.float32]
MaskWords = NDArray[np.int32] | None
HostRow = Callable[[int], tuple[Scores, MaskWords]]
"""Copies the logits and the mask of a row, by its position in a call, to the host."""


class LazyList(UserList[Any]):
    """A list of known length. Its items are computed when one of them is first read."""

    def __init__(self, length: int, make: Callable[[], Iterable[Any]]) -> None:
        self._length, self._make = length, make

    @cached_property
    def data(self) -> list[Any]:  # type: ignore[override]
        return [*self._make()]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]


class LazyDict(UserDict[int, Any]):
    """A mapping that is computed when it is first read."""

    def __init__(self, make: Callable[[], Mapping[int, Any]]) -> None:
        self._make = make

    @cached_property
    def data(self) -> dict[int, Any]:  # type: ignore[override]
        return {**self._make()}


class StepCall(NamedTuple):
    """The rows of a call. Reused by calls with the same rows."""

    numbers: list[RowId]
    view: BatchView  #: the rows on the device
    positions: list[int]  #: their positions in the call
    positions_N: torch.Tensor  #: the same as a tensor
    host_positions: list[int]  #: positions of the rows on the CPU


class DeviceBatch:
    """As ``HostBatch``: samples the rows of a ``Sampler`` on a device, and on the CPU those that it does not support.

    size: V. rows: all rows of the sampler by number. host: samples a row on the CPU. Raises ParameterError if the
    device is not available.
    """

    def __init__(self, size: int, device: Any, backend: str, rows: Mapping[RowId, SamplerRow], host: HostBatch) -> None:
        self._size, self._name, self._rows, self._host = size, str(device), rows, host
        self._device = torch_device.open_device(device)
        kernels = torch_device.select_kernels(self._device, backend if backend in TENSOR_BACKENDS else "auto")
        self._backend = backend if backend in ("reference", "cpu") else kernels
        self._state = BatchState(size, self._device, kernels, self._append_tokens, self._set_state)
        self._calls: dict[tuple[RowId, ...], StepCall] = {}
        self._fallback_logged = False

    def __contains__(self, number: RowId) -> bool:
        return number in self._state

    def add(self, number: RowId, row: SamplerRow, fused: FusedPipeline | str) -> None:
        """Add a row to the device, or leave it to the CPU. The first row left to the CPU is logged with the reason."""
        self._calls.clear()
        route = dispatch(row.stages, fused, self._size, device=self._name, backend=self._backend)
        self._host.clear_cache()
        if route.row_spec is not None:
            row.past = None  # states on the device are not kept
            self._state.add(number, route.row_spec, row.seed, row.memory.prompt, row.memory.output)
        elif not self._fallback_logged:
            self._fallback_logged = True
            logger.warning("a row runs %s; further rows are not logged", route.why)

    def remove(self, number: RowId) -> None:
        """Remove a row."""
        self._calls.clear()
        self._host.remove(number)
        if number in self._state:
            self._state.remove(number)

    def push(self, number: RowId, token: int, updated: Pipeline | None = None) -> None:
        """As ``HostBatch.push``."""
        if number not in self._state:
            self._host.push(number, token, updated)
            return
        signature, params = self._state.signature(number), None
        if updated is not None and signature is not None and signature.stateful:
            params = signature.params_of(updated)
        self._state.push(number, token, params)

    def rollback(self, number: RowId, count: int, stages: Pipeline) -> None:
        """As ``HostBatch.rollback``: the row starts again on the device. Synchronises."""
        self._state.synchronise()
        row, fused = self._rows[number], to_fused_pipeline(stages)
        if number not in self._state:
            self._host.rollback(number, count, stages)
            return
        self.remove(number)
        row.memory.pop(count)
        row.stages = stages
        self.add(number, row, fused)

    def synchronise(self) -> None:
        """Copy all sampled tokens and stage states to the host."""
        self._state.synchronise()

    def _append_tokens(self, number: RowId, tokens: list[int]) -> None:
        for token in tokens:
            self._rows[number].memory.push(token)

    def _set_state(self, number: RowId, params: list[float]) -> None:
        row, signature = self._rows[number], self._state.signature(number)
        if signature is not None:
            row.move(with_state(row.stages, signature.signatures, params))

    def loop(
        self, numbers: list[RowId], forward: Forward, first_ids: Sequence[int], steps: int, stop_ids: Sequence[int]
    ) -> DecodeLoop:
        """See ``Sampler.loop``."""
        for number in numbers:
            if number not in self._state or self._state.reports(number):
                why = "it reports logprobs" if number in self._state else "it runs on the CPU"
                raise ParameterError("rows", f"row {number} cannot be sampled in a loop on the device: {why}")
        ids = history(first_ids, self._size, "first_ids").tolist()
        if len(ids) != len(numbers) or len(set(numbers)) < len(numbers) or not numbers:
            raise ValueError(
                f"a loop needs one first id per row and distinct rows, got {ids!r:.60} for {numbers!r:.60}"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < MIN_RING_SIZE:
            raise ParameterError("steps", f"steps must be an integer from 1 to {MIN_RING_SIZE - 1}, got {steps!r:.60}")
        stops = history(stop_ids, self._size, "stop_ids").tolist()
        return DecodeLoop(self._state, self._state.view(numbers), forward, ids, steps, stops)

    def step(self, requested: list[RowId] | None, logits: Any, mask: Any, *, append: bool = True) -> Step:
        """As ``HostBatch.step``. Logits, mask: tensors or arrays. Synchronises unless the rows advance."""
        if append:
            return self._step(requested, logits, mask)
        self._state.synchronise()
        numbers = self._host.batch(requested).numbers
        before = [self._rows[number].stages for number in numbers]
        step = self._step(requested, logits, mask)
        for number, stages, token in zip(numbers, before, step[0].tolist(), strict=True):
            if token >= 0:
                self.rollback(number, 1, stages)
        return step

    def _step(self, requested: list[RowId] | None, logits: Any, mask: Any) -> Step:
        batch, logits = self._host.batch(requested), checked_logits(logits)
        numbers = batch.numbers
        check_shape(logits.shape, *batch.shape)
        call, state = self._call(numbers), self._state
        logits_RV = _logits(logits, self._device)
        mask_RW = None if mask is None else _mask(checked_mask(mask, *batch.shape), self._device)
        logits_NV, mask_NW = logits_RV, mask_RW
        reports: list[LogprobsReport] = []
        if call.host_positions or not call.positions:
            tokens_R = torch.full((len(numbers),), -1, dtype=torch.int64, device=self._device)
            logits_NV = logits_RV.index_select(0, call.positions_N)
            mask_NW = None if mask_RW is None else mask_RW.index_select(0, call.positions_N)
        if call.positions:
            state.reserve(call.view, 1)
            tokens_N = state.sample(call.view, logits_NV, mask_NW, reports=reports)
            tokens_R = tokens_R.index_copy(0, call.positions_N, tokens_N) if call.host_positions else tokens_N
        host_row = partial(_host_row, logits_RV, mask_RW)
        on_host = {at: self._host.sample_row(numbers[at], *host_row(at)) for at in call.host_positions}
        errors = {at: message for at, message in on_host.items() if isinstance(message, str)}
        sampled = {at: result for at, result in on_host.items() if not isinstance(result, str)}
        if sampled:
            position_N, token_N = to_device([[*sampled], [token for token, _ in sampled.values()]], self._device)
            tokens_R = tokens_R.index_copy(0, position_N, token_N)
        host_logprobs = {at: logprobs for at, (_, logprobs) in sampled.items() if logprobs is not None}
        logprobs = None
        if reports or host_logprobs:
            logprobs = LazyList(len(numbers), lambda: _logprobs(call, reports, host_logprobs))
        all_errors = LazyDict(lambda: errors | self._invalid_rows(call, batch.rows, tokens_R, host_row))
        return tokens_R, logprobs, all_errors, batch.seeds

    def _call(self, numbers: list[RowId]) -> StepCall:
        key = tuple(numbers)
        if key not in self._calls:
            if len(self._calls) >= MAX_CACHED_CALLS:
                self._calls.clear()
            positions = [position for position, number in enumerate(numbers) if number in self._state]
            host_positions = [position for position, number in enumerate(numbers) if number not in self._state]
            view = self._state.view([numbers[position] for position in positions])
            self._calls[key] = StepCall(numbers, view, positions, to_device(positions, self._device), host_positions)
        return self._calls[key]

    def _invalid_rows(
        self, call: StepCall, rows: list[SamplerRow], tokens_R: torch.Tensor, host_row: HostRow
    ) -> dict[int, str]:
        """Error messages of the device rows without a token, by position. rows: of the call. Synchronises."""
        if not call.positions:
            return {}
        tokens = tokens_R.tolist()
        return {
            position: self._error_of(rows[position], *host_row(position))
            for position in call.positions
            if tokens[position] < 0
        }

    def _error_of(self, row: SamplerRow, logits_V: Scores, mask_W: MaskWords) -> str:
        """The error message of a row that the device could not sample, from the reference backend."""
        self._state.synchronise()
        row.memory.mask = mask_W
        stages = row.stages if mask_W is None else with_mask(row.stages)
        try:
            reference.run(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            return reference.message_of(error)
        return TOO_LARGE


def _logprobs(
    call: StepCall, reports: Sequence[LogprobsReport], host_logprobs: Mapping[int, StepLogprobs]
) -> tuple[StepLogprobs | None, ...]:
    """The logprobs of all rows of a call, copied to the host."""
    by_position: dict[int, StepLogprobs | None] = {**host_logprobs}
    for positions, logprobs, requests in reports:
        in_call = [call.positions[position] for position in positions]
        by_position.update(zip(in_call, to_step_logprobs(logprobs, requests), strict=True))
    return tuple(by_position.get(position) for position in range(len(call.numbers)))


def _host_row(logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, position: int) -> tuple[Scores, MaskWords]:
    """Copy the logits and the mask of a row to the host."""
    logits_V: Scores = logits_RV[position].to(torch.float32).cpu().numpy()
    return logits_V, None if mask_RW is None else mask_RW[position].cpu().numpy()


def _logits(values: Any, device: torch.device) -> torch.Tensor:
    if isinstance(values, np.ndarray):
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)  # a copy: torch rejects read-only arrays and negative strides
    return to_device(values, device)


def _mask(values: Any, device: torch.device) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return to_device(values.view(torch.int32), device).contiguous()
    return to_device(values.astype(np.uint32).view(np.int32), device)
