"""256 scores at a time, in explicit vectors of LLVM: what Numba's own loops do not reach. Knows no sampling.

Each function takes the address of float32 scores.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types

from nucleate.backends.cpu import lanes
from nucleate.backends.cpu.doubles import LEAST, LOG2_E, LOG2_E_REST

GROUP, WORD = lanes.GROUP, 64

_F, _D, _I = types.float32, types.float64, types.int64


@lanes.vectors(_F, _I)
def top(b: Any, address: Any) -> Any:
    """The highest of 256 scores; NaN if one of them is."""

    def higher(one: Any, other: Any) -> Any:
        return b.select(b.fcmp_ordered(">", one, other), one, other)

    scores = lanes.loaded(b, address)
    best = list(scores[:4])  # four at a time, so that none waits for another
    for i, score in enumerate(scores[4:]):
        best[i % 4] = higher(score, best[i % 4])
    wrong = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]  # one of two is NaN
    any_wrong = b.bitcast(functools.reduce(b.or_, wrong), lanes.BITS)
    is_wrong = b.icmp_unsigned("!=", any_wrong, ir.Constant(lanes.BITS, 0))
    return b.select(is_wrong, ir.Constant(lanes.FLOAT, float("nan")), lanes.fold(b, best, higher))


@lanes.vectors(_F, _I, _F, _F, _F, _F, _F)
def mass_above(b: Any, address: Any, *numbers: Any) -> Any:
    """The sum of exp((x - best) / t) of those of 256 scores at or above a cut. numbers: best, high, low, least, cut;
    high + low = log2(e) / t, least = -126 / high."""
    best, high, low, least, cut = (lanes.spread(b, number) for number in numbers)

    def step(sums: Any, scores: Any) -> Any:
        weights = [lanes.exp(b, b.fsub(score, best), high, low, least) for score in scores]
        inside = [b.fcmp_ordered(">=", score, cut) for score in scores]
        parts = (b.select(*both, lanes.every(0.0)) for both in zip(inside, weights, strict=True))
        return [b.fadd(*both) for both in zip(sums, parts, strict=True)]

    return lanes.fold(b, lanes.each(b, address, [lanes.every(0.0)] * 4, step), b.fadd)


@lanes.vectors(types.void, _I, _F, _F, _F, _F, _I, _I)
def masses_above(b: Any, address: Any, *given: Any) -> None:
    """Add to each of eight sums the weights of those of 256 scores that are at or above each of eight cuts.

    given: as of ``mass_above``, and in place of one cut the addresses of cuts and sums.
    """
    best, high, low, least = (lanes.spread(b, number) for number in given[:4])
    first = b.inttoptr(given[4], lanes.FLOAT.as_pointer())
    cuts = [lanes.spread(b, b.load(b.gep(first, [ir.Constant(lanes.INT, i)]))) for i in range(8)]

    def step(sums: Any, scores: Any) -> Any:
        inside = list(sums)
        for score in scores:
            weight = lanes.exp(b, b.fsub(score, best), high, low, least)
            for i, cut in enumerate(cuts):
                part = b.select(b.fcmp_ordered(">=", score, cut), weight, lanes.every(0.0))
                inside[i] = b.fadd(inside[i], part)
        return inside

    for i, vector in enumerate(lanes.each(b, address, [lanes.every(0.0)] * 8, step)):
        lanes.add_to(b, given[5], i, b.fpext(lanes.fold(b, [vector], b.fadd), lanes.DOUBLE))


@lanes.vectors(types.void, _I, _F, _I)
def moments(b: Any, address: Any, top: Any, sums: Any) -> None:
    """Add the number of 256 scores that are in, the sum of their x - top, and of its square, to three float64."""
    one, zero = lanes.every(1.0, lanes.DOUBLES), lanes.every(0.0, lanes.DOUBLES)
    top = lanes.spread(b, b.fpext(top, lanes.DOUBLE))

    def step(parts: Any, scores: Any) -> Any:
        for score in scores:
            inside = b.fcmp_ordered(">", score, lanes.every(float("-inf")))
            below = b.select(inside, b.fsub(b.fpext(score, lanes.DOUBLES), top), zero)
            terms = b.select(inside, one, zero), below, b.fmul(below, below)
            parts = [b.fadd(*both) for both in zip(parts, terms, strict=True)]
        return parts

    for i, part in enumerate(lanes.each(b, address, [zero] * 3, step)):
        lanes.add_to(b, sums, i, lanes.fold(b, [part], b.fadd))


@lanes.vectors(_D, _I, _D, _D, _I)
def weigh(b: Any, address: Any, top: Any, slope: Any, share: Any) -> Any:
    """The sum of e = exp(d) over 256 scores, d = (x - top) * slope, in float64; adds that of e * d to one number."""
    top, slope, zero = lanes.spread(b, top), lanes.spread(b, slope), lanes.every(0.0, lanes.DOUBLES)
    high, low, least = (lanes.every(number, lanes.DOUBLES) for number in (LOG2_E, LOG2_E_REST, LEAST))

    def step(sums: Any, scores: Any) -> Any:
        masses, shares = list(sums[:4]), list(sums[4:])
        for i, score in enumerate(scores):
            below = b.fmul(b.fsub(b.fpext(score, lanes.DOUBLES), top), slope)
            below = b.select(b.fcmp_ordered(">", below, least), below, least)
            e = lanes.exp(b, below, high, low, least)
            masses[i], shares[i] = b.fadd(masses[i], e), lanes.fma(b, e, below, shares[i])
        return masses + shares

    sums = lanes.each(b, address, [zero] * 8, step)
    lanes.add_to(b, share, 0, lanes.fold(b, sums[4:], b.fadd))
    return lanes.fold(b, sums[:4], b.fadd)


@lanes.vectors(_I, _I, _F)
def word_at_least(b: Any, address: Any, cut: Any) -> Any:
    """Which of 64 scores are at or above a cut, as bits."""
    cut, bits = lanes.spread(b, cut), lanes.LONG(0)
    for i, scores in enumerate(lanes.loaded(b, address, WORD)):
        found = b.zext(b.bitcast(b.fcmp_ordered(">=", scores, cut), lanes.BITS), lanes.LONG)
        bits = b.or_(bits, b.shl(found, lanes.LONG(i * lanes.LANES)))
    return bits


@lanes.vectors(_I, _I)
def ones(b: Any, bits: Any) -> Any:
    """How many of 64 bits are set."""
    return b.ctpop(bits)


@lanes.vectors(_I, _I)
def lowest_one(b: Any, bits: Any) -> Any:
    """The place of the lowest of 64 bits that is set; 64 if none is."""
    return b.cttz(bits, ir.Constant(ir.IntType(1), 0))


@lanes.vectors(_F, types.uint16)
def half(b: Any, bits: Any) -> Any:
    """The float16 of some bits."""
    return b.fpext(b.bitcast(bits, ir.HalfType()), lanes.FLOAT)
