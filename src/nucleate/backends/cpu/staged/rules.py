"""What the names in rules mean to the compiler, for one number at a time, and rules as loops over many."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import exp
from nucleate.backends.cpu.load import doubles_at
from nucleate.core.stage import Row, Token

FIELDS = len(Row._fields)


@jit
def maximum(a: Any, b: Any) -> Any:
    return a if a >= b or a != a else b  # noqa: PLR0124  # NaN


@jit
def minimum(a: Any, b: Any) -> Any:
    return a if a <= b or a != a else b  # noqa: PLR0124


@jit
def where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


@jit
def log(x: Any) -> Any:
    return np.log(float(x))


@jit
def log1p(x: Any) -> Any:
    return np.log1p(float(x))


@jit
def sqrt(x: Any) -> Any:
    return np.sqrt(float(x))


@jit
def absolute(x: Any) -> Any:
    return abs(x)


@jit
def ones(x: Any) -> Any:
    return 1.0


def values(x: Any, m: Any, top: Any, mine: Any, row: Any, out: Any) -> None:
    """What a rule says of each score. ``Mine`` and ``rule`` are bound stage by stage."""
    me = Mine(*mine)  # type: ignore[name-defined]  # noqa: F821
    for i in range(m):
        out[i] = rule(me, x[i] - top, row)  # type: ignore[name-defined]  # noqa: F821


def each(numbers: Any, row: Any, x: Any, m: Any, top: Any, out: Any) -> None:
    """The same by addresses, see ``entries``. COUNT, how many numbers there are, is bound too."""
    me = Mine(*to_fixed_tuple(carray(doubles_at(numbers), COUNT), COUNT))  # type: ignore[name-defined]  # noqa: F821
    whole = Row(*to_fixed_tuple(carray(doubles_at(row), FIELDS), FIELDS))
    given, said = carray(doubles_at(x), m), carray(doubles_at(out), m)
    for i in range(m):
        said[i] = rule(me, given[i] - top, whole)  # type: ignore[name-defined]  # noqa: F821


def once(numbers: Any, row: Any, x: Any, m: Any, top: Any, out: Any) -> None:
    """What a rule says of a row."""
    me = Mine(*to_fixed_tuple(carray(doubles_at(numbers), COUNT), COUNT))  # type: ignore[name-defined]  # noqa: F821
    whole = Row(*to_fixed_tuple(carray(doubles_at(row), FIELDS), FIELDS))
    carray(doubles_at(out), 1)[0] = rule(me, whole)  # type: ignore[name-defined]  # noqa: F821


def drawn(numbers: Any, noise: Any, x: Any, m: Any, top: Any, out: Any) -> None:
    """What a draw says of each score and its random number."""
    me = Mine(*to_fixed_tuple(carray(doubles_at(numbers), COUNT), COUNT))  # type: ignore[name-defined]  # noqa: F821
    given, u, said = carray(doubles_at(x), m), carray(doubles_at(noise), m), carray(doubles_at(out), m)
    for i in range(m):
        said[i] = rule(me, given[i] - top, u[i])  # type: ignore[name-defined]  # noqa: F821


def edits(x: Any, ids: Any, prompt: Any, output: Any, said: Any, mine: Any) -> None:
    """What a Shift makes of the scores of tokens that occurred; with ``said``, of those in the output only."""
    me = Mine(*mine)  # type: ignore[name-defined]  # noqa: F821
    for i in range(x.size):
        if x[i] > -np.inf and (output[i] > 0 or not said):
            x[i] = rule(me, x[i], Token(ids[i], prompt[i], output[i], 0.0))  # type: ignore[name-defined]  # noqa: F821


__all__ = [
    "absolute",
    "drawn",
    "each",
    "edits",
    "exp",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "once",
    "ones",
    "sqrt",
    "values",
    "where",
]
