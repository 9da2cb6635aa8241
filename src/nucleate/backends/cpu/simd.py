"""256 scores at a time, in explicit vectors of LLVM: what Numba's own loops do not reach. Knows no sampling.

Each function takes scores and the place of the first of them, a multiple of 16. Scores are a float32 array padded to
whole groups, the address of some, or ``Scores``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from nucleate.backends.cpu import lanes
from nucleate.backends.cpu.compile import intrinsic

GROUP, LANES = lanes.GROUP, lanes.LANES


class Scores(NamedTuple):
    """A row as it lies in memory."""

    x: Any  #: float32 [V]
    tail: Any  #: float32 [256]: what is left after the last whole group, padded with -inf


@intrinsic
def top(typing: Any, scores: Any, start: Any) -> Any:
    """The highest of 256 scores; NaN if one of them is."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        def higher(one: Any, other: Any) -> Any:
            return b.select(b.fcmp_ordered(">", one, other), one, other)

        scores = lanes.loaded(context, b, signature.args[0], *given)
        best = list(scores[:4])  # four at a time, so that none waits for another
        for i, score in enumerate(scores[4:]):
            best[i % 4] = higher(score, best[i % 4])
        wrong = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]  # one of two is NaN
        any_wrong = functools.reduce(b.or_, wrong)
        is_wrong = b.icmp_unsigned("!=", b.bitcast(any_wrong, lanes.BITS), ir.Constant(lanes.BITS, 0))
        return b.select(is_wrong, ir.Constant(lanes.FLOAT, float("nan")), lanes.fold(b, best, higher))

    return types.float32(scores, types.intp), make


@intrinsic
def mass_above(typing: Any, scores: Any, start: Any, best: Any, high: Any, low: Any, least: Any, cut: Any) -> Any:
    """The sum of exp((x - best) / t) of those of 256 scores at or above a cut; high + low = log2(e) / t,
    least = -126 / high."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        best, high, low, least, cut = (lanes.spread(b, value) for value in given[2:])

        def step(sums: Any, scores: Any) -> Any:
            weights = (lanes.exp(b, b.fsub(score, best), high, low, least) for score in scores)
            parts = (
                b.select(b.fcmp_ordered(">=", score, cut), weight, lanes.every(0.0))
                for score, weight in zip(scores, weights, strict=True)
            )
            return [b.fadd(*both) for both in zip(sums, parts, strict=True)]

        sums = lanes.each(context, b, signature.args[0], given[:2], [lanes.every(0.0)] * 4, step)
        return lanes.fold(b, sums, b.fadd)

    return types.float32(scores, types.intp, *[types.float32] * 5), make


@intrinsic
def masses_above(
    typing: Any, scores: Any, start: Any, best: Any, high: Any, low: Any, least: Any, cuts: Any, sums: Any
) -> Any:
    """Add to each of eight sums the weights of those of 256 scores that are at or above each of eight cuts."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        best, high, low, least = (lanes.spread(b, value) for value in given[2:6])
        cut_at, sum_at = (
            context.make_array(kind)(context, b, value).data
            for kind, value in zip(signature.args[6:], given[6:], strict=True)
        )
        places = [ir.Constant(lanes.INT, i) for i in range(8)]
        cuts = [lanes.spread(b, b.load(b.gep(cut_at, [place]))) for place in places]

        def step(sums: Any, scores: Any) -> Any:
            inside = list(sums)
            for score in scores:
                weight = lanes.exp(b, b.fsub(score, best), high, low, least)
                for i, cut in enumerate(cuts):
                    part = b.select(b.fcmp_ordered(">=", score, cut), weight, lanes.every(0.0))
                    inside[i] = b.fadd(inside[i], part)
            return inside

        inside = lanes.each(context, b, signature.args[0], given[:2], [lanes.every(0.0)] * 8, step)
        for place, vector in zip(places, inside, strict=True):
            at = b.gep(sum_at, [place])
            b.store(b.fadd(b.load(at), b.fpext(lanes.fold(b, [vector], b.fadd), ir.DoubleType())), at)
        return context.get_dummy_value()

    kinds = [scores, types.intp, *[types.float32] * 4, cuts, sums]
    return types.void(*kinds), make


@intrinsic
def count(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """How many of 256 scores are at or above a cut."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut = lanes.spread(b, given[2])

        def step(found: Any, scores: Any) -> Any:
            inside = (b.sext(b.fcmp_ordered(">=", score, cut), lanes.INTS) for score in scores)  # -1 for each
            return [b.sub(*both) for both in zip(found, inside, strict=True)]

        found = lanes.each(context, b, signature.args[0], given[:2], [lanes.every(0, lanes.INTS)] * 4, step)
        return lanes.fold(b, found, b.add, lanes.INTS)

    return types.int32(scores, types.intp, types.float32), make


@intrinsic
def moments(typing: Any, scores: Any, start: Any, top: Any, sums: Any) -> Any:
    """Add the number of 256 scores that are in, the sum of their x - top, and of its square, to three sums."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        top, zero = lanes.spread(b, given[2]), lanes.every(0.0, lanes.DOUBLES)

        def step(parts: Any, scores: Any) -> Any:
            for score in scores:
                inside = b.fcmp_ordered(">", score, lanes.every(float("-inf")))
                below = b.fsub(b.fpext(score, lanes.DOUBLES), b.fpext(top, lanes.DOUBLES))
                below = b.select(inside, below, zero)
                terms = (b.select(inside, lanes.every(1.0, lanes.DOUBLES), zero), below, b.fmul(below, below))
                parts = [b.fadd(part, term) for part, term in zip(parts, terms, strict=True)]
            return parts

        parts = lanes.each(context, b, signature.args[0], given[:2], [zero] * 3, step)
        data = context.make_array(signature.args[3])(context, b, given[3]).data
        for i, part in enumerate(parts):
            at = b.gep(data, [ir.Constant(lanes.INT, i)])
            b.store(b.fadd(b.load(at), lanes.fold(b, [part], b.fadd, lanes.DOUBLES)), at)
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.float32, sums), make


