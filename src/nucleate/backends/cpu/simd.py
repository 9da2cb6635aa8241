"""256 scores at a time, in explicit vectors of LLVM: what Numba's own loops do not reach. Knows no sampling.

Each function takes scores and the place of the first of them, a multiple of 16. Scores are a float32 array padded to
whole groups, or ``Scores``. Vectors are of 16 lanes; LLVM splits them on machines that have narrower ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nucleate.backends.cpu.compile import intrinsic

GROUP = 256
LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
_BITS = ir.IntType(LANES)
_ROUND = 1.5 * 2**23
"""Added to a number below 2**22, it leaves the nearest integer in the low bits of the float."""

POLYNOMIAL = (
    *(1.0, 0.693147202855083, 0.2402264791362671, 0.055503324710991495, 0.00961843735779002),
    *(0.0013398874422620895, 0.00015353361899616592),
)
"""2 ** x on -0.5..0.5: least largest relative error, 2e-9, with f(0) = 1; 8e-8 in float32."""


class Scores(NamedTuple):
    """A row as it lies in memory."""

    x: Any  #: float32 [V]
    tail: Any  #: float32 [256]: what is left after the last whole group, padded with -inf


def _all(value: float, kind: ir.VectorType = _FLOATS) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _spread(b: Any, value: Any) -> Any:
    one = b.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return b.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), _all(0, _INTS))


def _place(context: Any, b: Any, kind: Any, scores: Any, start: Any) -> Any:
    """Where scores are."""
    if isinstance(kind, types.Array):
        return b.gep(context.make_array(kind)(context, b, scores).data, [start])
    x, tail = (context.make_array(one)(context, b, b.extract_value(scores, i)) for i, one in enumerate(kind.types))
    whole = b.and_(cgutils.unpack_tuple(b, x.shape)[0], ir.Constant(start.type, -GROUP))
    within = b.icmp_signed("<", start, whole)
    return b.select(within, b.gep(x.data, [start]), b.gep(tail.data, [b.sub(start, whole)]))


def _scores(context: Any, b: Any, kind: Any, scores: Any, start: Any, count: int = GROUP) -> list[Any]:
    """The scores from a place on, as vectors."""
    place = b.bitcast(_place(context, b, kind, scores, start), _FLOATS.as_pointer())
    vectors = [b.load(b.gep(place, [ir.Constant(_INT, i)])) for i in range(count // LANES)]
    for vector in vectors:
        vector.align = 4
    return vectors


def _fold(b: Any, vectors: Sequence[Any], join: Callable[[Any, Any], Any], kind: ir.VectorType = _FLOATS) -> Any:
    """All lanes of some vectors joined into one number, in a fixed order."""
    left = list(vectors)
    while len(left) > 1:
        left = [join(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    [vector], width = left, LANES
    while width > 1:
        width //= 2
        turned = ir.Constant(_INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), turned))
    return b.extract_element(vector, ir.Constant(_INT, 0))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def _exp(b: Any, below: Any, high: Any, low: Any, least: Any) -> Any:
    """2 ** (below * (high + low)), with a relative error below 2e-7; ``below`` is taken as at least ``least``."""
    below = b.select(b.fcmp_ordered(">", below, least), below, least)
    rounded = _fma(b, below, high, _all(_ROUND))
    whole = b.fsub(rounded, _all(_ROUND))
    part = _fma(b, below, low, _fma(b, below, high, b.fneg(whole)))
    power = _all(POLYNOMIAL[-1])
    for factor in POLYNOMIAL[-2::-1]:
        power = _fma(b, power, part, _all(factor))
    exponent = b.shl(b.bitcast(rounded, _INTS), _all(23, _INTS))
    return b.bitcast(b.add(b.bitcast(power, _INTS), exponent), _FLOATS)


@intrinsic
def top(typing: Any, scores: Any, start: Any) -> Any:
    """The highest of 256 scores; NaN if one of them is."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        def higher(one: Any, other: Any) -> Any:
            return b.select(b.fcmp_ordered(">", one, other), one, other)

        scores = _scores(context, b, signature.args[0], *given)
        best = list(scores[:4])  # four at a time, so that none waits for another
        for i, score in enumerate(scores[4:]):
            best[i % 4] = higher(score, best[i % 4])
        wrong = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]  # one of two is NaN
        any_wrong = functools.reduce(b.or_, wrong)
        is_wrong = b.icmp_unsigned("!=", b.bitcast(any_wrong, _BITS), ir.Constant(_BITS, 0))
        return b.select(is_wrong, ir.Constant(_FLOAT, float("nan")), _fold(b, best, higher))

    return types.float32(scores, types.intp), make


