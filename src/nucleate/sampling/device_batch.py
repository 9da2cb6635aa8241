"""The rows of a Sampler that run on a device, and their fallback to the CPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends import reference
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline
from nucleate.sampling.dispatch.route import TENSOR_BACKENDS, dispatch
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import checked_logits, checked_mask, history
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Pipeline

if TYPE_CHECKING:
    from nucleate.sampling.backends.torch.decode_loop import DecodeLoop, Forward
    from nucleate.sampling.device_step import StepOutput

KEPT_CALLS = 32
"""Calls that are remembered, one per set of rows."""

TOO_LARGE = "a score is not a number that float32 holds"

logger = logging.getLogger("nucleate")


class HostRow(Protocol):
    """The state of a row on the host."""

    stages: Pipeline
    memory: IncrementalHistory
    seed: int

    def move(self, stages: Pipeline) -> None: ...


Alone = Callable[[int, NDArray[np.float32], NDArray[np.int32] | None], tuple[int, StepLogprobs | None] | str]
"""alone(number, logits_V, mask_W): sample a row on the CPU and append the token to it."""


class DeviceBatch:
    """Runs steps of rows on a device. Raises ParameterError if the device is not available.

    rows: all rows of the sampler by number. alone: samples a row on the CPU.
    """

    def __init__(self, size: int, device: Any, backend: str, rows: Mapping[int, HostRow], alone: Alone) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ParameterError("device", f"device {device!r:.60} needs torch: pip install nucleate[cuda]")
        from nucleate.sampling.backends.torch.batch_state import BatchState
        from nucleate.sampling.backends.torch.torch_device import kernels_on, opened

        self._size, self._name, self._rows, self._alone = size, str(device), rows, alone
        place = opened(device)
        kernels = kernels_on(place, backend if backend in TENSOR_BACKENDS else "auto")
        self._backend = backend if backend in ("reference", "cpu") else kernels
        self._held = BatchState(size, place, kernels, self._learn, self._settle)
        self._calls: dict[tuple[int, ...], Any] = {}
        self._said = False

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def add(
        self, number: int, stages: Pipeline, chain: FusedPipeline | str, memory: IncrementalHistory, seed: int
    ) -> None:
        """Add a row to the device, or leave it to the CPU; the log mentions the first such row, with the reason."""
        self._calls.clear()
        route = dispatch(stages, chain, self._size, device=self._name, backend=self._backend)
        if route.resident is not None:
            self._held.add(number, route.resident, seed, memory.prompt, memory.output)
        elif not self._said:
            self._said = True
            logger.warning("a row runs %s; further rows are not logged", route.why)

    def remove(self, number: int) -> None:
        """Remove a row."""
        self._calls.clear()
        if number in self._held:
            self._held.remove(number)

    def push(self, number: int, token: int, stages: Pipeline | None = None) -> None:
        """Append a token that was not sampled to a row of the device. stages: for the next step."""
        staged = self._held.staged(number)
        if stages is None or staged is None or not staged.learns:
            self._held.push(number, token)
        else:
            self._held.push(number, token, staged.numbers_of(stages))

    def catch_up(self) -> None:
        """Copy all sampled tokens to the host. Synchronises with the device."""
        self._held.catch_up()

    def _learn(self, number: int, tokens: list[int]) -> None:
        for token in tokens:
            self._rows[number].memory.push(token)

    def _settle(self, number: int, numbers: list[float]) -> None:
        from nucleate.sampling.dispatch.signature import moved

        row, staged = self._rows[number], self._held.staged(number)
        if staged is not None:
            row.move(moved(row.stages, staged.steps, numbers))

    def step(self, numbers: list[int], logits_RV: Any, mask: Any) -> StepOutput:
        """One step of these rows, see ``Sampler``."""
        from nucleate.sampling import device_step

        logits_RV, shape = checked_logits(logits_RV), (len(numbers), self._size)
        if logits_RV.shape != shape:
            raise ValueError(f"logits must have the shape {list(shape)}, got {list(logits_RV.shape)}")
        mask = None if mask is None else checked_mask(mask, *shape)
        key = tuple(numbers)
        if key not in self._calls:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            self._calls[key] = device_step.call_of(self._held, numbers)
        rows = [self._rows[number] for number in numbers]
        host = device_step.HostCallbacks(
            lambda place, *row: self._alone(numbers[place], *row), lambda place, *row: self._why(rows[place], *row)
        )
        return device_step.step(self._held, self._calls[key], logits_RV, mask, host)

    def loop(
        self, numbers: list[int], forward: Forward, first_ids: Sequence[int], steps: int, stop_ids: Sequence[int]
    ) -> DecodeLoop:
        """See ``Sampler.loop``."""
        from nucleate.sampling.backends.torch.batch_state import RING
        from nucleate.sampling.backends.torch.decode_loop import DecodeLoop

        for number in numbers:
            if number not in self._held or self._held.reports(number):
                why = "it wants logprobs" if number in self._held else "it runs on the host"
                raise ParameterError("rows", f"row {number} cannot be drawn in a loop on the device: {why}")
        ids = history(first_ids, self._size, "first_ids").tolist()
        if len(ids) != len(numbers) or len(set(numbers)) < len(numbers) or not numbers:
            raise ValueError(f"a loop has one first id for each of its rows, got {ids!r:.60} for {numbers!r:.60}")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < RING:
            raise ParameterError("steps", f"steps must be an integer from 1 to {RING - 1}, got {steps!r:.60}")
        stops = history(stop_ids, self._size, "stop_ids").tolist()
        return DecodeLoop(self._held, self._held.part(numbers), forward, ids, steps, stops)

    def _why(self, row: HostRow, logits_V: NDArray[np.float32], mask_W: NDArray[np.int32] | None) -> str:
        """Why a row cannot be sampled."""
        self._held.catch_up()
        row.memory.mask = mask_W
        stages = row.stages if mask_W is None else with_mask(row.stages)
        try:
            reference.run(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            known = isinstance(error, reference.RowError | ParameterError)
            return str(error) if known else f"{type(error).__name__}: {error}"
        return TOO_LARGE
