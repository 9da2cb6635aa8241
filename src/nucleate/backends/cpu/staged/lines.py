"""Rules as lines: what a rule says of every score at once, where it says the same multiple of it plus a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.backends.cpu.staged.bind import Self, settings
from nucleate.core.stage import Row, Stage


class Line(NDArrayOperatorsMixin):
    """Stands for all scores x in a rule: ``slope * x + offset``, or, if bent, its absolute value."""

    def __init__(self, slope: float, offset: float, *, bent: bool = False) -> None:
        self.slope, self.offset, self.bent = slope, offset, bent

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        make = UFUNCS.get(ufunc)
        if make is None or method != "__call__" or others:
            return NotImplemented
        for one in given:
            if isinstance(one, Line) and one.bent:
                return NotImplemented
        return make(*given)

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        if function is np.where and not isinstance(given[0], Line) and np.ndim(given[0]) == 0:
            return given[1] if given[0] else given[2]
        return NotImplemented


def _add(one: Any, other: Any) -> Any:
    if not isinstance(one, Line):
        one, other = other, one
    if isinstance(other, Line):
        return Line(one.slope + other.slope, one.offset + other.offset)
    return Line(one.slope, one.offset + other)


def _multiply(one: Any, other: Any) -> Any:
    if not isinstance(one, Line):
        one, other = other, one
    return NotImplemented if isinstance(other, Line) else Line(one.slope * other, one.offset * other)


def _divide(one: Any, other: Any) -> Any:
    return NotImplemented if isinstance(other, Line) else Line(one.slope / other, one.offset / other)


UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: _add,
    np.subtract: lambda one, other: _add(one, _multiply(other, -1.0) if isinstance(other, Line) else -other),
    np.multiply: _multiply,
    np.divide: _divide,
    np.negative: lambda one: _multiply(one, -1.0),
    np.positive: lambda one: one,
    np.absolute: lambda one: Line(one.slope, one.offset, bent=True),
}


def line(stage: Stage, rule: str, row: Row) -> Line | None:
    """A rule of a stage as a line, for a row with these statistics; None where it is not seen to be one."""
    try:
        said = getattr(stage, rule)(Line(1.0, 0.0), row)
    except Exception:  # noqa: BLE001  # a rule may do anything
        return None
    return said if isinstance(said, Line) and np.isfinite(said.slope) and np.isfinite(said.offset) else None


class Unknown(NDArrayOperatorsMixin):
    """Stands for a number that may be any."""

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no one answer")


_forms: dict[Any, str | None] = {}


def form(stage: Stage, rule: str) -> str | None:
    """Whether a rule is a "line", or "bent", for every row and whatever the numbers of the stage are; else None."""
    key = (rule, *settings(stage))
    if key not in _forms:
        try:
            row = Row(*(Unknown() for _ in Row._fields))
            said = getattr(type(stage), rule)(Self(stage, Unknown), Line(1.0, 0.0), row)
        except Exception:  # noqa: BLE001  # a rule may do anything
            said = None
        _forms[key] = None if not isinstance(said, Line) else "bent" if said.bent else "line"
    return _forms[key]
