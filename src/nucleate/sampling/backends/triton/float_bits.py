"""Floats in kernels: order-preserving integers, weights in fixed point."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling import maths

INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""What is at or above it is in: -inf is not."""
SLACK = tl.constexpr(maths.SLACK)
LOG2_E = tl.constexpr(1.4426950408889634)
ERROR = tl.constexpr(2.0**-18)
"""No float32 mass of a group is off by a larger part of itself; docs/decisions/0017-cuda.md derives it."""


class ExponentPair(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t), in float32."""

    high: Any  #: high + low is log2(e) / t; both are above 0, so that -inf times them is
    low: Any


@jit
def exponent_of(t):
    """t: float64."""
    c = (t * 0.0 + LOG2_E) / t
    high = c.to(tl.float32)
    high = tl.where(high.to(tl.float64) > c, floating(ordered(high) - 1), high)
    return ExponentPair(high, tl.maximum((c - high.to(tl.float64)).to(tl.float32), 1e-30))


@jit
def weights(below, exponent):
    """float32, to 2e-7 of themselves. below: scores from the top; NaN stays."""
    return tl.exp2(below * exponent.high + below * exponent.low)


@jit
def exact(x, top, t):
    """The same in float64."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / t)


@jit
def fixed(x, top, t, unit):
    """Weights as int64, in fixed point: sums of them are exact. unit: what 1 becomes, float64."""
    return (exact(x, top, t) * unit + 0.5).to(tl.int64)


@jit
def ordered(x):
    """A float32 as an int64 that is ordered as it is; -0.0 is right below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def floating(place):
    """The inverse of ``ordered``."""
    bits = place.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def lowest(top, t, below):
    """The lowest finite float32 x with (x - top) / t >= below, in float64. below: negative."""
    low, high = ordered(top * 0.0 + LOWEST), ordered(top)
    while low < high:
        middle = (low + high) >> 1
        inside = (floating(middle).to(tl.float64) - top.to(tl.float64)) / t >= below
        high = tl.where(inside, middle, high)
        low = tl.where(inside, low, middle + 1)
    return floating(high)
