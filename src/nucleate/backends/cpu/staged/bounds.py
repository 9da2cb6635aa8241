"""Rules on intervals: what a rule says at least of any score, whatever the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.backends.cpu.staged.bind import numbers
from nucleate.backends.rules import reads
from nucleate.core.stage import Row, Stage

INFINITY = float("inf")


class Span(NDArrayOperatorsMixin):
    """Stands for any number from ``low`` to ``high`` in a rule."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        spans = [one if isinstance(one, Span) else Span(one, one) for one in given]
        if ufunc in RISING and method == "__call__" and not others:
            with np.errstate(all="ignore"):
                return Span(float(ufunc(*(one.low for one in spans))), float(ufunc(*(one.high for one in spans))))
        make = UFUNCS.get(ufunc)
        return NotImplemented if make is None or method != "__call__" or others else make(*spans)


def _times(one: Span, other: Span) -> Span:
    ends = [0.0 if 0.0 in (a, b) else a * b for a in (one.low, one.high) for b in (other.low, other.high)]
    return Span(min(ends), max(ends))


def _over(one: Span, other: Span) -> Span:
    if not other.low > 0.0:
        return Span(-INFINITY, INFINITY)
    return _times(one, Span(1.0 / other.high, 1.0 / other.low))


RISING = (np.add, np.exp, np.log, np.log1p, np.sqrt, np.minimum, np.maximum, np.positive)
UFUNCS: dict[Any, Callable[..., Span]] = {
    np.subtract: lambda one, other: Span(one.low - other.high, one.high - other.low),
    np.negative: lambda one: Span(-one.high, -one.low),
    np.multiply: _times,
    np.divide: _over,
}

ANY = Row(
    Span(1.0, INFINITY),
    Span(0.0, 0.0),
    Span(1.0, INFINITY),
    Span(1.0, INFINITY),
    Span(0.0, INFINITY),
    Span(-INFINITY, 0.0),
    Span(0.0, INFINITY),
    Span(1.0, INFINITY),
)
"""The statistics of any row."""

_known: dict[Any, bool] = {}


def never_negative(stage: Stage, rule: str) -> bool:
    """Whether it is certain that what a rule says of a score is never below 0."""
    asked = reads(stage, rule)
    key = type(stage), rule, numbers(stage, rule)
    if asked.mine is None or key[2] is None:
        return False
    if key not in _known:
        if len(_known) >= 1024:
            _known.clear()
        try:
            said = getattr(stage, rule)(Span(-INFINITY, 0.0), ANY)
        except Exception:  # noqa: BLE001  # a rule may do anything
            said = None
        _known[key] = isinstance(said, Span) and said.low >= 0.0
    return _known[key]
