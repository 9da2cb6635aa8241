"""Inspects the rules of stages: which row statistics a rule reads, and whether it is a line in the score.

A rule is run once on stand-ins that record what happens to them. No backend is needed for that, and no compiler.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.core.maths import exp
from nucleate.core.stage import Row, Stage, Token, shape_of

NUMBERS = (int, float, np.integer, np.floating, types.NoneType)

LARGEST = 2**62
"""Integers above this do not fit the int64 of kernels and tensors."""

RULES = {
    "Scale": ("apply",),
    "Floor": ("floor",),
    "Prefix": ("weight", "target", "order"),
    "Ceiling": ("ceiling",),
}
"""The rules of each shape that receive the row statistics."""


class Inputs(NamedTuple):
    """What a rule reads."""

    row: frozenset[str]  #: names of row statistics
    mine: tuple[str, ...] | None  #: names of the stage's own numeric attributes; None if they cannot be determined
    ones: bool  #: the rule returns 1 for every score


EVERYTHING = Inputs(frozenset(Row._fields), None, ones=False)


class Trace(NDArrayOperatorsMixin):
    """Stands for a number: records from which row statistics a result was computed."""

    def __init__(self, row: frozenset[str] = frozenset(), *, ones: bool = False) -> None:
        self.row, self.ones = row, ones

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **others: Any) -> Trace:
        return Trace(frozenset().union(*(one.row for one in inputs if isinstance(one, Trace))))

    def __array_function__(self, function: Any, kinds: Any, inputs: Any, others: Any) -> Any:
        if function is np.where and not isinstance(inputs[0], Trace):
            return inputs[1] if inputs[0] else inputs[2]
        if function is np.ones_like:
            return Trace(ones=True)
        return self.__array_ufunc__(function, "", *inputs)

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no single result")


class Self:
    """Stands for the stage: switches (bool, None) keep their values, numbers become stand-ins."""

    def __init__(self, stage: Stage, number: Callable[[], Any] = Trace) -> None:
        self.__dict__.update(_stage=stage, _read={}, _number=number)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if not isinstance(value, NUMBERS):
            raise TypeError(f"{name} is not a number")
        self._read[name] = True
        return value if name in self._stage.parameters and isinstance(value, bool | None) else self._number()


_inputs: dict[Any, Inputs] = {}
_sums: dict[type[Stage], bool] = {}
_switches: dict[type[Stage], tuple[str, ...]] = {}


def settings(stage: Stage) -> tuple[Any, ...]:
    """The stage's type, its switches, and which optional numbers are None. Rules of equal settings read the same."""
    kind = type(stage)
    if kind not in _switches:
        _switches[kind] = tuple(name for name, one in kind.parameters.items() if one.kind == "bool" or one.optional)
    return kind, *[value if isinstance(value := getattr(stage, a), bool | None) else 0 for a in _switches[kind]]


def reads(stage: Stage, rule: str) -> Inputs:
    """What a rule of a stage reads."""
    key = (rule, *settings(stage))
    found = _inputs.get(key)
    if found is None:
        found = _inputs[key] = _trace(stage, rule)
    return found


def reads_whole(stage: Stage) -> bool:
    """Whether any rule of a stage reads ``row.whole``, the mass before the first cut."""
    return any("whole" in reads(stage, rule).row for rule in RULES.get(shape_of(stage), ()))


def _trace(stage: Stage, rule: str) -> Inputs:
    function = getattr(type(stage), rule)
    me, row = Self(stage), Row(*[Trace(frozenset((name,))) for name in Row._fields])
    token = Token(*[Trace() for _ in Token._fields])
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    try:
        said = function(me, *({"row": row, "token": token}.get(name) or Trace() for name in names))
    except Exception:  # noqa: BLE001  # a rule may do anything
        return EVERYTHING
    traced = isinstance(said, Trace)
    return Inputs(said.row if traced else frozenset(), tuple(me._read), ones=traced and said.ones)  # noqa: SLF001


def _summand(self: Any, x: Any, row: Row) -> Any:
    return exp(x - row.top)


def sums_to_mass(stage: Stage) -> bool:
    """Whether the weight rule is exp(x - row.top), so that the weights sum to ``row.mass``."""
    kind = type(stage)
    if kind not in _sums:
        weight = kind.weight  # type: ignore[attr-defined]
        same = all(getattr(weight.__code__, a) == getattr(_summand.__code__, a) for a in ("co_code", "co_names"))
        _sums[kind] = same and weight.__globals__.get("exp") is exp
    return _sums[kind]


class Line(NDArrayOperatorsMixin):
    """Stands for all scores x at once: a line in x, or (bent) the absolute value of one."""

    def __init__(self, *, bent: bool = False) -> None:
        self.bent = bent

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        if method != "__call__" or others or any(isinstance(one, Line) and one.bent for one in given):
            return NotImplemented
        lines = sum(isinstance(one, Line) for one in given)
        if ufunc in (np.add, np.subtract, np.negative, np.positive):
            return Line()
        if (ufunc is np.multiply and lines == 1) or (ufunc is np.divide and isinstance(given[0], Line) and lines == 1):
            return Line()
        return Line(bent=True) if ufunc is np.absolute else NotImplemented

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        if function is np.where and not isinstance(given[0], Line | Unknown) and np.ndim(given[0]) == 0:
            return given[1] if given[0] else given[2]
        return NotImplemented


class Unknown(NDArrayOperatorsMixin):
    """Stands for a number that may be any."""

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no single result")


def form(stage: Stage, rule: str, given: Any = None) -> str:
    """ "line" if a rule is linear in the score, "bent" if it is the absolute value of such a one; else "".

    That holds for every row, and for all stages of equal ``settings``. given: what the rule takes instead of a row.
    """
    try:
        row = Row(*(Unknown() for _ in Row._fields))
        said = getattr(type(stage), rule)(Self(stage, Unknown), Line(), row if given is None else given)
    except Exception:  # noqa: BLE001  # a rule may do anything
        return ""
    return ("bent" if said.bent else "line") if isinstance(said, Line) else ""