@intrinsic
def mass(typing: Any, scores: Any, start: Any, best: Any, high: Any, low: Any, least: Any) -> Any:
    """The sum of exp((x - best) / t) of 256 scores; high + low = log2(e) / t, least = -126 / high."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        best, high, low, least = (_spread(b, value) for value in given[2:])
        sums = [_all(0.0)] * 4
        for i, score in enumerate(_scores(context, b, signature.args[0], *given[:2])):
            sums[i % 4] = b.fadd(sums[i % 4], _exp(b, b.fsub(score, best), high, low, least))
        return _fold(b, sums, b.fadd)

    return types.float32(scores, types.intp, *[types.float32] * 4), make


@intrinsic
def mass_above(typing: Any, scores: Any, start: Any, best: Any, high: Any, low: Any, least: Any, cut: Any) -> Any:
    """The same, of those at or above a cut."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        best, high, low, least, cut = (_spread(b, value) for value in given[2:])
        sums = [_all(0.0)] * 4
        for i, score in enumerate(_scores(context, b, signature.args[0], *given[:2])):
            part = _exp(b, b.fsub(score, best), high, low, least)
            part = b.select(b.fcmp_ordered(">=", score, cut), part, _all(0.0))
            sums[i % 4] = b.fadd(sums[i % 4], part)
        return _fold(b, sums, b.fadd)

    return types.float32(scores, types.intp, *[types.float32] * 5), make


@intrinsic
def masses_above(
    typing: Any, scores: Any, start: Any, best: Any, high: Any, low: Any, least: Any, cuts: Any, sums: Any
) -> Any:
    """Add to each of eight sums the weights of those of 256 scores that are at or above each of eight cuts."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        best, high, low, least = (_spread(b, value) for value in given[2:6])
        cut_at, sum_at = (
            context.make_array(kind)(context, b, value).data
            for kind, value in zip(signature.args[6:], given[6:], strict=True)
        )
        places = [ir.Constant(_INT, i) for i in range(8)]
        cuts = [_spread(b, b.load(b.gep(cut_at, [place]))) for place in places]
        inside = [_all(0.0)] * 8
        for score in _scores(context, b, signature.args[0], *given[:2]):
            weight = _exp(b, b.fsub(score, best), high, low, least)
            for i, cut in enumerate(cuts):
                part = b.select(b.fcmp_ordered(">=", score, cut), weight, _all(0.0))
                inside[i] = b.fadd(inside[i], part)
        for place, vector in zip(places, inside, strict=True):
            at = b.gep(sum_at, [place])
            b.store(b.fadd(b.load(at), b.fpext(_fold(b, [vector], b.fadd), ir.DoubleType())), at)
        return context.get_dummy_value()

    kinds = [scores, types.intp, *[types.float32] * 4, cuts, sums]
    return types.void(*kinds), make


@intrinsic
def four_counts(typing: Any, scores: Any, start: Any, cuts: Any, sums: Any) -> Any:
    """Add to the first four sums how many of 256 scores are at or above the first four cuts."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut_at, sum_at = (
            context.make_array(kind)(context, b, value).data
            for kind, value in zip(signature.args[2:], given[2:], strict=True)
        )
        places = [ir.Constant(_INT, i) for i in range(4)]
        cuts = [_spread(b, b.load(b.gep(cut_at, [place]))) for place in places]
        found = [_all(0, _INTS)] * 4
        for score in _scores(context, b, signature.args[0], *given[:2]):
            for i, cut in enumerate(cuts):
                found[i] = b.sub(found[i], b.sext(b.fcmp_ordered(">=", score, cut), _INTS))  # -1 for each
        for place, vector in zip(places, found, strict=True):
            at = b.gep(sum_at, [place])
            b.store(b.fadd(b.load(at), b.sitofp(_fold(b, [vector], b.add, _INTS), ir.DoubleType())), at)
        return context.get_dummy_value()

    return types.void(scores, types.intp, cuts, sums), make


