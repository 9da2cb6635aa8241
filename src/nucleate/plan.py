"""Which kernel runs a pipeline: the compiled chain where it fits; why it does not elsewhere."""

from __future__ import annotations

import importlib.util
import re
from itertools import groupby
from typing import Any, NamedTuple

from nucleate.backends.cpu.special.program import EACH_TIME, ONCE, SCALE, Counted, Edit
from nucleate.core.maths import INFINITY
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Pipeline, Shift, Stage, Tap
from nucleate.stages.frequency import Frequency
from nucleate.stages.greedy import Greedy
from nucleate.stages.gumbel import Gumbel
from nucleate.stages.min_p import MinP
from nucleate.stages.presence import Presence
from nucleate.stages.repetition import Repetition
from nucleate.stages.temperature import Temperature
from nucleate.stages.top_k import TopK
from nucleate.stages.top_n_sigma import TopNSigma
from nucleate.stages.top_p import TopP

TEMPERATURES = 1e-4, 1e4
"""Between these, float32 holds what the chain works with."""


class Numbers(NamedTuple):
    """The parameters of the chain, in its order, but that top-k and min-p commute. The defaults do nothing."""

    t: float = 1.0  #: temperature
    sigmas: float = 0.0  #: top-n-sigma
    k: int = 0  #: top-k
    m: float = 0.0  #: min-p
    p: float = 1.0  #: top-p
    late_m: float = 0.0  #: min-p after top-p
    late_t: float = 1.0  #: temperature after the cuts


class Chain(NamedTuple):
    """A pipeline that the chain can run: what is told of the raw logits, what edits them, the numbers.

    The mask of a step is no edit: it comes with the logits.
    """

    tap: Tap | None
    edits: tuple[Edit, ...]
    numbers: Numbers


def chain_of(stages: Pipeline) -> Chain | str:
    """What the compiled chain is to do for a simplified pipeline, or why it cannot."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    rest = stages[tap is not None :]
    end = next(i for i, stage in enumerate(rest) if not isinstance(stage, Shift))
    edits = edits_of([stage for stage in rest[:end] if isinstance(stage, Shift)])
    numbers = numbers_of(rest[end:])
    odd = next((one for one in (edits, numbers) if isinstance(one, str)), None)
    return odd or Chain(tap, edits, numbers)  # type: ignore[arg-type]


def _added(self: Any, x: Any, token: Any) -> Any:
    return x + token.listed


def banned(self: Any, x: Any, token: Any) -> Any:
    return x - INFINITY


def has_rule(stage: Shift, rule: Any) -> bool:
    """Whether a stage's rule is this one, to the letter."""
    code, other = type(stage).apply.__code__, rule.__code__
    names = {name: type(stage).apply.__globals__.get(name) for name in code.co_names if name in rule.__globals__}
    return (
        (code.co_code, code.co_names, code.co_consts) == (other.co_code, other.co_names, other.co_consts)
        and not type(stage).apply.__closure__
        and names == {name: rule.__globals__[name] for name in names}
    )


def edits_of(shifts: list[Shift]) -> tuple[Edit, ...] | str:
    """Shifts as edits; those that count the same tokens become one."""
    edits: list[Edit] = []
    for counted, run in groupby(shifts, lambda shift: (shift.window,) if _rule(shift) else None):
        if counted:
            edits.append(Counted(counted[0], tuple(rule for shift in run if (rule := _rule(shift)))))
            continue
        for shift in run:
            if not has_rule(shift, _added if shift.touches == "listed" else banned):
                return f"{shift!r} has a rule of its own"
            if shift.touches in ("seen", "output"):
                return f"{shift!r} is not in the compiled chain"
            if shift.touches != "masked":
                edits.append(shift)
    return tuple(edits)


def _rule(shift: Shift) -> tuple[int, float] | None:
    """A penalty as a code and a number."""
    match shift:
        case Repetition(r):
            return SCALE, r
        case Frequency(f):
            return EACH_TIME, f
        case Presence(a):
            return ONCE, a
    return None


def numbers_of(stages: tuple[Stage, ...]) -> Numbers | str:
    taken = Numbers(), 0
    for stage in stages[:-1]:
        with_it = _take(*taken, stage)
        if with_it is None:
            return f"{stage!r} is not in the compiled chain, or not there"
        taken = with_it
    numbers = taken[0]
    if isinstance(stages[-1], Greedy):
        return Numbers(t=0.0)
    for t in (numbers.t, numbers.late_t, numbers.t * numbers.late_t):
        if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
            return f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
    return numbers if isinstance(stages[-1], Gumbel) else f"{stages[-1]!r} is not in the compiled chain"


def _take(numbers: Numbers, place: int, stage: Stage) -> tuple[Numbers, int] | None:
    """The numbers with those of one more stage, and how far the chain has come."""
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


DEVICES = re.compile(r"(cuda|mps|xpu)(:\d+)?")
TENSOR_BACKENDS = ("torch", "triton")
"""What runs rows on a device."""


def on_device(device: str) -> str:
    """What runs rows on a device of this name. Raises ParameterError for one that is none."""
    if not isinstance(device, str) or not DEVICES.fullmatch(device):
        known = "'cpu', 'cuda', 'mps' or 'xpu', one of several as 'cuda:1'"
        raise ParameterError("device", f"device must be {known}, got {device!r:.60}")
    with_triton = device.startswith("cuda") and importlib.util.find_spec("triton") is not None
    return "triton" if with_triton else "torch"
