"""One step of a batch of which the device runs some rows and the CPU the others.

If the device runs all rows, nothing here synchronises with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling.backends.torch.batch_state import BatchState, TapReport
from nucleate.sampling.backends.torch.batch_view import BatchView
from nucleate.sampling.backends.torch.lazy import LazyDict, LazyList
from nucleate.sampling.backends.torch.tensor_logprobs import TensorLogprobs, to_step_logprobs
from nucleate.sampling.backends.torch.torch_device import sent

Scores = NDArray[np.float32]
Words = NDArray[np.int32] | None


class HostCallbacks(NamedTuple):
    """What the host does for a row, by its place in the call: (place, logits_V, mask_W)."""

    draw: Callable[[int, Scores, Words], tuple[int, StepLogprobs | None] | str]  #: token and logprobs, or why not
    why: Callable[[int, Scores, Words], str]  #: why nothing can be drawn from it


class StepCall(NamedTuple):
    """The rows of a call; kept for the next one like it."""

    shape: tuple[int, int]
    part: BatchView  #: those that the device runs,
    places: list[int]  #: where they are in the call,
    places_N: torch.Tensor  #: the same
    others: list[int]  #: where the host's rows are


class StepOutput(NamedTuple):
    """What a step gives, see ``Sampled``."""

    tokens_R: torch.Tensor
    logprobs: Sequence[StepLogprobs | None] | None
    errors: Mapping[int, str]


def call_of(rows: BatchState, numbers: Sequence[int]) -> StepCall:
    """The rows of a call by their numbers."""
    places = [place for place, number in enumerate(numbers) if number in rows]
    others = [place for place, number in enumerate(numbers) if number not in rows]
    part = rows.part([numbers[place] for place in places])
    return StepCall((len(numbers), rows.size), part, places, sent(places, rows.device), others)


def step(rows: BatchState, call: StepCall, logits: Any, mask: Any, host: HostCallbacks) -> StepOutput:
    """Draw a token for each row of a call. logits, mask: of its shape, tensors or arrays."""
    logits_RV = _logits(logits, rows.device)
    mask_RW = None if mask is None else _mask(mask, rows.device)
    logits_NV, mask_NW = logits_RV, mask_RW
    made: TensorLogprobs | None = None
    tap_reports: list[TapReport] = []
    if call.others or not call.places:
        tokens_R = torch.full((call.shape[0],), -1, dtype=torch.int64, device=rows.device)
        logits_NV = logits_RV.index_select(0, call.places_N)
        mask_NW = None if mask_RW is None else mask_RW.index_select(0, call.places_N)
    if call.places:
        rows.reserve(call.part, 1)
        tokens_N = rows.draw(call.part, logits_NV, mask_NW, tap_reports=tap_reports)
        made = rows.report(call.part, logits_NV, tokens_N)
        tokens_R = tokens_R.index_copy(0, call.places_N, tokens_N) if call.others else tokens_N
    alone, reported, errors = _alone(call, logits_RV, mask_RW, host)
    if alone:
        place_N, token_N = sent([[*alone.keys()], [*alone.values()]], rows.device)
        tokens_R = tokens_R.index_copy(0, place_N, token_N)
    requested = made or tap_reports or reported
    logprobs = LazyList(call.shape[0], lambda: _logprobs(call, made, tap_reports, reported)) if requested else None
    return StepOutput(tokens_R, logprobs, LazyDict(lambda: errors | _odd(call, tokens_R, logits_RV, mask_RW, host)))


def _alone(
    call: StepCall, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, host: HostCallbacks
) -> tuple[dict[int, int], dict[int, StepLogprobs], dict[int, str]]:
    """Tokens, logprobs and errors of the host's rows."""
    tokens: dict[int, int] = {}
    reported: dict[int, StepLogprobs] = {}
    errors: dict[int, str] = {}
    for place in call.others:
        drawn = host.draw(place, *_row(logits_RV, mask_RW, place))
        if isinstance(drawn, str):
            errors[place] = drawn
            continue
        tokens[place] = drawn[0]
        if drawn[1] is not None:
            reported[place] = drawn[1]
    return tokens, reported, errors


def _logprobs(
    call: StepCall, made: TensorLogprobs | None, tap_reports: Sequence[TapReport], reported: Mapping[int, StepLogprobs]
) -> tuple[StepLogprobs | None, ...]:
    found: dict[int, StepLogprobs | None] = {**reported}
    for some in tap_reports:
        found.update(
            zip([call.places[place] for place in some.places], to_step_logprobs(some.report, some.wanted), strict=True)
        )
    if made is not None:
        places = [call.places[place] for place in call.part.reporting]
        found.update(zip(places, to_step_logprobs(made, call.part.wanted), strict=True))
    return tuple(found.get(place) for place in range(call.shape[0]))


def _odd(
    call: StepCall, tokens_R: torch.Tensor, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, host: HostCallbacks
) -> dict[int, str]:
    """Why rows of the device have no token."""
    if not call.places:
        return {}
    tokens = tokens_R.tolist()
    return {place: host.why(place, *_row(logits_RV, mask_RW, place)) for place in call.places if tokens[place] < 0}


def _row(logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, place: int) -> tuple[Scores, Words]:
    """A row on the host."""
    logits_V: Scores = logits_RV[place].to(torch.float32).cpu().numpy()
    return logits_V, None if mask_RW is None else mask_RW[place].cpu().numpy()


def _logits(given: Any, device: torch.device) -> torch.Tensor:
    if isinstance(given, np.ndarray):
        with np.errstate(over="ignore"):
            given = given.astype(np.float32)  # a copy: torch takes none that are read-only, or run backwards
    return sent(given, device)


def _mask(given: Any, device: torch.device) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return sent(given.view(torch.int32), device).contiguous()
    return sent(given.astype(np.uint32).view(np.int32), device)