@intrinsic
def count(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """How many of 256 scores are at or above a cut."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut, found = _spread(b, given[2]), [_all(0, _INTS)] * 4
        for i, score in enumerate(_scores(context, b, signature.args[0], *given[:2])):
            inside = b.sext(b.fcmp_ordered(">=", score, cut), _INTS)  # -1 for each
            found[i % 4] = b.sub(found[i % 4], inside)
        return _fold(b, found, b.add, _INTS)

    return types.int32(scores, types.intp, types.float32), make


@intrinsic
def moments(typing: Any, scores: Any, start: Any, top: Any, sums: Any) -> Any:
    """Add the number of 256 scores that are in, the sum of their x - top, and of its square, to three sums."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        top, zero = _spread(b, given[2]), _all(0.0, _DOUBLES)
        parts = [zero, zero, zero]
        for score in _scores(context, b, signature.args[0], *given[:2]):
            inside = b.fcmp_ordered(">", score, _all(float("-inf")))
            below = b.fsub(b.fpext(score, _DOUBLES), b.fpext(top, _DOUBLES))
            below = b.select(inside, below, zero)
            terms = (b.select(inside, _all(1.0, _DOUBLES), zero), below, b.fmul(below, below))
            parts = [b.fadd(part, term) for part, term in zip(parts, terms, strict=True)]
        data = context.make_array(signature.args[3])(context, b, given[3]).data
        for i, part in enumerate(parts):
            at = b.gep(data, [ir.Constant(_INT, i)])
            b.store(b.fadd(b.load(at), _fold(b, [part], b.fadd, _DOUBLES)), at)
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.float32, sums), make


@intrinsic
def span(typing: Any, scores: Any, start: Any, cut: Any, up: Any, ends: Any) -> Any:
    """Take into two float32, the lowest and the highest so far, those of 256 scores that are in [cut, up)."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut, up = _spread(b, given[2]), _spread(b, given[3])
        data = context.make_array(signature.args[4])(context, b, given[4]).data
        at = [b.gep(data, [ir.Constant(_INT, i)]) for i in range(2)]
        lowest, highest = (_spread(b, b.load(one)) for one in at)
        for score in _scores(context, b, signature.args[0], *given[:2]):
            inside = b.and_(b.fcmp_ordered(">=", score, cut), b.fcmp_ordered("<", score, up))
            lowest = b.select(b.and_(inside, b.fcmp_ordered("<", score, lowest)), score, lowest)
            highest = b.select(b.and_(inside, b.fcmp_ordered(">", score, highest)), score, highest)
        for place, vector, way in zip(at, (lowest, highest), "<>", strict=True):

            def better(one: Any, other: Any, way: str = way) -> Any:
                return b.select(b.fcmp_ordered(way, one, other), one, other)

            b.store(_fold(b, [vector], better), place)
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.float32, types.float32, ends), make


@intrinsic
def at_least(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """Which of 16 scores are at or above a cut, as bits."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        [scores] = _scores(context, b, signature.args[0], given[0], given[1], LANES)
        return b.zext(b.bitcast(b.fcmp_ordered(">=", scores, _spread(b, given[2])), _BITS), _INT)

    return types.int32(scores, types.intp, types.float32), make


@intrinsic
def word_at_least(typing: Any, scores: Any, start: Any, cut: Any) -> Any:
    """Which of 64 scores are at or above a cut, as bits."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        cut, word = _spread(b, given[2]), ir.IntType(64)
        bits = ir.Constant(word, 0)
        for i, vector in enumerate(_scores(context, b, signature.args[0], given[0], given[1], 64)):
            found = b.zext(b.bitcast(b.fcmp_ordered(">=", vector, cut), _BITS), word)
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
        place = b.bitcast(_place(context, b, signature.args[0], *given[:2]), _FLOATS.as_pointer())
        allowed = b.bitcast(given[2], ir.VectorType(ir.IntType(1), 2 * LANES))
        for half in range(2):
            lanes = ir.Constant(ir.VectorType(_INT, LANES), [half * LANES + lane for lane in range(LANES)])
            inside = b.shuffle_vector(allowed, ir.Constant(allowed.type, ir.Undefined), lanes)
            at = b.gep(place, [ir.Constant(_INT, half)])
            score = b.load(at)
            score.align = 4
            left = b.select(inside, score, b.fsub(score, _all(float("inf"))))
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
def image(typing: Any, x: Any) -> Any:
    """The bits of a float32 as an integer."""
    return types.int32(types.float32), lambda context, b, signature, given: b.bitcast(given[0], _INT)


@intrinsic
def score(typing: Any, bits: Any) -> Any:
    """The float32 of some bits."""
    return types.float32(types.int32), lambda context, b, signature, given: b.bitcast(given[0], _FLOAT)


@intrinsic
def widen(typing: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """Turn 16 half-precision numbers, held as uint16, into float32."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.HalfType(), LANES)
        data = context.make_array(signature.args[0])(context, b, given[0]).data
        vector = b.load(b.bitcast(b.gep(data, [given[1]]), halves.as_pointer()))
        vector.align = 2
        out = context.make_array(signature.args[2])(context, b, given[2]).data
        store = b.store(b.fpext(vector, _FLOATS), b.bitcast(b.gep(out, [given[3]]), _FLOATS.as_pointer()))
        store.align = 4
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), make
