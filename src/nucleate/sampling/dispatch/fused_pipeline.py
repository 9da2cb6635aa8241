"""The fused kernel: what it does for one row, as plain values, and which pipelines it can run.

It is the pipeline of most requests: bias, penalties and bans, temperature, top-n-sigma, top-k, min-p, top-p, and a
Gumbel draw. The fused kernels of each backend run it. Knows no compiler.
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
"""Rules of penalties, each with a number: divide by it or multiply, subtract it for each time in the output, once."""

Rules = tuple[tuple[int, float], ...]


class CountPenalties(NamedTuple):
    """Penalties in a row that count the same tokens."""

    window: int | None
    rules: Rules


Edit = CountPenalties | Shift
"""A change of the scores before the cuts: penalties, or a Shift that adds what it lists, or bans what it does not."""


class FusedParams(NamedTuple):
    """The parameters of the fused kernel, in its order, but that top-k and min-p commute. The defaults do nothing."""

    t: float = 1.0  #: temperature
    sigmas: float = 0.0  #: top-n-sigma
    k: int = 0  #: top-k
    m: float = 0.0  #: min-p
    p: float = 1.0  #: top-p
    late_m: float = 0.0  #: min-p after top-p
    late_t: float = 1.0  #: temperature after the cuts


class FusedPipeline(NamedTuple):
    """A pipeline that the fused kernel runs. The mask of a step is no edit: it comes with the logits."""

    tap: Tap | None  #: which logprobs to report, of the raw logits
    edits: tuple[Edit, ...]
    numbers: FusedParams


TEMPERATURES = 1e-4, 1e4
"""Between these, float32 holds the numbers that the fused kernel computes."""


def chain_of(stages: Pipeline) -> FusedPipeline | str:
    """A simplified pipeline as the fused kernel runs it, or why it cannot."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    rest = stages[tap is not None :]
    end = next(i for i, stage in enumerate(rest) if not isinstance(stage, Shift))
    edits = edits_of([stage for stage in rest[:end] if isinstance(stage, Shift)])
    if isinstance(edits, str):
        return edits
    numbers = numbers_of(rest[end:])
    return numbers if isinstance(numbers, str) else FusedPipeline(tap, edits, numbers)


def edits_of(shifts: list[Shift]) -> tuple[Edit, ...] | str:
    """Shifts as edits; penalties that count the same tokens become one. Or why the fused kernel has no such edit."""
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
    """A penalty as a rule and its number."""
    match shift:
        case Repetition(r):
            return SCALE, r
        case Frequency(f):
            return EACH_TIME, f
        case Presence(a):
            return ONCE, a
    return None


def numbers_of(stages: tuple[Stage, ...]) -> FusedParams | str:
    """The scales, cuts and the draw of a pipeline as parameters of the fused kernel, or why it cannot run them."""
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
    """The parameters with those of one more stage, and how far the fused kernel has come."""
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
    """Whether a stage lists the same tokens whatever the history."""
    if type(stage).follow is not Shift.follow:
        return False
    try:
        stage.listing(_Unreadable())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # whatever comes of reading it
        return False
    return True
