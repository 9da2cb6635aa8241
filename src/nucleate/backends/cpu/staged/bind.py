"""What a rule reads, and the rule as a compiled loop. Knows no shape; learns both from the rule itself."""

from __future__ import annotations

import hashlib
import logging
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.staged import rules
from nucleate.core import maths
from nucleate.core.maths import exp, rebind
from nucleate.core.stage import Row, Shift, Stage, Token, shape_of

logger = logging.getLogger("nucleate")

NUMBERS = (int, float, np.integer, np.floating, types.NoneType)

FEW = 512
"""Up to so many scores NumPy is as fast as a compiled loop, and needs no compiler."""

LARGEST = 2**62
"""An integer that is larger does not fit the compiler's."""

RULES = {
    "Scale": ("apply",),
    "Floor": ("floor",),
    "Prefix": ("weight", "target", "order"),
    "Ceiling": ("ceiling",),
}
"""The rules that see statistics of before the first cut."""


class Asked(NamedTuple):
    """What a rule reads."""

    row: frozenset[str]  #: which statistics
    mine: tuple[str, ...] | None  #: which numbers of its stage; None: there is no telling
    ones: bool  #: nothing: it says 1 for every score

    def numbers(self, stage: Stage) -> tuple[Any, ...] | None:
        """These numbers, or None if one does not fit the compiler's."""
        given = tuple(getattr(stage, name) for name in self.mine or ()) or (0.0,)
        return None if any(isinstance(one, int) and abs(one) > LARGEST for one in given) else given


EVERYTHING = Asked(frozenset(Row._fields), None, ones=False)


class Trace(NDArrayOperatorsMixin):
    """Stands for a number while a rule is read: remembers from which statistics it came."""

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
        raise TypeError("a rule that branches on a number has no one answer")


class Self:
    """Stands for the stage: its switches are as they are, its numbers may be any."""

    def __init__(self, stage: Stage, number: Callable[[], Any] = Trace) -> None:
        self.__dict__.update(_stage=stage, _read={}, _number=number)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if not isinstance(value, NUMBERS):
            raise TypeError(f"{name} is no number")
        self._read[name] = True
        return value if name in self._stage.parameters and isinstance(value, bool | None) else self._number()


_asked: dict[Any, Asked] = {}
_simple: dict[tuple[type[Stage], str], Asked] = {}
_loops: dict[Any, Any] = {}
_sums: dict[type[Stage], bool] = {}
_switches: dict[type[Stage], tuple[str, ...]] = {}


def settings(stage: Stage) -> tuple[Any, ...]:
    """The switches of a stage, and which of its numbers are none: with these, what it reads is the same."""
    kind = type(stage)
    if kind not in _switches:
        _switches[kind] = tuple(name for name, one in kind.parameters.items() if one.kind == "bool" or one.optional)
    return kind, *[value if isinstance(value := getattr(stage, a), bool | None) else 0 for a in _switches[kind]]


def reads(stage: Stage, rule: str) -> Asked:
    """What a rule of a stage reads."""
    known = _simple.get((type(stage), rule))
    if known is not None:
        return known
    key = (rule, *settings(stage))
    if key not in _asked:
        _asked[key] = _read(stage, rule)
    if len(key) == 2:  # a stage of this type has no settings
        _simple[type(stage), rule] = _asked[key]
    return _asked[key]


def reads_whole(stage: Stage) -> bool:
    """Whether a rule of a stage asks for the mass before the cuts."""
    key = ("", *settings(stage))
    if key not in _asked:
        rules = RULES.get(shape_of(stage), ())
        _asked[key] = Asked(frozenset().union(*(reads(stage, rule).row for rule in rules)), (), ones=False)
    return "whole" in _asked[key].row


def _read(stage: Stage, rule: str) -> Asked:
    function = getattr(type(stage), rule)
    me, row = Self(stage), Row(*[Trace(frozenset((name,))) for name in Row._fields])
    token = Token(*[Trace() for _ in Token._fields])
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    try:
        said = function(me, *({"row": row, "token": token}.get(name) or Trace() for name in names))
    except Exception:  # noqa: BLE001  # a rule may do anything
        return EVERYTHING
    traced = isinstance(said, Trace)
    return Asked(said.row if traced else frozenset(), tuple(me._read), ones=traced and said.ones)  # noqa: SLF001


def _summand(self: Any, x: Any, row: Row) -> Any:
    return exp(x - row.top)


