"""What the names in rules mean to the compiler, for one number at a time, and rules as loops over many."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import exp
from nucleate.core.stage import Token


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


def edits(x: Any, ids: Any, prompt: Any, output: Any, said: Any, mine: Any) -> None:
    """What a Shift makes of the scores of tokens that occurred; with ``said``, of those in the output only."""
    me = Mine(*mine)  # type: ignore[name-defined]  # noqa: F821
    for i in range(x.size):
        if x[i] > -np.inf and (output[i] > 0 or not said):
            x[i] = rule(me, x[i], Token(ids[i], prompt[i], output[i], 0.0))  # type: ignore[name-defined]  # noqa: F821


__all__ = ["absolute", "edits", "exp", "log", "log1p", "maximum", "minimum", "ones", "sqrt", "values", "where"]
