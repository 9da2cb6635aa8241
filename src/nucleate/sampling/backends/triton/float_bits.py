"""Floats in kernels: order-preserving integers, weights in fixed point."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling import maths

INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32."""
SLACK = tl.constexpr(maths.SLACK)
LOG2_E = tl.constexpr(1.4426950408889634)
MASS_ERROR = tl.constexpr(2.0**-18)
"""Upper bound on the relative error of the float32 mass of a group; derived in docs/decisions/0017-cuda.md."""


class ExponentPair(NamedTuple):
    """log2(e) / t as a sum of two float32 numbers, to compute exp((x - top) / t) with exp2."""

    high: Any  #: positive, so that -inf * high is -inf; likewise low
    low: Any


@jit
def make_exponent(t):
    """The ExponentPair of a temperature. t: float64."""
    c = (t * 0.0 + LOG2_E) / t
    high = c.to(tl.float32)
    high = tl.where(high.to(tl.float64) > c, from_ordered(to_ordered(high) - 1), high)
    return ExponentPair(high, tl.maximum((c - high.to(tl.float64)).to(tl.float32), 1e-30))


@jit
def weights(below, exponent):
    """The weights of scores in float32, with a relative error of 2e-7. below: x - top; NaN stays."""
    return tl.exp2(below * exponent.high + below * exponent.low)


@jit
def exact_weight(x, top, t):
    """The weight exp((x - top) / t) in float64."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / t)


@jit
def fixed_weight(x, top, t, unit):
    """Weights in fixed point, int64, so that sums are exact. unit: the value of the weight 1, float64."""
    return (exact_weight(x, top, t) * unit + 0.5).to(tl.int64)


@jit
def to_ordered(x):
    """Map float32 to int64, preserving the order; -0.0 is directly below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def from_ordered(key):
    """The inverse of ``ordered``."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def lowest_kept(top, t, below):
    """The lowest finite float32 x with (x - top) / t >= below, in float64. below: negative."""
    low, high = to_ordered(top * 0.0 + LOWEST), to_ordered(top)
    while low < high:
        middle = (low + high) >> 1
        reaches = (from_ordered(middle).to(tl.float64) - top.to(tl.float64)) / t >= below
        high = tl.where(reaches, middle, high)
        low = tl.where(reaches, low, middle + 1)
    return from_ordered(high)
