"""What the stages of a shape have in common, compiled once for all of them. Knows no stage, and no pipeline.

The tokens that are in are the first m of three arrays: ``ids`` (int64, ascending), ``x`` (float64, their scores) and,
by id, ``base``: the scores as of the last time that the order was made anew. The order is score descending, then base
descending, as a monotone scale keeps the order also of tokens that its rounding makes equal, then id ascending.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from nucleate.backends.cpu import noise, simd
from nucleate.backends.cpu.chain import read
from nucleate.backends.cpu.compile import intrinsic, jit, kernel
from nucleate.backends.cpu.select import count_cut, gather, kth_highest
from nucleate.backends.cpu.simd import GROUP
from nucleate.core.stage import Token

MASS, MOMENTS = 1, 2
ALL, WRONG = -1, -2
BINS = 2048
BLOCK = 16
LOWEST = np.finfo(np.float64).min
SIGN = np.int64(0x7FFFFFFFFFFFFFFF)
INFINITE = np.int64(0x7FF0000000000000)


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


# Names that rules use, for one number at a time.

ROUND = 1.5 * 2.0**52
"""Added to a number below 2**51, it leaves the nearest integer in the low bits of the float64."""
LOG2_E, LN_2, LN_2_REST = 1.4426950408889634, 0.693147180369123816490, 1.90821492927058770002e-10
POWERS = tuple(1.0 / math.factorial(n) for n in range(12))
C0, C1, C2, C3, C4, C5, C6, C7, C8, C9, C10, C11 = POWERS


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


# Reading a row.


@jit
def image(x: Any) -> Any:
    """An integer that is ordered as the float64 is; of a NaN beyond those of the infinities."""
    i = bits(x)
    return i ^ ((i >> np.int64(63)) & SIGN)


@jit
def extremes(x: Any, m: Any) -> Any:
    high, low = image(-np.inf), image(np.inf)
    for i in range(m):
        one = image(x[i])
        high = max(high, one)
        low = min(low, one)
    return high, low


@jit
def told(high: Any, low: Any) -> Any:
    """(highest score, lowest) of their images; the highest is NaN where no token can be drawn."""
    if high >= INFINITE or low < image(-np.inf) or high == image(-np.inf):
        return np.nan, np.nan
    return number(high ^ ((high >> np.int64(63)) & SIGN)), number(low ^ ((low >> np.int64(63)) & SIGN))


@kernel
def scan(x: Any, m: Any) -> Any:
    """(highest score, lowest) of m scores. The highest is NaN if one is NaN or +inf, or if all are at -inf."""
    high, low = extremes(x, m)
    return told(high, low)


@kernel
def widen(row: Any, x: Any) -> Any:
    """A row as float64, and what ``scan`` says of it."""
    m = row.size
    for i in range(m):
        x[i] = row[i]
    high, low = extremes(x, m)
    return told(high, low)


@loose
def masses(x: Any, m: Any, top: Any) -> Any:
    mass, square, share = 0.0, 0.0, 0.0
    for i in range(m):
        below = max(x[i] - top, LOWEST)
        e = exp(below)
        mass += e
        square += e * e
        share += e * below
    return mass, square, share


@loose
def masses_and_weights(x: Any, m: Any, top: Any, weights: Any) -> Any:
    mass, square, share = 0.0, 0.0, 0.0
    for i in range(m):
        below = max(x[i] - top, LOWEST)
        e = exp(below)
        weights[i] = e
        mass += e
        square += e * e
        share += e * below
    return mass, square, share


@loose
def mass_of(x: Any, top: Any) -> Any:
    mass = 0.0
    for i in range(x.size):
        mass += exp(x[i] - top)
    return mass


@loose
def mean_of(x: Any, m: Any, top: Any) -> Any:
    total = 0.0
    for i in range(m):
        total += max(x[i] - top, LOWEST)
    return total / m


@loose
def variance_of(x: Any, m: Any, top: Any, mean: Any) -> Any:
    total = 0.0
    for i in range(m):
        far = max(x[i] - top, LOWEST) - mean
        total += far * far
    return total / m


@kernel
def statistics(x: Any, m: Any, top: Any, wanted: Any, row: Any) -> None:
    """Put mass, square, entropy, mean and variance into ``row``, as far as they are wanted."""
    if wanted & MASS:
        mass, square, share = masses(x, m, top)
        row[0], row[1], row[2] = mass, square, np.log(mass) - share / mass
    if wanted & MOMENTS:
        row[3] = mean_of(x, m, top)
        row[4] = variance_of(x, m, top, row[3])


@kernel
def statistics_and_weights(x: Any, m: Any, top: Any, row: Any, weights: Any) -> None:
    """Mass, square and entropy, and exp(x - top) of each score."""
    mass, square, share = masses_and_weights(x, m, top, weights)
    row[0], row[1], row[2] = mass, square, np.log(mass) - share / mass


# Keeping some of the tokens.


@kernel
def first(x: Any, ids: Any, base: Any, m: Any, top: Any) -> Any:
    """The place of the first token of the order."""
    best = -1
    for start in range(0, m, BLOCK):
        found = bits_of(x, start, m, 1.0, top, 0.0, np.nan)
        while found != 0:
            i = start + simd.lowest_bit(found)
            found &= found - 1
            if best < 0 or base[ids[i]] > base[ids[best]]:
                best = i
    return best


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


@kernel
def keep_above(x: Any, ids: Any, m: Any, top: Any, cut: Any, x_out: Any, ids_out: Any) -> Any:
    """Keep the scores that are at or above a cut, from the top; returns how many."""
    n = 0
    for start in range(0, m, BLOCK):
        found = bits_of(x, start, m, 1.0, top, cut, np.nan)
        while found != 0:
            i = start + simd.lowest_bit(found)
            found &= found - 1
            x_out[n], ids_out[n] = x[i], ids[i]
            n += 1
    return n


@kernel
def drop_above(x: Any, ids: Any, base: Any, m: Any, top: Any, cut: Any, spared: Any, x_out: Any, ids_out: Any) -> Any:
    """Drop the tokens at or above a cut but the last of them, and those that are spared; returns how many stay."""
    last = -1
    for i in range(m):
        if x[i] - top >= cut and (last < 0 or x[i] < x[last] or (x[i] == x[last] and base[ids[i]] <= base[ids[last]])):
            last = i
    n = 0
    for i in range(m):
        stays = not x[i] - top >= cut or i == last  # NaN
        if not stays:
            for token in spared:
                stays |= token == ids[i]
        if stays:
            x_out[n], ids_out[n] = x[i], ids[i]
            n += 1
    return n


@jit
def lowest_reaching(v: Any, w: Any, n: Any, above: Any, goal: Any, strict: Any) -> Any:
    """The lowest of n values at which the weights up to it reach a goal (strict: exceed it), and the sum before it.

    above: the sum before all of them. Shuffles both.
    """
    low, high = 0, n
    while True:
        a, b, c = v[low], v[(low + high) >> 1], v[high - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        i, less, more = low, low, high
        under, same = 0.0, 0.0
        while i < more:
            value, weight = v[i], w[i]
            if value < pivot:
                under += weight
                v[i], w[i] = v[less], w[less]
                v[less], w[less] = value, weight
                less += 1
                i += 1
            elif value > pivot:
                more -= 1
                v[i], w[i] = v[more], w[more]
                v[more], w[more] = value, weight
            else:
                same += weight
                i += 1
        if less > low and (above + under > goal or (above + under == goal and not strict)):
            high = less
            continue
        above += under
        if more == high or above + same > goal or (above + same == goal and not strict):
            return pivot, above
        above += same
        low = more


@loose
def weigh(order: Any, sign: Any, weights: Any, m: Any) -> Any:
    """The sum of all weights, and whether one of them is negative or NaN, or a key is NaN."""
    total, wrong = 0.0, 0
    for i in range(m):
        w, k = weights[i], sign * order[i]
        total += w
        wrong |= (not w >= 0.0) | (k != k)  # noqa: PLR0124
    return total, wrong


@jit
def near(order: Any, sign: Any, weights: Any, m: Any, goal: Any, strict: Any, sums: Any, places: Any) -> Any:  # noqa: C901, PLR0912
    """Places of tokens among which the one is that reaches the goal; how many, and the weight before them."""
    high, low = extremes(order, m)
    one, other = told(high, low)
    if sign < 0.0:
        one, other = -other, -one
    scale = (BINS - 1) / (one - other)
    if m <= BINS or not 0.0 < scale < np.inf or goal == -np.inf:
        for i in range(m):
            places[i] = i
        return m, 0.0
    sums[:] = 0.0
    bins = places[:GROUP].view(np.uint32)
    for start in range(0, m, GROUP):
        own, weight = order[start : min(start + GROUP, m)], weights[start : min(start + GROUP, m)]
        for i in range(own.size):
            bins[i] = np.int32((sign * own[i] - other) * scale)
        for i in range(own.size):
            sums[bins[i]] += weight[i]
    chosen, above, here = 0, 0.0, 0.0
    for place in range(BINS):
        if sums[place] > 0.0:  # of the last ones too, should rounding miss the goal
            above += here
            chosen, here = place, sums[place]
            if above + here > goal or (above + here == goal and not strict):
                break
    n = 0
    for start in range(0, m, BLOCK):
        if start + BLOCK <= m:
            found = inside(order, start, sign, other, scale, float(chosen), chosen + 1.0)
            while found != 0:
                places[n] = start + simd.lowest_bit(found)
                n += 1
                found &= found - 1
        else:
            for i in range(start, m):
                places[n] = i
                n += int((sign * order[i] - other) * scale) == chosen
    return n, above


@kernel
def reach(  # noqa: C901, PLR0912
    order: Any, sign: Any, weights: Any, x: Any, ids: Any, base: Any, m: Any, goal: Any, strict: Any,
    v: Any, w: Any, places: Any, sums: Any,
) -> Any:  # fmt: skip
    """The place of the token at which the weights reach a goal (strict: exceed it), the lowest sign * order first.

    ALL where they do not; WRONG where weights or keys are such that there is no telling.
    """
    total, wrong = weigh(order, sign, weights, m)
    if wrong or total != total:  # noqa: PLR0124
        return WRONG
    if total < goal or (strict and total == goal):
        return ALL
    n, above = near(order, sign, weights, m, goal, strict, sums, places)
    for level in range(3):
        for i in range(n):
            place = places[i]
            if level == 0:
                v[i] = sign * order[place]
            elif level == 1:
                v[i] = -x[place]
            else:
                v[i] = -base[ids[place]]
            w[i] = weights[place]
        value, above = lowest_reaching(v, w, n, above, goal, strict)
        found = 0
        for i in range(n):
            place = places[i]
            places[found] = place
            if level == 0:
                found += sign * order[place] == value
            elif level == 1:
                found += -x[place] == value
            else:
                found += -base[ids[place]] == value
        n = found
        if n == 1:
            return places[0]
    for i in range(n):
        above += weights[places[i]]
        if above > goal or (above == goal and not strict):
            return places[i]
    return places[n - 1]


@kernel
def keep_until(  # noqa: C901
    order: Any, sign: Any, x: Any, ids: Any, base: Any, m: Any, place: Any, strict: Any, ties: Any,
    x_out: Any, ids_out: Any,
) -> Any:  # fmt: skip
    """Keep what is not after a place in the order, nor at it if strict; and ties, what equals the last of it."""
    k, score, under, token = sign * order[place], x[place], base[ids[place]], ids[place]
    most, kept = np.inf, 0
    if strict or ties:
        for i in range(m):
            if not after(sign * order[i], x, ids, base, i, k, score, under, token, strict):
                kept += 1
                most = min(most, x[i])
        if kept == 0:
            strict, most = False, score
    n, full = 0, m // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        found = inside(order, start, sign, 0.0, 1.0, -np.inf, k)
        equal = inside(order, start, -sign, 0.0, 1.0, -k, np.nan) & ~found
        if ties:
            found |= inside(x, start, 1.0, 0.0, 1.0, most, np.nan)
        while equal != 0:
            bit = simd.lowest_bit(equal)
            equal &= equal - 1
            if not after(k, x, ids, base, start + bit, k, score, under, token, strict):
                found |= np.int32(1) << bit
        while found != 0:
            i = start + simd.lowest_bit(found)
            found &= found - 1
            x_out[n], ids_out[n] = x[i], ids[i]
            n += 1
    for i in range(full, m):
        stays = not after(sign * order[i], x, ids, base, i, k, score, under, token, strict) or (ties and x[i] >= most)
        x_out[n], ids_out[n] = x[i], ids[i]
        n += stays
    return n


@jit
def after(
    key: Any, x: Any, ids: Any, base: Any, i: Any, k: Any, score: Any, under: Any, token: Any, strict: Any
) -> Any:
    """Whether the token at a place comes after another one; if strict, or is that one."""
    if key != k:
        return key > k
    if x[i] != score:
        return x[i] < score
    mine = ids[i]
    if base[mine] != under:
        return base[mine] < under
    return mine >= token if strict else mine > token


# Drawing.


@jit
def highest(x: Any) -> Any:
    best = image(-np.inf)
    for i in range(x.size):
        best = max(best, image(x[i]))
    return number(best ^ ((best >> np.int64(63)) & SIGN))


@kernel
def groups(x: Any, ids: Any, m: Any, top: Any, starts: Any, masses: Any) -> Any:
    """Where the tokens of each group start, and log sum exp of their scores from the top; returns how many groups."""
    n, start = 0, 0
    while start < m:
        limit = (ids[start] // GROUP + 1) * GROUP
        low, end = start + 1, min(start + GROUP, m)  # the end is the first with an id beyond: ids ascend
        while low < end:
            middle = (low + end) >> 1
            if ids[middle] < limit:
                low = middle + 1
            else:
                end = middle
        own = x[start:end]
        best = highest(own)
        starts[n], masses[n] = start, best - top + np.log(mass_of(own, best))
        n += 1
        start = end
    starts[n] = m
    return n


@kernel
def uniforms(seed: Any, step: Any, stream: Any, ids: Any, n: Any, out: Any) -> None:
    """The noise of each id."""
    for i in range(n):
        out[i] = noise.uniform(seed, step, stream, ids[i])


# A start from few tokens, where it can be told that only they matter. Rows are as in ``chain``.


@kernel
def tops_of(x: Any, tops: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    return read(x, tops)


@kernel
def kth(x: Any, tops: Any, top: Any, k: Any, work: Any, cuts: Any, sums: Any) -> Any:
    """A score that at least k tokens reach, or all; mostly not many more."""
    if k <= tops.size:
        return kth_highest(tops, work, k)
    return count_cut(x, tops.size, k, top, cuts, sums)


@kernel
def tops_of_many(x: Any, m: Any, tops: Any) -> Any:
    """The highest of each 256 of m scores that are float64, and of what is left; returns how many there are."""
    n = 0
    for start in range(0, m, GROUP):
        tops[n] = highest(x[start : min(start + GROUP, m)])
        n += 1
    return n


@kernel
def kth_top(tops: Any, work: Any, k: Any) -> Any:
    """The k-th highest."""
    return kth_highest(tops, work, k)


@kernel
def pick_out(x: Any, tops: Any, cut: Any, ids: Any, scores: Any, base: Any) -> Any:
    """The tokens at or above a cut; returns how many."""
    n = gather(x, tops, cut, ids)
    for i in range(n):
        scores[i] = x[ids[i]]
        base[ids[i]] = scores[i]
    return n


__all__ = ["BINS", "absolute", "exp", "log", "log1p", "maximum", "minimum", "ones", "simd", "sqrt", "where"]
