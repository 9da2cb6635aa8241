"""Examples of any stage, made from what its parameters declare: a new stage needs no line here."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from nucleate.core.stage import Draw, Floor, Prefix
from nucleate.stages import STAGES

SIZE = 40
"""The vocabulary of the laws: ids in the examples are below it."""

KINDS = list(STAGES.values())
TRUNCATIONS = [kind for kind in KINDS if issubclass(kind, Floor | Prefix)]
DRAWS = [kind for kind in KINDS if issubclass(kind, Draw)]
SWITCHED = [kind for kind in KINDS if any(p.neutral is not dataclasses.MISSING for p in kind.parameters.values())]


def inside(parameter):
    """Valid values of a parameter, from edge to edge."""
    if parameter.kind == "float":
        low = -3.0 if parameter.low is None else parameter.low
        high = low + 4.0 if parameter.high is None else parameter.high
        values = [low + (high - low) * part for part in (0.0, 0.001, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0)]
        return values[1:] if parameter.open_low else values
    if parameter.kind == "int":
        low = 0 if parameter.low is None else int(parameter.low)
        return [low, low + 1, low + 2, low + 5, low + SIZE, 10**6 if parameter.high is None else int(parameter.high)]
    return {
        "bool": [False, True],
        "tuple[int, ...]": [(), (0,), (3, 1, 3), tuple(range(0, SIZE, 2))],
        "tuple[str, ...]": [(), ("a",), ("a", "bc")],
        "Mapping[int, float]": [{}, {0: 1.5}, {3: -2.0, 7: 0.25, SIZE - 1: 30.0}],
    }[parameter.kind]


def every(parameter):
    """The same, with None and what stands for off."""
    return [*inside(parameter), *parameter.off, *([None] if parameter.optional else [])]


def examples(kind, most=40):
    """Stages of a kind: every combination of valid values, or a part of them, evenly spaced."""
    names = list(kind.parameters)
    combinations = list(itertools.product(*(every(p) for p in kind.parameters.values())))
    step = -(-len(combinations) // most)
    return [kind(**dict(zip(names, values, strict=True))) for values in combinations[::step]]


def neutrals(kind):
    """Stages of a kind that say in every way that they do nothing."""
    switches = {a: p for a, p in kind.parameters.items() if p.neutral is not dataclasses.MISSING}
    return [
        kind(**dict(zip(switches, values, strict=True)))
        for values in itertools.product(*([p.neutral, *p.off] for p in switches.values()))
    ]


def rows(seed=0, count=6, size=SIZE):
    """Logits on a grid of eighths (so that sums with whole numbers are exact), with ties, some with holes at -inf."""
    numbers = np.random.default_rng(seed)
    x = np.round(numbers.normal(size=(count, size)) * 24) / 8
    x[1::3] = np.round(x[1::3])
    x[2::3][numbers.random(x[2::3].shape) < 0.3] = -np.inf
    x[:, 1] = 2.0
    return x.astype(np.float32)
