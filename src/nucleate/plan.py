"""Which kernel runs a pipeline: the compiled chain where it fits; why it does not elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Pipeline, Shift, Tap
from nucleate.stages.greedy import Greedy
from nucleate.stages.gumbel import Gumbel
from nucleate.stages.min_p import MinP
from nucleate.stages.temperature import Temperature
from nucleate.stages.top_k import TopK
from nucleate.stages.top_n_sigma import TopNSigma
from nucleate.stages.top_p import TopP

TEMPERATURES = 1e-4, 1e4
"""Between these, float32 holds what the chain works with."""


class Numbers(NamedTuple):
    """The parameters of the chain: temperature, top-n-sigma, top-k, min-p, top-p. The defaults do nothing."""

    t: float = 1.0
    sigmas: float = 0.0
    k: int = 0
    m: float = 0.0
    p: float = 1.0


class Chain(NamedTuple):
    """A pipeline that the chain can run: what is told of the raw logits, what edits them, the numbers."""

    tap: Tap | None
    shifts: tuple[Shift, ...]
    numbers: Numbers


def chain_of(stages: Pipeline) -> Chain | str:
    """What the compiled chain is to do for a simplified pipeline, or why it cannot."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    rest = stages[tap is not None :]
    end = next(i for i, stage in enumerate(rest) if not isinstance(stage, Shift))
    shifts = tuple(stage for stage in rest[:end] if isinstance(stage, Shift))
    numbers = _numbers(rest[end:])
    return numbers if isinstance(numbers, str) else Chain(tap, shifts, numbers)


def _numbers(stages: Pipeline) -> Numbers | str:
    numbers, place = Numbers(), 0
    for stage in stages[:-1]:
        match stage:
            case Temperature(t) if place < 1 and TEMPERATURES[0] <= t <= TEMPERATURES[1]:
                numbers, place = numbers._replace(t=t), 1
            case TopNSigma(n) if place < 2:
                numbers, place = numbers._replace(sigmas=n), 2
            case TopK(k, False) if place < 4 and not numbers.k:
                numbers, place = numbers._replace(k=k), 3
            case MinP(m) if place < 4 and not numbers.m:
                numbers, place = numbers._replace(m=m), 3
            case TopP(p, False) if place < 4:
                numbers, place = numbers._replace(p=p), 4
            case _:
                return f"{stage!r} is not in the compiled chain, or not there"
    if isinstance(stages[-1], Greedy):
        return Numbers(t=0.0)
    return numbers if isinstance(stages[-1], Gumbel) else f"{stages[-1]!r} is not in the compiled chain"


BACKENDS = ("auto", "reference", "cpu")
WORTH_COMPILING = 1 << 13
"""Scores in a call; with fewer, "auto" does not load the compiler."""


def compiled(backend: str, scores: int) -> bool:
    """Whether a call with so many scores runs what it can through compiled kernels. Raises ParameterError."""
    if backend not in BACKENDS:
        raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend == "cpu" or (backend == "auto" and scores >= WORTH_COMPILING)
