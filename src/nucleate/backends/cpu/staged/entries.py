"""The rules of a stage as functions that kernels call by their addresses: compiled once per type of stage.

So one kernel runs stages that it has never heard of, and no kernel is compiled for a pipeline.
"""

from __future__ import annotations

from collections import namedtuple
from types import FunctionType
from typing import Any, cast

from llvmlite import ir
from numba import types

from nucleate.backends.cpu.compile import intrinsic, jit
from nucleate.backends.cpu.staged import rules
from nucleate.backends.cpu.staged.bind import bound, digest
from nucleate.backends.cpu.staged.old import entry
from nucleate.backends.rules import reads
from nucleate.core.maths import rebind
from nucleate.core.stage import Stage

TEMPLATES = {
    "apply": rules.each,
    "weight": rules.each,
    "order": rules.each,
    "floor": rules.once,
    "target": rules.once,
    "score": rules.drawn,
}

LARGEST = 2**53
"""A number is given as float64: an integer that is larger would be another one."""

_entries: dict[Any, Any] = {}


def address(stage: Stage, rule: str) -> int:
    """Where the rule of a stage is: ``rules.each``, ``once`` or ``drawn`` of it. 0 where it cannot be compiled."""
    mine = reads(stage, rule).mine
    key = type(stage), rule, mine
    if key not in _entries:
        try:
            _entries[key] = None if mine is None else _compile(type(stage), rule, mine)
        except Exception:  # noqa: BLE001  # whatever the compiler says: who runs the stage otherwise will say it
            _entries[key] = None
    found = _entries[key]
    return 0 if found is None else int(found.address)


def numbers(stage: Stage, rule: str) -> tuple[float, ...] | None:
    """The numbers of a stage that a rule reads, or None if one of them is none, or would be another as float64."""
    given = [getattr(stage, name) for name in reads(stage, rule).mine or ()] or [0.0]
    if any(one is None or (isinstance(one, int) and abs(one) > LARGEST) for one in given):
        return None
    return tuple(map(float, given))


def _compile(kind: type[Stage], rule: str, mine: tuple[str, ...]) -> Any:
    function = getattr(kind, rule)
    tag = f"{kind.__name__}_{rule}_{digest(function, mine)}"
    made = namedtuple(kind.__name__, mine or ("nothing",))  # type: ignore[misc]  # noqa: PYI024
    names = {"Mine": made, "COUNT": len(mine or ("nothing",)), "rule": jit(bound(function, tag))}
    return entry(rebind(cast(FunctionType, TEMPLATES[rule]), names, tag))


@intrinsic
def call(typing: Any, at: Any, numbers: Any, row: Any, x: Any, m: Any, top: Any, out: Any) -> Any:
    """Call what ``address`` told. numbers, row, x, out: the addresses of float64 arrays."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        word, double = ir.IntType(64), ir.DoubleType()
        kind = ir.FunctionType(ir.VoidType(), [word, word, word, word, double, word])
        b.call(b.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float64, types.int64), make


@jit
def say(steps: Any, i: Any, column: Any, row: Any, x: Any, m: Any, top: Any, out: Any) -> None:
    """What a rule of a step says of m scores, or of a row. steps: its address in a column, that of its numbers in the
    next. The others: float64.
    """
    call(steps[i, column], steps[i, column + 1], row.ctypes.data, x.ctypes.data, m, top, out.ctypes.data)
