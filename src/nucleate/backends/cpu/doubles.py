"""Numbers in float64: their bits, their exponential, and which of many lie in a range. Knows no sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from nucleate.backends.cpu.compile import intrinsic, jit

BLOCK = 16

ROUND = 1.5 * 2.0**52
"""Added to a number below 2**51, it leaves the nearest integer in the low bits of the float64."""
LOG2_E, LN_2, LN_2_REST = 1.4426950408889634, 0.693147180369123816490, 1.90821492927058770002e-10
POWERS = tuple(1.0 / math.factorial(n) for n in range(12))
C0, C1, C2, C3, C4, C5, C6, C7, C8, C9, C10, C11 = POWERS


def loose(function: Callable[..., Any]) -> Any:
    """Compile a loop whose sums may be taken in any order: that is what makes vectors of them."""
    return numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})(function)


def fused(function: Callable[..., Any]) -> Any:
    """Compile a function whose products and sums may be rounded once."""
    return numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)


@intrinsic
def bits(typing: Any, x: Any) -> Any:
    """The bits of a float64 as an integer."""
    return types.int64(types.float64), lambda _, b, __, given: b.bitcast(given[0], ir.IntType(64))


@intrinsic
def number(typing: Any, image: Any) -> Any:
    """The float64 of some bits."""
    return types.float64(types.int64), lambda _, b, __, given: b.bitcast(given[0], ir.DoubleType())


@intrinsic
def inside(typing: Any, array: Any, start: Any, sign: Any, shift: Any, scale: Any, low: Any, high: Any) -> Any:
    """Which of 16 numbers are from low to below high (NaN: any), taken as (sign * number - shift) * scale: as bits."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        wide, count = ir.VectorType(ir.DoubleType(), BLOCK), ir.IntType(BLOCK)
        none = ir.Constant(wide, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
        sign, shift, scale, low, high = (
            b.shuffle_vector(b.insert_element(none, one, ir.Constant(ir.IntType(32), 0)), none, zeros)
            for one in given[2:]
        )
        data = context.make_array(signature.args[0])(context, b, given[0]).data
        numbers = b.load(b.bitcast(b.gep(data, [given[1]]), wide.as_pointer()))
        numbers.align = 8
        numbers = b.fmul(b.fsub(b.fmul(numbers, sign), shift), scale)
        found = b.and_(b.fcmp_ordered(">=", numbers, low), b.fcmp_unordered("<", numbers, high))
        return b.zext(b.bitcast(found, count), ir.IntType(32))

    return types.int32(array, types.intp, *[types.float64] * 5), make


@jit
def power_of_two(n: Any) -> Any:
    return number((bits(n + (ROUND + 1023.0))) << np.int64(52))


@fused
def exp(x: Any) -> Any:
    """With a relative error below 1e-14, and in vectors where a loop calls it: the series on -0.35..0.35."""
    x = float(x)
    x = max(x, -746.0)
    x = min(x, 710.0)
    whole = (x * LOG2_E + ROUND) - ROUND
    r = (x - whole * LN_2) - whole * LN_2_REST
    p = C11 * r + C10
    p = p * r + C9
    p = p * r + C8
    p = p * r + C7
    p = p * r + C6
    p = p * r + C5
    p = p * r + C4
    p = p * r + C3
    p = p * r + C2
    p = p * r + C1
    p = p * r + C0
    half = (whole * 0.5 + ROUND) - ROUND  # in two steps, so that the last powers before 0 and infinity are right
    return p * power_of_two(half) * power_of_two(whole - half)


@jit
def bits_of(x: Any, start: Any, m: Any, sign: Any, shift: Any, low: Any, high: Any) -> Any:
    """``inside`` of the next 16 of m numbers, or of as many as there are."""
    if start + BLOCK <= m:
        return inside(x, start, sign, shift, 1.0, low, high)
    found = np.int32(0)
    for i in range(start, m):
        one = sign * x[i] - shift
        found |= np.int32(one >= low and not one >= high) << np.int32(i - start)
    return found
