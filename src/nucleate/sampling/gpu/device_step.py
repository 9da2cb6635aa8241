"""One sampling step of rows on a device and rows on the CPU. Synchronises only if some row runs on the CPU."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling.gpu.batch_state import BatchState, TapReport
from nucleate.sampling.gpu.batch_view import BatchView, TensorLogprobs, to_step_logprobs
from nucleate.sampling.gpu.torch_device import to_device


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


Scores = NDArray[np.float32]
MaskWords = NDArray[np.int32] | None


class HostCallbacks(NamedTuple):
    """Functions that run on the CPU. Arguments: position of the row in the call, logits_V, mask_W."""

    sample: Callable[
        [int, Scores, MaskWords], tuple[int, StepLogprobs | None] | str
    ]  #: token and logprobs, or an error message
    error_of: Callable[[int, Scores, MaskWords], str]  #: the error message of a row that the device could not sample


class StepCall(NamedTuple):
    """The rows of a call. Reused by calls with the same rows."""

    shape: tuple[int, int]  #: R, V
    view: BatchView  #: the rows on the device
    positions: list[int]  #: their positions in the call
    positions_N: torch.Tensor  #: the same as a tensor
    host_positions: list[int]  #: positions of the rows on the CPU


class StepOutput(NamedTuple):
    """The result of a step, see ``SamplerOutput``."""

    tokens_R: torch.Tensor
    logprobs: Sequence[StepLogprobs | None] | None
    errors: Mapping[int, str]


def make_call(rows: BatchState, numbers: Sequence[int]) -> StepCall:
    """Prepare calls with these rows. numbers: of the rows, in order."""
    positions = [position for position, number in enumerate(numbers) if number in rows]
    host_positions = [position for position, number in enumerate(numbers) if number not in rows]
    view = rows.view([numbers[position] for position in positions])
    return StepCall((len(numbers), rows.size), view, positions, to_device(positions, rows.device), host_positions)


def step(rows: BatchState, call: StepCall, logits: Any, mask: Any, host: HostCallbacks) -> StepOutput:
    """Sample a token for each row of a call. logits [R, V], mask [R, V / 32]: tensors or arrays."""
    logits_RV = _logits(logits, rows.device)
    mask_RW = None if mask is None else _mask(mask, rows.device)
    logits_NV, mask_NW = logits_RV, mask_RW
    device_logprobs: TensorLogprobs | None = None
    tap_reports: list[TapReport] = []
    if call.host_positions or not call.positions:
        tokens_R = torch.full((call.shape[0],), -1, dtype=torch.int64, device=rows.device)
        logits_NV = logits_RV.index_select(0, call.positions_N)
        mask_NW = None if mask_RW is None else mask_RW.index_select(0, call.positions_N)
    if call.positions:
        rows.reserve(call.view, 1)
        tokens_N = rows.sample(call.view, logits_NV, mask_NW, tap_reports=tap_reports)
        device_logprobs = rows.compute_logprobs(call.view, logits_NV, tokens_N)
        tokens_R = tokens_R.index_copy(0, call.positions_N, tokens_N) if call.host_positions else tokens_N
    host_tokens, host_logprobs, errors = _sample_on_host(call, logits_RV, mask_RW, host)
    if host_tokens:
        position_N, token_N = to_device([[*host_tokens.keys()], [*host_tokens.values()]], rows.device)
        tokens_R = tokens_R.index_copy(0, position_N, token_N)
    logprobs = None
    if device_logprobs or tap_reports or host_logprobs:
        logprobs = LazyList(call.shape[0], lambda: _logprobs(call, device_logprobs, tap_reports, host_logprobs))
    all_errors = LazyDict(lambda: errors | _invalid_rows(call, tokens_R, logits_RV, mask_RW, host))
    return StepOutput(tokens_R, logprobs, all_errors)


def _sample_on_host(
    call: StepCall, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, host: HostCallbacks
) -> tuple[dict[int, int], dict[int, StepLogprobs], dict[int, str]]:
    """Tokens, logprobs and errors of the rows on the CPU, by position in the call."""
    tokens: dict[int, int] = {}
    host_logprobs: dict[int, StepLogprobs] = {}
    errors: dict[int, str] = {}
    for position in call.host_positions:
        result = host.sample(position, *_host_row(logits_RV, mask_RW, position))
        if isinstance(result, str):
            errors[position] = result
            continue
        tokens[position], logprobs = result
        if logprobs is not None:
            host_logprobs[position] = logprobs
    return tokens, host_logprobs, errors


def _logprobs(
    call: StepCall,
    device_logprobs: TensorLogprobs | None,
    tap_reports: Sequence[TapReport],
    host_logprobs: Mapping[int, StepLogprobs],
) -> tuple[StepLogprobs | None, ...]:
    by_position: dict[int, StepLogprobs | None] = {**host_logprobs}
    for tap_report in tap_reports:
        by_position.update(
            zip(
                [call.positions[position] for position in tap_report.positions],
                to_step_logprobs(tap_report.logprobs, tap_report.requests),
                strict=True,
            )
        )
    if device_logprobs is not None:
        positions = [call.positions[position] for position in call.view.reporting]
        by_position.update(zip(positions, to_step_logprobs(device_logprobs, call.view.requests), strict=True))
    return tuple(by_position.get(position) for position in range(call.shape[0]))


def _invalid_rows(
    call: StepCall, tokens_R: torch.Tensor, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, host: HostCallbacks
) -> dict[int, str]:
    """Error messages of the device rows without a token, by position. Synchronises."""
    if not call.positions:
        return {}
    tokens = tokens_R.tolist()
    return {
        position: host.error_of(position, *_host_row(logits_RV, mask_RW, position))
        for position in call.positions
        if tokens[position] < 0
    }


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
