"""Operations on blocks of 256 scores, written as explicit LLVM vectors.

Each function takes the address of float32 scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nucleate.sampling.backends.numba import vector_lanes

GROUP_SIZE, WORD_BITS = vector_lanes.GROUP_SIZE, 64
MIN_EXPONENT = -1010.0
"""Lower exponents of 2 are clamped to this."""

_F, _D, _I = types.float32, types.float64, types.int64


@vector_lanes.vector_function(_F, _I)
def maximum(b: Any, address: Any) -> Any:
    """The maximum of 256 scores; NaN if one of them is NaN."""

    def larger(first: Any, second: Any) -> Any:
        return b.select(b.fcmp_ordered(">", first, second), first, second)

    scores = vector_lanes.load(b, address)
    maxima = list(scores[:4])  # four independent chains
    for i, score in enumerate(scores[4:]):
        maxima[i % 4] = larger(score, maxima[i % 4])
    nan_masks = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]
    any_nan = b.bitcast(functools.reduce(b.or_, nan_masks), vector_lanes.LANE_MASK)
    has_nan = b.icmp_unsigned("!=", any_nan, ir.Constant(vector_lanes.LANE_MASK, 0))
    return b.select(has_nan, ir.Constant(vector_lanes.FLOAT, float("nan")), vector_lanes.reduce(b, maxima, larger))


@vector_lanes.vector_function(_F, _I, _F, _F, _F, _F, _F)
def mass_above(b: Any, address: Any, *arguments: Any) -> Any:
    """The sum of exp((x - max) / t) over those of 256 scores that are at or above a threshold.

    arguments: max_score, high, low, least, threshold; high + low = log2(e) / t, least = -126 / high.
    """
    max_score, high, low, least, threshold = (vector_lanes.broadcast(b, argument) for argument in arguments)

    def step(sums: Any, scores: Any) -> Any:
        weights = [vector_lanes.exp(b, b.fsub(score, max_score), high, low, least) for score in scores]
        at_least = [b.fcmp_ordered(">=", score, threshold) for score in scores]
        parts = (b.select(*both, vector_lanes.constant(0.0)) for both in zip(at_least, weights, strict=True))
        return [b.fadd(*both) for both in zip(sums, parts, strict=True)]

    return vector_lanes.reduce(b, vector_lanes.accumulate(b, address, [vector_lanes.constant(0.0)] * 4, step), b.fadd)


@vector_lanes.vector_function(types.void, _I, _F, _F, _F, _F, _I, _I)
def masses_above(b: Any, address: Any, *arguments: Any) -> None:
    """``mass_above`` for eight thresholds; adds the results to eight float64 sums.

    arguments: as for ``mass_above``, with the addresses of thresholds and sums in place of one threshold.
    """
    max_score, high, low, least = (vector_lanes.broadcast(b, argument) for argument in arguments[:4])
    first = b.inttoptr(arguments[4], vector_lanes.FLOAT.as_pointer())
    thresholds = [vector_lanes.broadcast(b, b.load(b.gep(first, [ir.Constant(vector_lanes.INT, i)]))) for i in range(8)]

    def step(sums: Any, scores: Any) -> Any:
        totals = list(sums)
        for score in scores:
            weight = vector_lanes.exp(b, b.fsub(score, max_score), high, low, least)
            for i, threshold in enumerate(thresholds):
                part = b.select(b.fcmp_ordered(">=", score, threshold), weight, vector_lanes.constant(0.0))
                totals[i] = b.fadd(totals[i], part)
        return totals

    for i, vector in enumerate(vector_lanes.accumulate(b, address, [vector_lanes.constant(0.0)] * 8, step)):
        vector_lanes.add_at(b, arguments[5], i, b.fpext(vector_lanes.reduce(b, [vector], b.fadd), vector_lanes.DOUBLE))


@vector_lanes.vector_function(types.void, _I, _F, _I)
def moments(b: Any, address: Any, top: Any, sums: Any) -> None:
    """Add the number of finite scores of 256, the sum of x - top, and the sum of its square, to three float64."""
    one, zero = vector_lanes.constant(1.0, vector_lanes.DOUBLES), vector_lanes.constant(0.0, vector_lanes.DOUBLES)
    top = vector_lanes.broadcast(b, b.fpext(top, vector_lanes.DOUBLE))

    def step(parts: Any, scores: Any) -> Any:
        for score in scores:
            is_finite = b.fcmp_ordered(">", score, vector_lanes.constant(float("-inf")))
            relative = b.select(is_finite, b.fsub(b.fpext(score, vector_lanes.DOUBLES), top), zero)
            terms = b.select(is_finite, one, zero), relative, b.fmul(relative, relative)
            parts = [b.fadd(*both) for both in zip(parts, terms, strict=True)]
        return parts

    for i, part in enumerate(vector_lanes.accumulate(b, address, [zero] * 3, step)):
        vector_lanes.add_at(b, sums, i, vector_lanes.reduce(b, [part], b.fadd))


@vector_lanes.vector_function(_D, _I, _D, _D, _I)
def mass_sums(b: Any, address: Any, top: Any, slope: Any, sums: Any) -> Any:
    """The float64 sum of e = 2 ** d over 256 scores, d = (x - top) * slope; adds those of e * d, e * e to ``sums``."""
    slope = vector_lanes.broadcast(b, slope)
    return _mass_sums(b, address, top, lambda z: b.fmul(z, slope), sums)


@vector_lanes.vector_function(_D, _I, _D, _D, _D, _D, _I)
def curved_mass_sums(b: Any, address: Any, top: Any, *arguments: Any) -> Any:
    """The same with d = c1 * z + c2 * z**2 + c3 * z**3, z = x - top. arguments: c1, c2, c3, and the address."""
    c1, c2, c3 = (vector_lanes.broadcast(b, factor) for factor in arguments[:3])

    def curve(z: Any) -> Any:
        return b.fmul(vector_lanes.fma(b, vector_lanes.fma(b, c3, z, c2), z, c1), z)

    return _mass_sums(b, address, top, curve, arguments[3])


def _mass_sums(b: Any, address: Any, top: Any, curve: Callable[[Any], Any], sums: Any) -> Any:
    """Emit ``mass_sums`` with d = curve(x - top); a NaN counts as the lowest score."""
    top = vector_lanes.broadcast(b, top)
    zero, least = (vector_lanes.constant(number, vector_lanes.DOUBLES) for number in (0.0, MIN_EXPONENT))

    def step(totals: Any, scores: Any) -> Any:
        masses, weighted, squares = (list(totals[i : i + 2]) for i in (0, 2, 4))
        for i, score in enumerate(scores):
            d = curve(b.fsub(b.fpext(score, vector_lanes.DOUBLES), top))
            d = b.select(b.fcmp_ordered(">", d, least), d, least)
            e = vector_lanes.exp2(b, d)
            masses[i] = b.fadd(masses[i], e)
            weighted[i], squares[i] = vector_lanes.fma(b, e, d, weighted[i]), vector_lanes.fma(b, e, e, squares[i])
        return masses + weighted + squares

    totals = vector_lanes.accumulate(b, address, [zero] * 6, step, vectors=2)
    for i in (1, 2):
        vector_lanes.add_at(b, sums, i - 1, vector_lanes.reduce(b, totals[2 * i : 2 * i + 2], b.fadd))
    return vector_lanes.reduce(b, totals[:2], b.fadd)


@vector_lanes.vector_function(types.void, _I, *(_D,) * 7, _I, _I)
def distance_bins(b: Any, address: Any, *arguments: Any) -> None:
    """Of 256 scores, store abs(d - centre) * scale as uint16, and (factor + slant * d) * 2 ** d as float64.

    arguments: top, slope, centre, scale, the last bin, factor, slant; and the addresses of both. d = (x - top) * slope.
    """
    top, slope, centre, scale, last, factor, slant = (vector_lanes.broadcast(b, one) for one in arguments[:7])
    least = vector_lanes.constant(MIN_EXPONENT, vector_lanes.DOUBLES)
    words = ir.VectorType(ir.IntType(16), vector_lanes.LANES)
    bins, weights = (
        b.inttoptr(one, kind.as_pointer())
        for one, kind in zip(arguments[7:], (words, vector_lanes.DOUBLES), strict=True)
    )
    end = vector_lanes.LONG(GROUP_SIZE // vector_lanes.LANES)
    with cgutils.for_range(b, end) as loop:
        offset = b.mul(loop.index, vector_lanes.LONG(4 * vector_lanes.LANES))
        [score] = vector_lanes.load(b, b.add(address, offset), vector_lanes.LANES)
        d = b.fmul(b.fsub(b.fpext(score, vector_lanes.DOUBLES), top), slope)
        d = b.select(b.fcmp_ordered(">", d, least), d, least)
        far = b.fsub(d, centre)
        far = b.fmul(b.select(b.fcmp_ordered("<", far, vector_lanes.constant(0.0, far.type)), b.fneg(far), far), scale)
        far = b.select(b.fcmp_ordered("<", far, last), far, last)
        weight = b.fmul(vector_lanes.exp2(b, d), vector_lanes.fma(b, d, slant, factor))
        for value, place in ((b.trunc(b.fptosi(far, vector_lanes.INTS), words), bins), (weight, weights)):
            b.store(value, b.gep(place, [loop.index])).align = 2 if place is bins else 8


@vector_lanes.vector_function(_I, _I, _F)
def bitmask_at_least(b: Any, address: Any, threshold: Any) -> Any:
    """A bitmask of which of 64 scores are at or above a threshold."""
    threshold, bits = vector_lanes.broadcast(b, threshold), vector_lanes.LONG(0)
    for i, scores in enumerate(vector_lanes.load(b, address, WORD_BITS)):
        found = b.zext(b.bitcast(b.fcmp_ordered(">=", scores, threshold), vector_lanes.LANE_MASK), vector_lanes.LONG)
        bits = b.or_(bits, b.shl(found, vector_lanes.LONG(i * vector_lanes.LANES)))
    return bits


@vector_lanes.vector_function(_I, _I, types.uint16, types.uint16)
def bitmask_in_bins(b: Any, address: Any, first: Any, count: Any) -> Any:
    """A bitmask of which of 64 uint16 are in first..first + count - 1."""
    words, bits = ir.VectorType(ir.IntType(16), vector_lanes.LANES), vector_lanes.LONG(0)
    first, count = vector_lanes.broadcast(b, first), vector_lanes.broadcast(b, count)
    start = b.inttoptr(address, words.as_pointer())
    for i in range(WORD_BITS // vector_lanes.LANES):
        bins = b.load(b.gep(start, [vector_lanes.INT(i)]))
        bins.align = 2
        found = b.bitcast(b.icmp_unsigned("<", b.sub(bins, first), count), vector_lanes.LANE_MASK)
        bits = b.or_(bits, b.shl(b.zext(found, vector_lanes.LONG), vector_lanes.LONG(i * vector_lanes.LANES)))
    return bits


@vector_lanes.vector_function(_I, _I)
def popcount(b: Any, bits: Any) -> Any:
    """The number of bits set."""
    return b.ctpop(bits)


@vector_lanes.vector_function(_I, _I)
def trailing_zeros(b: Any, bits: Any) -> Any:
    """The index of the lowest bit set; 64 if there is none."""
    return b.cttz(bits, ir.Constant(ir.IntType(1), 0))


@vector_lanes.vector_function(_F, types.uint16)
def float16_to_float32(b: Any, bits: Any) -> Any:
    """Convert the bits of a float16."""
    return b.fpext(b.bitcast(bits, ir.HalfType()), vector_lanes.FLOAT)
