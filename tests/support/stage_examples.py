"""Examples of any stage, made from what its parameters declare: a new stage needs no line here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import numpy as np

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Ceiling, Draw, Floor, Prefix, Scale, Shift, Tap
from nucleate.sampling.stages import STAGES

SIZE = 40
"""The vocabulary of the laws: ids in the examples are below it."""

KINDS = list(STAGES.values())
TRUNCATIONS = [kind for kind in KINDS if issubclass(kind, Floor | Prefix | Ceiling)]
SHIFTS = [kind for kind in KINDS if issubclass(kind, Shift)]
DRAWS = [kind for kind in KINDS if issubclass(kind, Draw)]
TAPS = [kind for kind in KINDS if issubclass(kind, Tap)]
SWITCHED = [kind for kind in KINDS if any(p.neutral is not dataclasses.MISSING for p in kind.parameters.values())]


def keeps_the_first(kind):
    """Whether the best token stays the first of the order and in, whatever the parameters."""
    if issubclass(kind, Prefix):
        return kind.order is Prefix.order
    return kind.monotone if issubclass(kind, Scale) else not issubclass(kind, Ceiling | Shift)


def inside(parameter, text=False):
    """Valid values of a parameter, from edge to edge. Words are text only if asked for: text needs a tokenizer."""
    if parameter.choices:
        names = list(parameter.choices)
        return names if parameter.kind == "str" else [*names, (), ("top_p", "temperature"), ["xtc"]]
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
        "tuple[str | tuple[int, ...], ...]": [
            *([(), ((1,),), ((7, 2, 1), (2, 1, 5)), ((1, 1), (7,), (1, 0), (1, 1)), ((SIZE - 1,) * 70,)]),
            *([("a", (3, 1)), ("b c",)] if text else []),
        ],
        "Mapping[int, float]": [{}, {0: 1.5}, {3: -2.0, 7: 0.25, SIZE - 1: 30.0}],
        "StructuredOutputs": [
            {"regex": "a"},
            {"choice": ["a", "b"]},
            {"json_schema": {"b": {}, "a": 1}, "on_unsupported": "ignore"},
        ],
    }[parameter.kind]


def every(parameter, text=False):
    """The same, with None and what stands for off."""
    return [*inside(parameter, text), *parameter.off, *([None] if parameter.optional else [])]


@functools.cache
def examples(kind, most=10, text=False):
    """Stages of a kind, each once: every valid value of each parameter, in many combinations."""
    numbers = random.Random(kind.name)
    decks = {attribute: [] for attribute in kind.parameters}
    made = {}
    for _ in range(4 * most):
        for attribute, deck in decks.items():
            if not deck:  # every value once, then every value once again
                deck += every(kind.parameters[attribute], text)
                numbers.shuffle(deck)
        made.update(dict.fromkeys(valid(kind, {attribute: deck.pop() for attribute, deck in decks.items()})))
        if len(made) == most:
            break
    return tuple(made)


def valid(kind, values):
    """The stage with these values, in a list: empty if they contradict each other."""
    try:
        return [kind(**values)]
    except ParameterError:
        return []


def on(kind, **values):
    """Stages of a kind that are switched on, with these values, and a few valid values of every switch."""
    switches = {
        a: [v for v in inside(p) if not p.is_neutral(v)][1:4:2] or [inside(p)[-1]]
        for a, p in kind.parameters.items()
        if p.neutral is not dataclasses.MISSING and a not in values
    }
    combinations = itertools.product(*switches.values())
    return [s for c in combinations for s in valid(kind, {**dict(zip(switches, c, strict=True)), **values})]


@functools.cache
def neutrals(kind):
    """Stages of a kind that say in every way that they do nothing, whatever their other parameters."""
    switches = {a: p for a, p in kind.parameters.items() if p.neutral is not dataclasses.MISSING}
    others = {a: p for a, p in kind.parameters.items() if a not in switches}
    offs = [
        dict(zip(switches, v, strict=True))
        for v in itertools.product(*([p.neutral, *p.off] for p in switches.values()))
    ]
    rest = [{}, *({a: value} for a, p in others.items() for value in every(p))]
    return tuple(stage for off in offs for more in rest for stage in valid(kind, {**off, **more}))


def rows(seed=0, count=3, size=SIZE):
    """Logits on a grid of eighths (so that sums with whole numbers are exact), with ties, some with holes at -inf."""
    numbers = np.random.default_rng(seed)
    x = np.round(numbers.normal(size=(count, size)) * 24) / 8
    x[1::3] = np.round(x[1::3])
    x[2::3][numbers.random(x[2::3].shape) < 0.3] = -np.inf
    x[:, 1] = 2.0
    return x.astype(np.float32)


def masks(seed, count, size=SIZE, share=0.8):
    """Packed bitmasks [count, size / 32] that allow about a share of the tokens, and token 1."""
    allowed = np.random.default_rng(seed).random((count, -(-size // 32) * 32)) < share
    allowed[:, 1] = True
    return np.packbits(allowed, axis=1, bitorder="little").view("<i4")