def sums_to_mass(stage: Stage) -> bool:
    """Whether the weight of a token is what the mass is the sum of, exp(x - row.top): then one pass makes both."""
    kind = type(stage)
    if kind not in _sums:
        weight = kind.weight  # type: ignore[attr-defined]
        same = all(getattr(weight.__code__, a) == getattr(_summand.__code__, a) for a in ("co_code", "co_names"))
        _sums[kind] = same and weight.__globals__.get("exp") is exp
    return _sums[kind]


def loop(stage: Stage, rule: str) -> Any:
    """The rule of a stage over many scores, see ``rules.values``; None where it cannot be compiled."""
    asked = reads(stage, rule)
    key = type(stage), rule, asked.mine
    if key not in _loops:
        _loops[key] = None
        try:
            _loops[key] = _compile(type(stage), rule, asked.mine)
        except Exception as error:  # noqa: BLE001  # whatever the compiler says
            give_up(stage, rule, error)
    return _loops[key]


def values(stage: Stage, rule: str, x: Any, m: int, top: float, row: Row, out: Any) -> None:
    """What a rule says of m scores, into another array: only so do loops become vectors."""
    run = loop(stage, rule) if m > FEW else None
    if run is not None and (mine := reads(stage, rule).numbers(stage)) is not None:
        try:
            run(x, m, top, mine, row, out)
            return
        except Exception as error:  # noqa: BLE001  # whatever the compiler says: NumPy knows whether the rule is wrong
            give_up(stage, rule, error)
    out[:m] = getattr(stage, rule)(x[:m] - top, row)


def give_up(stage: Stage, rule: str, why: Exception) -> None:
    """From now on the rule is NumPy's."""
    _loops[type(stage), rule, reads(stage, rule).mine] = None
    first = (str(why).strip().splitlines() or [""])[0]
    logger.warning("%s.%s is not compiled (%s: %s)", type(stage).__name__, rule, type(why).__name__, first)


def _compile(kind: type[Stage], rule: str, mine: tuple[str, ...] | None) -> Any:
    if mine is None:
        raise TypeError("it is not one expression of numbers")
    function = getattr(kind, rule)
    tag = f"{kind.__name__}_{rule}_{digest(function, mine)}"
    names = {"Mine": namedtuple(kind.__name__, mine or ("nothing",)), "rule": jit(bound(function, tag))}  # noqa: PYI024
    template = rules.edits if issubclass(kind, Shift) else rules.values
    return kernel(rebind(cast(types.FunctionType, template), names, tag))


_MATHS = {id(getattr(maths, name)): getattr(rules, name, None) for name in maths.NAMES}


def _globals(function: Any) -> dict[str, Any]:
    """The globals that a function names, itself or in a function inside it."""
    found, codes = {}, [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        found.update({name: function.__globals__[name] for name in code.co_names if name in function.__globals__})
    return found


def bound(function: Any, tag: str) -> Any:
    """A rule, or what it calls, with the compiler's meaning of the names."""
    names = {}
    for name, value in _globals(function).items():
        if id(value) in _MATHS and callable(value):
            names[name] = _MATHS[id(value)]
        elif isinstance(value, types.FunctionType):
            names[name] = jit(bound(value, tag))
    return rebind(function, names, tag)


def digest(function: Callable[..., Any], mine: tuple[str, ...] = ()) -> str:
    """Of everything that a rule is made of: a change of any of it is another kernel."""
    made = hashlib.sha256(repr(mine).encode())
    _digest(function, made, ())
    return made.hexdigest()[:16]


def _digest(value: Any, made: Any, inside: tuple[Any, ...]) -> None:  # noqa: C901  # a case per kind of value
    if value in inside:
        raise TypeError("a rule does not call itself")
    if id(value) in _MATHS and callable(value):
        made.update(value.__name__.encode())
    elif isinstance(value, types.FunctionType):
        inside = (*inside, value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        for part in (value.__code__, value.__defaults__ or (), value.__kwdefaults__ or {}, cells):
            _digest(part, made, inside)
        for name, one in sorted(_globals(value).items()):
            made.update(name.encode())
            _digest(one, made, inside)
    elif isinstance(value, types.CodeType):
        made.update(repr((value.co_code, value.co_names, value.co_varnames)).encode())
        for part in value.co_consts:
            _digest(part, made, inside)
    elif isinstance(value, tuple | list | dict):
        for part in value.items() if isinstance(value, dict) else value:
            _digest(part, made, inside)
    elif isinstance(value, (*NUMBERS, str, bytes)):
        made.update(repr((type(value).__name__, value)).encode())
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType | np.ufunc):
        made.update(f"{getattr(value, '__module__', '')} {value.__name__}".encode())
    else:
        raise TypeError(f"{value!r:.40} is no number")