@intrinsic
def span(typing: Any, scores: Any, start: Any, cut: Any, up: Any, ends: Any) -> Any:
    """Take into two float32, the lowest and the highest so far, those of 256 scores that are in [cut, up)."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut, up = lanes.spread(b, given[2]), lanes.spread(b, given[3])
        data = context.make_array(signature.args[4])(context, b, given[4]).data
        at = [b.gep(data, [ir.Constant(lanes.INT, i)]) for i in range(2)]
        lowest, highest = (lanes.spread(b, b.load(one)) for one in at)
        for score in lanes.loaded(context, b, signature.args[0], *given[:2]):
            inside = b.and_(b.fcmp_ordered(">=", score, cut), b.fcmp_ordered("<", score, up))
            lowest = b.select(b.and_(inside, b.fcmp_ordered("<", score, lowest)), score, lowest)
            highest = b.select(b.and_(inside, b.fcmp_ordered(">", score, highest)), score, highest)
        for place, vector, way in zip(at, (lowest, highest), "<>", strict=True):

            def better(one: Any, other: Any, way: str = way) -> Any:
                return b.select(b.fcmp_ordered(way, one, other), one, other)

            b.store(lanes.fold(b, [vector], better), place)
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.float32, types.float32, ends), make


@intrinsic
def at_least(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """Which of 16 scores are at or above a cut, as bits."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        [scores] = lanes.loaded(context, b, signature.args[0], given[0], given[1], LANES)
        return b.zext(b.bitcast(b.fcmp_ordered(">=", scores, lanes.spread(b, given[2])), lanes.BITS), lanes.INT)

    return types.int32(scores, types.intp, types.float32), make


@intrinsic
def word_at_least(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """Which of 64 scores are at or above a cut, as bits."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut, word = lanes.spread(b, given[2]), ir.IntType(64)
        bits = ir.Constant(word, 0)
        for i, vector in enumerate(lanes.loaded(context, b, signature.args[0], given[0], given[1], 64)):
            found = b.zext(b.bitcast(b.fcmp_ordered(">=", vector, cut), lanes.BITS), word)
            bits = b.or_(bits, b.shl(found, ir.Constant(word, i * LANES)))
        return bits

    return types.int64(scores, types.intp, types.float32), make


@intrinsic
def ones(typing: Any, bits: Any) -> Any:
    """How many of 64 bits are set."""
    return types.int64(types.int64), lambda _, b, __, given: b.ctpop(given[0])


@intrinsic
def lowest_one(typing: Any, bits: Any) -> Any:
    """The place of the lowest of 64 bits that is set; 64 if none is."""
    return types.int64(types.int64), lambda _, b, __, given: b.cttz(given[0], ir.Constant(ir.IntType(1), 0))


@intrinsic
def forbid(typing: Any, x: Any, start: Any, bits: Any) -> Any:
    """Take infinity away from those of 32 scores whose bit is 0: what is NaN or +inf becomes NaN."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        place = b.bitcast(lanes.place(context, b, signature.args[0], *given[:2]), lanes.FLOATS.as_pointer())
        allowed = b.bitcast(given[2], ir.VectorType(ir.IntType(1), 2 * LANES))
        for half in range(2):
            which = ir.Constant(lanes.INTS, [half * LANES + lane for lane in range(LANES)])
            inside = b.shuffle_vector(allowed, ir.Constant(allowed.type, ir.Undefined), which)
            at = b.gep(place, [ir.Constant(lanes.INT, half)])
            score = b.load(at)
            score.align = 4
            left = b.select(inside, score, b.fsub(score, lanes.every(float("inf"))))
            b.store(left, at).align = 4
        return context.get_dummy_value()

    return types.void(x, types.intp, types.int32), make


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        return b.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.int32(types.int32), make


@intrinsic
def one_at(typing: Any, address: Any) -> Any:
    """The score at an address."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        return b.load(b.inttoptr(given[0], lanes.FLOAT.as_pointer()))

    return types.float32(types.int64), make


@intrinsic
def image(typing: Any, x: Any) -> Any:
    """The bits of a float32 as an integer."""
    return types.int32(types.float32), lambda context, b, signature, given: b.bitcast(given[0], lanes.INT)


@intrinsic
def score(typing: Any, bits: Any) -> Any:
    """The float32 of some bits."""
    return types.float32(types.int32), lambda context, b, signature, given: b.bitcast(given[0], lanes.FLOAT)


@intrinsic
def widen(typing: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """Turn 16 half-precision numbers, held as uint16, into float32."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.HalfType(), LANES)
        data = context.make_array(signature.args[0])(context, b, given[0]).data
        vector = b.load(b.bitcast(b.gep(data, [given[1]]), halves.as_pointer()))
        vector.align = 2
        out = context.make_array(signature.args[2])(context, b, given[2]).data
        store = b.store(b.fpext(vector, lanes.FLOATS), b.bitcast(b.gep(out, [given[3]]), lanes.FLOATS.as_pointer()))
        store.align = 4
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), make
