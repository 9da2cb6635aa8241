"""Inspects the rules of stages: which row statistics a rule reads, and whether it is linear in the score.

A rule is executed once on stand-ins that record the operations. This needs no backend and no compiler.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.sampling.maths import INFINITY, exp
from nucleate.sampling.stage import Prefix, RowStats, Shift, Stage, TokenInfo, shape_of

NUMBERS = (int, float, np.integer, np.floating, types.NoneType)

LARGEST = 2**62
"""The largest integer that kernels and tensors can hold as int64."""

RULES = {
    "Scale": ("apply",),
    "Floor": ("floor",),
    "Prefix": ("weight", "target", "order"),
    "Ceiling": ("ceiling",),
}
"""The rules of each shape that receive the row statistics."""

DRAWS = {"none": ("score",), "each": ("score",), "one": ("weight", "target")}
"""The rules of a Draw by its ``uniforms``."""

OF_SCORES = {"apply", "weight", "order", "score"}
"""The rules whose first argument is the scores."""


class RuleInputs(NamedTuple):
    """What a rule reads, and how its result depends on the score."""

    row: frozenset[str]  #: names of row statistics
    mine: tuple[str, ...] | None  #: names of the stage's own numeric attributes; None if they cannot be determined
    ones: bool  #: the rule returns 1 for every score
    form: str  #: see ``TracedNumber``
    sums: bool = False  #: it is the weight exp(x - row.top), so that the weights sum to ``row.mass``


FLAT, LINE, BENT, ANY = "flat", "line", "bent", "any"
EVERYTHING = RuleInputs(frozenset(RowStats._fields), None, ones=False, form=ANY)


class TracedNumber(NDArrayOperatorsMixin):
    """Stand-in for a number: records the row statistics that a result depends on, and how it depends on the score x.

    form: FLAT, it does not depend on x; LINE, it is linear in x; BENT, the absolute value of such a one; ANY, other.
    """

    def __init__(self, row: frozenset[str] = frozenset(), form: str = FLAT, *, ones: bool = False) -> None:
        self.row, self.form, self.ones = row, form, ones

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> TracedNumber:
        traces = [one for one in given if isinstance(one, TracedNumber)]
        row, forms = frozenset().union(*(one.row for one in traces)), {one.form for one in traces}
        if forms <= {FLAT}:
            return TracedNumber(row)
        form, lines = ANY, sum(one.form == LINE for one in traces)
        if method == "__call__" and not others and forms <= {FLAT, LINE}:
            divides = ufunc is np.divide and getattr(given[0], "form", FLAT) == LINE
            if ufunc in (np.add, np.subtract, np.negative, np.positive) or (
                lines == 1 and (ufunc is np.multiply or divides)
            ):
                form = LINE
            elif ufunc is np.absolute:
                form = BENT
        return TracedNumber(row, form)

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        if function is np.ones_like:
            return TracedNumber(ones=True)
        return self.__array_ufunc__(function, "", *given)

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no single result")


class ReplaceRecorder:
    """Stand-in for a stage: ``dataclasses.replace`` returns a dict of the changes."""

    __dataclass_fields__: ClassVar[Mapping[str, Any]] = {}

    def __new__(cls, *given: Any, **changes: Any) -> Any:
        return super().__new__(cls) if given else changes


class StageStandIn(ReplaceRecorder):
    """Stand-in for a stage: bool and None attributes keep their values, numbers become stand-ins."""

    def __init__(self, stage: Stage) -> None:
        self.__dict__.update(_stage=stage, _read={})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if not isinstance(value, NUMBERS):
            raise TypeError(f"{name} is not a number")
        self._read[name] = True
        return value if name in self._stage.parameters and isinstance(value, bool | None) else TracedNumber()


_inputs: dict[Any, RuleInputs] = {}
_switches: dict[type[Stage], tuple[str, ...]] = {}


def settings(stage: Stage) -> tuple[Any, ...]:
    """The type of a stage, its bool attributes, and which optional numbers are None: rules of equal settings read the
    same.
    """
    kind = type(stage)
    if kind not in _switches:
        _switches[kind] = tuple(name for name, one in kind.parameters.items() if one.kind == "bool" or one.optional)
    values = [getattr(stage, name) for name in _switches[kind]]
    return kind, *[value if value is None or value is True or value is False else 0 for value in values]


def reads(stage: Stage, rule: str) -> RuleInputs:
    """What a rule of a stage reads."""
    key = (rule, *settings(stage))
    found = _inputs.get(key)
    if found is None:
        found = _inputs[key] = _trace(stage, rule)
    return found


def rules_of(stage: Any) -> dict[str, RuleInputs]:
    """What the rules of a stage read, by name; ``order`` only if the stage defines its own."""
    shape = shape_of(stage)
    names = DRAWS[stage.uniforms] if shape == "Draw" else RULES.get(shape, ())
    plain = shape == "Prefix" and type(stage).order is Prefix.order
    return {name: reads(stage, name) for name in names if not (plain and name == "order")}


def _trace(stage: Stage, rule: str) -> RuleInputs:
    function = getattr(type(stage), rule)
    me, row = StageStandIn(stage), RowStats(*[TracedNumber(frozenset((name,))) for name in RowStats._fields])
    known = {"row": row, "token": TokenInfo(*[TracedNumber() for _ in TokenInfo._fields])}
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    given = [known.get(name, TracedNumber()) for name in names]
    if rule in OF_SCORES:
        given[0] = TracedNumber(form=LINE)
    try:
        said = function(me, *given)
    except Exception:  # noqa: BLE001  # a rule may do anything
        return EVERYTHING
    if not isinstance(said, TracedNumber):
        return RuleInputs(frozenset(), tuple(me._read), ones=False, form=FLAT)  # noqa: SLF001
    sums = rule == "weight" and _same(function, _summand)
    return RuleInputs(said.row, tuple(me._read), said.ones, said.form, sums)  # noqa: SLF001


def _same(rule: Any, other: Any) -> bool:
    """Whether two rules have the same code and the same globals."""
    code, wanted = rule.__code__, other.__code__
    names = {name: value for name, value in other.__globals__.items() if name in wanted.co_names}
    return (
        (code.co_code, code.co_names, code.co_consts) == (wanted.co_code, wanted.co_names, wanted.co_consts)
        and not rule.__closure__
        and all(name in rule.__globals__ and rule.__globals__[name] == value for name, value in names.items())
    )


def _summand(self: Any, x: Any, row: RowStats) -> Any:
    return exp(x - row.top)


def _added(self: Any, x: Any, token: TokenInfo) -> Any:
    return x + token.listed


def _banned(self: Any, x: Any, token: TokenInfo) -> Any:
    return x - INFINITY


def adds(stage: Shift) -> bool:
    """Whether a stage adds the values of its list to the scores."""
    return _same(type(stage).apply, _added)


def bans(stage: Shift) -> bool:
    """Whether a stage bans the tokens that it touches."""
    return _same(type(stage).apply, _banned)
