"""The pipelines of the fused kernel: their parameters, and which pipelines qualify.

These are the pipelines of most requests: bias, penalties and bans, temperature, top-n-sigma, top-k, min-p, top-p and a
Gumbel draw.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from nucleate.sampling.dispatch.rules import adds, bans
from nucleate.sampling.stage import Pipeline, Shift, Stage, Tap
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

SCALE, EACH_TIME, ONCE = range(3)
"""Kinds of penalties: divide or multiply by the number, subtract it per occurrence in the output, subtract it once."""

Rules = tuple[tuple[int, float], ...]


class CountPenalties(NamedTuple):
    """Consecutive penalties that count the same tokens."""

    window: int | None
    rules: Rules


Edit = CountPenalties | Shift
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
    edits: tuple[Edit, ...]
    numbers: FusedParams


TEMPERATURES = 1e-4, 1e4
"""The range of temperatures for which float32 suffices in the fused kernel."""


def chain_of(stages: Pipeline) -> FusedPipeline | str:
    """Convert a simplified pipeline for the fused kernel; or return why that is not possible."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    rest = stages[tap is not None :]
    end = next(i for i, stage in enumerate(rest) if not isinstance(stage, Shift))
    edits = edits_of([stage for stage in rest[:end] if isinstance(stage, Shift)])
    if isinstance(edits, str):
        return edits
    numbers = numbers_of(rest[end:])
    return numbers if isinstance(numbers, str) else FusedPipeline(tap, edits, numbers)


def edits_of(shifts: list[Shift]) -> tuple[Edit, ...] | str:
    """Convert Shifts to logit edits, joining penalties that count the same tokens; or return why not."""
    edits: list[Edit] = []
    for counted, run in groupby(shifts, lambda shift: (shift.window,) if _penalty(shift) else None):
        if counted:
            edits.append(CountPenalties(counted[0], tuple(rule for shift in run if (rule := _penalty(shift)))))
            continue
        for shift in run:
            if not (adds if shift.touches == "listed" else bans)(shift):
                return f"{shift!r} has a rule that the fused kernel does not support"
            if shift.touches in ("seen", "output"):
                return f"{shift!r} is not supported by the fused kernel"
            if shift.touches != "masked":
                edits.append(shift)
    return tuple(edits)


def _penalty(shift: Shift) -> tuple[int, float] | None:
    """The kind and the number of a penalty; None for other Shifts."""
    match shift:
        case Repetition(r):
            return SCALE, r
        case Frequency(f):
            return EACH_TIME, f
        case Presence(a):
            return ONCE, a
    return None


def numbers_of(stages: tuple[Stage, ...]) -> FusedParams | str:
    """Convert temperatures, truncation and the draw to parameters of the fused kernel; or return why not."""
    taken = FusedParams(), 0
    for stage in stages[:-1]:
        with_it = _take(*taken, stage)
        if with_it is None:
            return f"{stage!r} is not supported by the fused kernel at this position"
        taken = with_it
    numbers = taken[0]
    if isinstance(stages[-1], Greedy):
        return FusedParams(t=0.0)
    for t in (numbers.t, numbers.late_t, numbers.t * numbers.late_t):
        if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
            return f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
    return numbers if isinstance(stages[-1], Gumbel) else f"{stages[-1]!r} is not supported by the fused kernel"


def _take(numbers: FusedParams, place: int, stage: Stage) -> tuple[FusedParams, int] | None:
    """The parameters with those of one more stage, and the position reached in the kernel's order."""
    taken = None
    match stage:
        case Temperature(t) if place < 3 and numbers.t == 1.0 and not numbers.sigmas:  # as before a top-k
            taken = numbers._replace(t=t), max(place, 1)
        case TopNSigma(n) if place < 2:
            taken = numbers._replace(sigmas=n), 2
        case TopK(k, False) if place < 4 and not numbers.k:
            taken = numbers._replace(k=k), max(place, 2)
        case MinP(m) if place < 4 and not numbers.m:
            taken = numbers._replace(m=m), 3
        case TopP(p, False) if place < 4:
            taken = numbers._replace(p=p), 4
        case MinP(m) if place < 5:
            taken = numbers._replace(late_m=m), 5
        case Temperature(t) if place < 6:
            taken = numbers._replace(late_t=t), 6
    return taken


class _Unreadable:
    """A history that raises when it is read."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def unchanging(stage: Shift) -> bool:
    """Whether the list of a stage is independent of the history."""
    if type(stage).follow is not Shift.follow:
        return False
    try:
        stage.listing(_Unreadable())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # whatever comes of reading it
        return False
    return True
