"""Operations on blocks of 256 scores, written as explicit LLVM vectors.

Each function takes the address of float32 scores.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types

from nucleate.sampling.backends.numba import vector_lanes
from nucleate.sampling.backends.numba.float64 import LEAST, LOG2_E, LOG2_E_REST

GROUP, WORD = vector_lanes.GROUP, 64

_F, _D, _I = types.float32, types.float64, types.int64


@vector_lanes.vectors(_F, _I)
def top(b: Any, address: Any) -> Any:
    """The highest of 256 scores; NaN if one of them is."""

    def higher(one: Any, other: Any) -> Any:
        return b.select(b.fcmp_ordered(">", one, other), one, other)

    scores = vector_lanes.loaded(b, address)
    best = list(scores[:4])  # four at a time, so that none waits for another
    for i, score in enumerate(scores[4:]):
        best[i % 4] = higher(score, best[i % 4])
    wrong = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]  # one of two is NaN
    any_wrong = b.bitcast(functools.reduce(b.or_, wrong), vector_lanes.BITS)
    is_wrong = b.icmp_unsigned("!=", any_wrong, ir.Constant(vector_lanes.BITS, 0))
    return b.select(is_wrong, ir.Constant(vector_lanes.FLOAT, float("nan")), vector_lanes.fold(b, best, higher))


@vector_lanes.vectors(_F, _I, _F, _F, _F, _F, _F)
def mass_above(b: Any, address: Any, *numbers: Any) -> Any:
    """The sum of exp((x - best) / t) of those of 256 scores at or above a cut. numbers: best, high, low, least, cut;
    high + low = log2(e) / t, least = -126 / high."""
    best, high, low, least, cut = (vector_lanes.spread(b, number) for number in numbers)

    def step(sums: Any, scores: Any) -> Any:
        weights = [vector_lanes.exp(b, b.fsub(score, best), high, low, least) for score in scores]
        inside = [b.fcmp_ordered(">=", score, cut) for score in scores]
        parts = (b.select(*both, vector_lanes.every(0.0)) for both in zip(inside, weights, strict=True))
        return [b.fadd(*both) for both in zip(sums, parts, strict=True)]

    return vector_lanes.fold(b, vector_lanes.each(b, address, [vector_lanes.every(0.0)] * 4, step), b.fadd)


@vector_lanes.vectors(types.void, _I, _F, _F, _F, _F, _I, _I)
def masses_above(b: Any, address: Any, *given: Any) -> None:
    """Add to each of eight sums the weights of those of 256 scores that are at or above each of eight cuts.

    given: as of ``mass_above``, and in place of one cut the addresses of cuts and sums.
    """
    best, high, low, least = (vector_lanes.spread(b, number) for number in given[:4])
    first = b.inttoptr(given[4], vector_lanes.FLOAT.as_pointer())
    cuts = [vector_lanes.spread(b, b.load(b.gep(first, [ir.Constant(vector_lanes.INT, i)]))) for i in range(8)]

    def step(sums: Any, scores: Any) -> Any:
        inside = list(sums)
        for score in scores:
            weight = vector_lanes.exp(b, b.fsub(score, best), high, low, least)
            for i, cut in enumerate(cuts):
                part = b.select(b.fcmp_ordered(">=", score, cut), weight, vector_lanes.every(0.0))
                inside[i] = b.fadd(inside[i], part)
        return inside

    for i, vector in enumerate(vector_lanes.each(b, address, [vector_lanes.every(0.0)] * 8, step)):
        vector_lanes.add_to(b, given[5], i, b.fpext(vector_lanes.fold(b, [vector], b.fadd), vector_lanes.DOUBLE))


@vector_lanes.vectors(types.void, _I, _F, _I)
def moments(b: Any, address: Any, top: Any, sums: Any) -> None:
    """Add the number of 256 scores that are in, the sum of their x - top, and of its square, to three float64."""
    one, zero = vector_lanes.every(1.0, vector_lanes.DOUBLES), vector_lanes.every(0.0, vector_lanes.DOUBLES)
    top = vector_lanes.spread(b, b.fpext(top, vector_lanes.DOUBLE))

    def step(parts: Any, scores: Any) -> Any:
        for score in scores:
            inside = b.fcmp_ordered(">", score, vector_lanes.every(float("-inf")))
            below = b.select(inside, b.fsub(b.fpext(score, vector_lanes.DOUBLES), top), zero)
            terms = b.select(inside, one, zero), below, b.fmul(below, below)
            parts = [b.fadd(*both) for both in zip(parts, terms, strict=True)]
        return parts

    for i, part in enumerate(vector_lanes.each(b, address, [zero] * 3, step)):
        vector_lanes.add_to(b, sums, i, vector_lanes.fold(b, [part], b.fadd))


@vector_lanes.vectors(_D, _I, _D, _D, _I)
def weigh(b: Any, address: Any, top: Any, slope: Any, share: Any) -> Any:
    """The sum of e = exp(d) over 256 scores, d = (x - top) * slope, in float64; adds that of e * d to one number."""
    top, slope, zero = (
        vector_lanes.spread(b, top),
        vector_lanes.spread(b, slope),
        vector_lanes.every(0.0, vector_lanes.DOUBLES),
    )
    high, low, least = (vector_lanes.every(number, vector_lanes.DOUBLES) for number in (LOG2_E, LOG2_E_REST, LEAST))

    def step(sums: Any, scores: Any) -> Any:
        masses, shares = list(sums[:4]), list(sums[4:])
        for i, score in enumerate(scores):
            below = b.fmul(b.fsub(b.fpext(score, vector_lanes.DOUBLES), top), slope)
            below = b.select(b.fcmp_ordered(">", below, least), below, least)
            e = vector_lanes.exp(b, below, high, low, least)
            masses[i], shares[i] = b.fadd(masses[i], e), vector_lanes.fma(b, e, below, shares[i])
        return masses + shares

    sums = vector_lanes.each(b, address, [zero] * 8, step)
    vector_lanes.add_to(b, share, 0, vector_lanes.fold(b, sums[4:], b.fadd))
    return vector_lanes.fold(b, sums[:4], b.fadd)


@vector_lanes.vectors(_I, _I, _F)
def word_at_least(b: Any, address: Any, cut: Any) -> Any:
    """Which of 64 scores are at or above a cut, as bits."""
    cut, bits = vector_lanes.spread(b, cut), vector_lanes.LONG(0)
    for i, scores in enumerate(vector_lanes.loaded(b, address, WORD)):
        found = b.zext(b.bitcast(b.fcmp_ordered(">=", scores, cut), vector_lanes.BITS), vector_lanes.LONG)
        bits = b.or_(bits, b.shl(found, vector_lanes.LONG(i * vector_lanes.LANES)))
    return bits


@vector_lanes.vectors(_I, _I)
def ones(b: Any, bits: Any) -> Any:
    """How many of 64 bits are set."""
    return b.ctpop(bits)


@vector_lanes.vectors(_I, _I)
def lowest_one(b: Any, bits: Any) -> Any:
    """The place of the lowest of 64 bits that is set; 64 if none is."""
    return b.cttz(bits, ir.Constant(ir.IntType(1), 0))


@vector_lanes.vectors(_F, types.uint16)
def half(b: Any, bits: Any) -> Any:
    """The float16 of some bits."""
    return b.fpext(b.bitcast(bits, ir.HalfType()), vector_lanes.FLOAT)
