"""The pipelines of the fused kernel: their parameters, and which pipelines qualify.

These are the pipelines of most requests: bias, penalties and bans, temperature, top-n-sigma, top-k, min-p, top-p and a
Gumbel draw.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from nucleate.sampling.dispatch.rules import adds_listed_value, adds_value, bans_tokens
from nucleate.sampling.stage import Draw, Pipeline, Shift, Stage, Tap
from nucleate.sampling.stages.penalties.frequency import Frequency
from nucleate.sampling.stages.penalties.presence import Presence
from nucleate.sampling.stages.penalties.repetition import Repetition
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel
from nucleate.sampling.stages.temperature.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP

REPETITION, FREQUENCY, PRESENCE = range(3)
"""Penalties: divide or multiply by the parameter; subtract it per occurrence in the output; subtract it once."""

PenaltyRules = tuple[tuple[int, float], ...]


class CountPenalties(NamedTuple):
    """Consecutive penalties with the same window: their kinds and parameters."""

    window: int | None
    rules: PenaltyRules


LogitEdit = CountPenalties | Shift
"""A logit edit before truncation: penalties, or a Shift that adds its list or bans unlisted tokens."""


class FusedParams(NamedTuple):
    """The parameters of the fused kernel, in the order in which it applies them. The defaults have no effect."""

    t: float = 1.0  #: temperature
    sigmas: float = 0.0  #: top-n-sigma
    k: int = 0  #: top-k
    m: float = 0.0  #: min-p
    p: float = 1.0  #: top-p
    late_m: float = 0.0  #: min-p after top-p
    late_t: float = 1.0  #: temperature after truncation


class FusedPipeline(NamedTuple):
    """A pipeline of the fused kernel. The bitmask of a step is passed with the logits, not as an edit."""

    tap: Tap | None  #: the raw logprobs to report
    edits: tuple[LogitEdit, ...]
    params: FusedParams
    values: Shift | None = None  #: adds its values to the logits before the kernel runs


TEMPERATURES = 1e-4, 1e4
"""The range of temperatures for which float32 suffices in the fused kernel."""


def to_fused_pipeline(stages: Pipeline) -> FusedPipeline | str:
    """Convert a simplified pipeline for the fused kernel; or return why that is not possible."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    stages_after_tap = stages[tap is not None :]
    first, values = stages_after_tap[0], None
    if isinstance(first, Shift) and first.touches == "all":
        if not adds_value(first):
            return f"{first!r} has a rule that the fused kernel does not support"
        values, stages_after_tap = first, stages_after_tap[1:]
    end = next(i for i, stage in enumerate(stages_after_tap) if not isinstance(stage, Shift))
    edits = to_logit_edits([stage for stage in stages_after_tap[:end] if isinstance(stage, Shift)])
    if isinstance(edits, str):
        return edits
    params = to_fused_params(stages_after_tap[end:])
    return params if isinstance(params, str) else FusedPipeline(tap, edits, params, values)


def to_logit_edits(shifts: list[Shift]) -> tuple[LogitEdit, ...] | str:
    """Convert Shifts to logit edits, joining penalties that count the same tokens; or return why not."""
    edits: list[LogitEdit] = []
    for counted, run in groupby(shifts, lambda shift: (shift.window,) if _penalty(shift) else None):
        if counted:
            edits.append(CountPenalties(counted[0], tuple(rule for shift in run if (rule := _penalty(shift)))))
            continue
        for shift in run:
            if not (adds_listed_value if shift.touches == "listed" else bans_tokens)(shift):
                return f"{shift!r} has a rule that the fused kernel does not support"
            if shift.touches in ("seen", "output", "all"):
                return f"{shift!r} is not supported by the fused kernel"
            if shift.touches != "masked":
                edits.append(shift)
    return tuple(edits)


def _penalty(shift: Shift) -> tuple[int, float] | None:
    """The kind and the parameter of a penalty; None for other Shifts."""
    match shift:
        case Repetition(r):
            return REPETITION, r
        case Frequency(f):
            return FREQUENCY, f
        case Presence(a):
            return PRESENCE, a
    return None


def to_fused_params(stages: tuple[Stage, ...]) -> FusedParams | str:
    """Convert temperatures, truncation and the draw to parameters of the fused kernel; or return why not."""
    result = FusedParams(), 0
    for stage in stages[:-1]:
        added = _add_stage(*result, stage)
        if added is None:
            return f"{stage!r} is not supported by the fused kernel at this position"
        result = added
    params = result[0]
    if isinstance(stages[-1], Greedy):
        return FusedParams(t=0.0)
    for t in (params.t, params.late_t, params.t * params.late_t):
        if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
            return f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
    is_gumbel = isinstance(stages[-1], Draw) and type(stages[-1]).score is Gumbel.score
    return params if is_gumbel else f"{stages[-1]!r} is not supported by the fused kernel"


def _add_stage(params: FusedParams, position: int, stage: Stage) -> tuple[FusedParams, int] | None:
    """The parameters with those of one more stage, and the position reached in the kernel's order."""
    result = None
    match stage:
        case Temperature(t) if position < 3 and params.t == 1.0 and not params.sigmas:  # as before a top-k
            result = params._replace(t=t), max(position, 1)
        case TopNSigma(n, 0 | 1) if position < 2:
            result = params._replace(sigmas=n), 2
        case TopK(k, False) if position < 4 and not params.k:
            result = params._replace(k=k), max(position, 2)
        case MinP(m, 0 | 1) if position < 4 and not params.m:
            result = params._replace(m=m), 3
        case TopP(p, False, 0 | 1) if position < 4:
            result = params._replace(p=p), 4
        case MinP(m, 0 | 1) if position < 5:
            result = params._replace(late_m=m), 5
        case Temperature(t) if position < 6:
            result = params._replace(late_t=t), 6
    return result


class _Unreadable:
    """A history that raises when it is read."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def has_constant_listing(stage: Shift) -> bool:
    """Whether the list of a stage is the same in every step."""
    if type(stage).incremental_listing is not Shift.incremental_listing:
        return False
    try:
        stage.listing(_Unreadable())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # a user-defined stage may raise anything
        return False
    return True
