"""Examples of any stage, generated from its declared parameters, and rows of logits to try them on."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import Parameter, ParameterError
from nucleate.sampling.stage import Stage
from nucleate.sampling.watermark_key import WatermarkKey

SIZE = 40
"""The vocabulary size of the examples: the token ids in them are below it."""


FAR = 1000.0
"""Bounds farther away than this are examples of their own: those between them would all be large."""


def inside(parameter: Parameter, text: bool = False) -> list[Any]:
    """Valid values of a parameter, with its bounds. text: include text values, which need a tokenizer."""
    if parameter.choices:
        names = list(parameter.choices)
        return names if parameter.kind == "str" else [*names, (), ("top_p", "temperature"), ["xtc"]]
    if parameter.kind == "float":
        low = -3.0 if parameter.low is None or parameter.low < -FAR else parameter.low
        high = low + 4.0 if parameter.high is None or parameter.high > FAR else parameter.high
        values = [low + (high - low) * part for part in (0.0, 0.001, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0)]
        values += [bound for bound in (parameter.low, parameter.high) if bound is not None and abs(bound) > FAR]
        return values[1:] if parameter.open_low else values
    if parameter.kind == "int":
        low = 0 if parameter.low is None else int(parameter.low)
        return [low, low + 1, low + 2, low + 5, low + SIZE, 10**6 if parameter.high is None else int(parameter.high)]
    words = [(), ((1,),), ((7, 2, 1), (2, 1, 5)), ((1, 1), (7,), (1, 0), (1, 1)), ((SIZE - 1,) * 70,)]
    examples: dict[str, list[Any]] = {
        "bool": [False, True],
        "tuple[int, ...]": [(), (0,), (3, 1, 3), tuple(range(0, SIZE, 2))],
        "str | tuple[int, ...]": [(), (3,), (0, 7, 7), *(["a b"] if text else [])],
        "tuple[str, ...]": [(), ("a",), ("a", "bc")],
        "tuple[str | tuple[int, ...], ...]": [*words, *([("a", (3, 1)), ("b c",)] if text else [])],
        "Mapping[int, float]": [{}, {0: 1.5}, {3: -2.0, 7: 0.25, SIZE - 1: 30.0}],
        "StructuredOutputs": [{"regex": "a"}, {"json_schema": {"b": {}, "a": 1}, "on_unsupported": "ignore"}],
        "WatermarkKey": [WatermarkKey(b"a key for examples")],
        "tuple[Stage, ...]": [[{"stage": "temperature", "t": 0.5}], "top_k(3) | greedy"],
    }
    return examples[parameter.kind]


def every(parameter: Parameter, text: bool = False) -> list[Any]:
    """The same, with None and the values that disable the stage."""
    return [*inside(parameter, text), *parameter.off, *([None] if parameter.optional else [])]


@functools.cache
def examples(kind: type[Stage], most: int = 10, text: bool = False) -> tuple[Stage, ...]:
    """Distinct stages of a kind: every valid value of each parameter, in many combinations."""
    numbers = random.Random(kind.name)
    decks: dict[str, list[Any]] = {attribute: [] for attribute in kind.parameters}
    made: dict[Stage, None] = {}
    for _ in range(4 * most):
        for attribute, deck in decks.items():
            if not deck:  # each value once per round
                deck += every(kind.parameters[attribute], text)
                numbers.shuffle(deck)
        made.update(dict.fromkeys(valid(kind, {attribute: deck.pop() for attribute, deck in decks.items()})))
        if len(made) == most:
            break
    return tuple(made)


def valid(kind: type[Stage], values: Mapping[str, Any]) -> list[Stage]:
    """A list with the stage of these values; empty if they are contradictory."""
    try:
        return [kind(**values)]
    except ParameterError:
        return []


@functools.cache
def neutrals(kind: type[Stage]) -> tuple[Stage, ...]:
    """Disabled stages of a kind, with all neutral values and many values of the other parameters."""
    switches = {a: p for a, p in kind.parameters.items() if p.neutral is not MISSING}
    others = {a: p for a, p in kind.parameters.items() if a not in switches}
    offs = [
        dict(zip(switches, v, strict=True))
        for v in itertools.product(*([p.neutral, *p.off] for p in switches.values()))
    ]
    rest: list[dict[str, Any]] = [{}, *({a: value} for a, p in others.items() for value in every(p))]
    return tuple(stage for off in offs for more in rest for stage in valid(kind, {**off, **more}))


def rows(seed: int = 0, count: int = 3, size: int = SIZE) -> NDArray[np.float32]:
    """Logits on a grid of eighths (so that sums with whole numbers are exact), with ties, some with holes at -inf."""
    numbers = np.random.default_rng(seed)
    x = np.round(numbers.normal(size=(count, size)) * 24) / 8
    x[1::3] = np.round(x[1::3])
    x[2::3][numbers.random(x[2::3].shape) < 0.3] = -np.inf
    x[:, 1] = 2.0
    return x.astype(np.float32)
