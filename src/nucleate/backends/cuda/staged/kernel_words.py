"""The names of maths for kernels, in float64. Each is a function of its own, so that the interpreter finds it."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit


@jit
def exp(x: tl.tensor) -> Any:
    return tl.exp(x)


@jit
def log(x: tl.tensor) -> Any:
    return tl.log(x)


@jit
def log1p(x: tl.tensor) -> Any:
    """After Kahan (1984): what rounding takes from 1 + x it takes from both parts of the quotient."""
    whole = 1.0 + x
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))


@jit
def sqrt(x: tl.tensor) -> Any:
    return tl.sqrt(x)


@jit
def absolute(x: tl.tensor) -> Any:
    return tl.abs(x)


@jit
def minimum(a: tl.tensor, b: tl.tensor) -> Any:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def maximum(a: tl.tensor, b: tl.tensor) -> Any:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def where(condition: tl.tensor, a: tl.tensor, b: tl.tensor) -> Any:
    return tl.where(condition != 0, a, b)


@jit
def ones(x: tl.tensor) -> Any:
    return tl.where(x == x, 1.0, 1.0).to(tl.float64)  # noqa: PLR0124  # as many


WORDS: dict[str, Any] = {
    "absolute": absolute,
    "exp": exp,
    "log": log,
    "log1p": log1p,
    "maximum": maximum,
    "minimum": minimum,
    "ones": ones,
    "sqrt": sqrt,
    "where": where,
}
