"""What a rule reads, and the rule as a compiled loop. Knows no shape; learns both from the rule itself."""

from __future__ import annotations

import hashlib
import logging
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.staged import rules
from nucleate.backends.cpu.staged.old import kernel
from nucleate.backends.rules import LARGEST, NUMBERS, reads
from nucleate.core import maths
from nucleate.core.maths import rebind
from nucleate.core.stage import Row, Shift, Stage

logger = logging.getLogger("nucleate")

FEW = 512
"""Up to so many scores NumPy is as fast as a compiled loop, and needs no compiler."""

_loops: dict[Any, Any] = {}


def numbers(stage: Stage, rule: str) -> tuple[Any, ...] | None:
    """The numbers of a stage that a rule reads, or None if one does not fit the compiler's."""
    given = tuple(getattr(stage, name) for name in reads(stage, rule).mine or ()) or (0.0,)
    return None if any(isinstance(one, int) and abs(one) > LARGEST for one in given) else given


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
    if run is not None and (mine := numbers(stage, rule)) is not None:
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
