"""The rows of a Sampler that run on a device, and their fallback to the CPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import check_shape, checked_logits, checked_mask, history
from nucleate.sampling.pipeline import FusedPipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.route import TENSOR_BACKENDS, dispatch
from nucleate.sampling.stage import Pipeline

if TYPE_CHECKING:
    from nucleate.sampling.gpu.batch_state import DecodeLoop, Forward
    from nucleate.sampling.gpu.device_step import StepOutput

MAX_CACHED_CALLS = 32
"""Maximum number of cached StepCalls, one per list of rows."""

TOO_LARGE = "a score exceeds the range of float32"

logger = logging.getLogger("nucleate")


class HostRow(Protocol):
    """The state of a row on the host."""

    stages: Pipeline
    memory: IncrementalHistory
    seed: int

    def move(self, stages: Pipeline) -> None: ...


SampleOnHost = Callable[[int, NDArray[np.float32], NDArray[np.int32] | None], tuple[int, StepLogprobs | None] | str]
"""(row number, logits_V, mask_W) -> (token, logprobs), or an error message. Samples a row on the CPU and appends the
token."""


class DeviceBatch:
    """Samples the rows of a ``Sampler`` on a device, and those that the device does not support on the CPU.

    size: V. rows: all rows of the sampler by number. sample_on_host: samples a row on the CPU. Raises ParameterError if
    the device is not available.
    """

    def __init__(
        self, size: int, device: Any, backend: str, rows: Mapping[int, HostRow], sample_on_host: SampleOnHost
    ) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ParameterError("device", f"device {device!r:.60} needs torch: {install_extra('cuda')}")
        from nucleate.sampling.gpu.batch_state import BatchState
        from nucleate.sampling.gpu.torch_device import open_device, select_kernels

        self._size, self._name, self._rows, self._sample_on_host = size, str(device), rows, sample_on_host
        torch_device = open_device(device)
        kernels = select_kernels(torch_device, backend if backend in TENSOR_BACKENDS else "auto")
        self._backend = backend if backend in ("reference", "cpu") else kernels
        self._state = BatchState(size, torch_device, kernels, self._append_tokens, self._set_state)
        self._calls: dict[tuple[int, ...], Any] = {}
        self._fallback_logged = False

    def __contains__(self, number: int) -> bool:
        return number in self._state

    def add(
        self, number: int, stages: Pipeline, fused: FusedPipeline | str, memory: IncrementalHistory, seed: int
    ) -> None:
        """Add a row to the device, or leave it to the CPU. The first row left to the CPU is logged with the reason."""
        self._calls.clear()
        route = dispatch(stages, fused, self._size, device=self._name, backend=self._backend)
        if route.row_spec is not None:
            self._state.add(number, route.row_spec, seed, memory.prompt, memory.output)
        elif not self._fallback_logged:
            self._fallback_logged = True
            logger.warning("a row runs %s; further rows are not logged", route.why)

    def remove(self, number: int) -> None:
        """Remove a row."""
        self._calls.clear()
        if number in self._state:
            self._state.remove(number)

    def push(self, number: int, token: int, stages: Pipeline | None = None) -> None:
        """Append a token that was not sampled here to a row on the device. stages: for the next step, if known."""
        signature = self._state.signature(number)
        if stages is None or signature is None or not signature.stateful:
            self._state.push(number, token)
        else:
            self._state.push(number, token, signature.params_of(stages))

    def synchronise(self) -> None:
        """Copy all sampled tokens and stage states to the host."""
        self._state.synchronise()

    def _append_tokens(self, number: int, tokens: list[int]) -> None:
        for token in tokens:
            self._rows[number].memory.push(token)

    def _set_state(self, number: int, params: list[float]) -> None:
        from nucleate.sampling.signature import with_state

        row, signature = self._rows[number], self._state.signature(number)
        if signature is not None:
            row.move(with_state(row.stages, signature.signatures, params))

    def step(self, numbers: list[int], logits_RV: Any, mask: Any) -> StepOutput:
        """Sample a token for each of these rows, see ``Sampler.__call__``."""
        from nucleate.sampling.gpu import device_step

        logits_RV, shape = checked_logits(logits_RV), (len(numbers), self._size)
        check_shape(logits_RV.shape, *shape)
        mask = None if mask is None else checked_mask(mask, *shape)
        key = tuple(numbers)
        if key not in self._calls:
            if len(self._calls) >= MAX_CACHED_CALLS:
                self._calls.clear()
            self._calls[key] = device_step.make_call(self._state, numbers)
        rows = [self._rows[number] for number in numbers]
        host = device_step.HostCallbacks(
            lambda position, *row: self._sample_on_host(numbers[position], *row),
            lambda position, *row: self._error_of(rows[position], *row),
        )
        return device_step.step(self._state, self._calls[key], logits_RV, mask, host)

    def loop(
        self, numbers: list[int], forward: Forward, first_ids: Sequence[int], steps: int, stop_ids: Sequence[int]
    ) -> DecodeLoop:
        """See ``Sampler.loop``."""
        from nucleate.sampling.gpu.batch_state import MIN_RING_SIZE, DecodeLoop

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

    def _error_of(self, row: HostRow, logits_V: NDArray[np.float32], mask_W: NDArray[np.int32] | None) -> str:
        """The error message of a row that the device could not sample, from the reference backend."""
        self._state.synchronise()
        row.memory.mask = mask_W
        stages = row.stages if mask_W is None else with_mask(row.stages)
        try:
            reference.run(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            known = isinstance(error, reference.RowError | ParameterError)
            return str(error) if known else f"{type(error).__name__}: {error}"
        return TOO_LARGE
