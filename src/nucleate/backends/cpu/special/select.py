"""Finding the tokens above a cut, and the cut that keeps enough of them, without sorting the row.

A token is ranked by its key: higher scores, and of equal ones lower ids, have higher keys. Rows are as of ``simd``;
``tops`` has the highest score of each group of 256.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import inline, jit
from nucleate.backends.cpu.simd import GROUP, LANES

WORD = 64

FEW = 4096
"""More candidates than this are narrowed down by passes over the row, not one by one."""

ID = np.int64(0xFFFFFFFF)


@inline
def stir(state: Any) -> Any:
    """The next of some numbers below 2**32: pivots are taken by them, as no order of scores is bad for all of these."""
    return (state * 1664525 + 1013904223) & 0xFFFFFFFF


@inline
def key(x: Any, token: Any) -> Any:
    """The rank of a token as an integer."""
    bits = simd.image(x + np.float32(0.0))  # of -0.0 it makes 0.0
    return (np.int64(bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (ID - token)


@inline
def ordered(x: Any) -> Any:
    """The bits of a float32 as an integer that is ordered as it is; -0.0 is right below 0.0."""
    bits = simd.image(x)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


@inline
def floating(place: Any) -> Any:
    """The inverse of ``ordered``."""
    return simd.score(np.int32(place ^ ((place >> 31) & 0x7FFFFFFF)))


@inline
def next_up(x: Any) -> Any:
    """The float32 that follows x, which is not infinite, upwards."""
    return floating(ordered(x + np.float32(0.0)) + np.int32(1))  # of -0.0 it makes 0.0


@jit
def lowest_at_least(top: Any, below: Any) -> Any:
    """The lowest float32 x with x - top >= below, both in float64. top: a float32; below: negative."""
    if top + below < -3.4e38:
        return np.float32(-np.inf)
    in_place = np.int64(ordered(np.float32(top + below)))  # mostly it, or beside it; near 0 it may be far from it
    out_place, step = in_place, np.int64(1)
    most = np.int64(ordered(np.float32(top)))
    while np.float64(floating(in_place)) - top < below:
        out_place, in_place, step = in_place, min(in_place + step, most), 2 * step
    if out_place == in_place:
        out_place = in_place - step
        while np.float64(floating(out_place)) - top >= below:
            in_place, out_place, step = out_place, out_place - step, 2 * step
    while in_place - out_place > 1:
        middle = (in_place + out_place) >> 1
        if np.float64(floating(middle)) - top >= below:
            in_place = middle
        else:
            out_place = middle
    return floating(in_place)


@jit
def kth_highest(values: Any, work: Any, k: Any) -> Any:
    """The k-th highest of some numbers."""
    work[: values.size] = values
    first, last, state = 0, values.size - 1, np.int64(1)
    while first < last:
        state = stir(state)
        pivot, left, right = work[first + (state * (last - first + 1) >> 32)], first, last
        while left <= right:
            while work[left] > pivot:
                left += 1
            while work[right] < pivot:
                right -= 1
            if left <= right:
                work[left], work[right] = work[right], work[left]
                left += 1
                right -= 1
        if k - 1 <= right:
            last = right
        elif k - 1 >= left:
            first = left
        else:
            break
    return work[k - 1]


@jit
def gather(row: Any, tops: Any, cut: Any, ids: Any, groups: Any) -> Any:
    """Put the ids of all scores at or above a cut into ``ids``, ascending; returns how many there are.

    Without branches that would be guessed wrong at every other group: those that reach the cut are listed first, in
    ``groups``. Most of these have one score, or some in every part.
    """
    count, found = 0, 0
    for group in range(tops.size):
        groups[count] = group
        count += tops[group] >= cut
    for i in range(count):
        start = groups[i] * GROUP
        a, b = simd.word_at_least(row, start, cut), simd.word_at_least(row, start + WORD, cut)
        c, d = simd.word_at_least(row, start + 2 * WORD, cut), simd.word_at_least(row, start + 3 * WORD, cut)
        if simd.ones(a) + simd.ones(b) + simd.ones(c) + simd.ones(d) == 1:
            ids[found] = start + simd.lowest_one(a | b | c | d) + WORD * ((b != 0) + 2 * (c != 0) + 3 * (d != 0))
            found += 1
        else:
            for place, bits in enumerate((a, b, c, d)):
                found = spell(bits, start + place * WORD, ids, found)
    return found


@inline
def spell(bits: Any, start: Any, ids: Any, found: Any) -> Any:
    """Write the places of the bits that are set; four at a time, be they there or not. Returns where they end."""
    end = found + simd.ones(bits)
    while True:
        for i in range(4):
            ids[found + i] = start + simd.lowest_one(bits)
            bits &= bits - 1
        if bits == 0:
            return end
        found += 4


@jit
def count(row: Any, tops: Any, cut: Any) -> Any:
    """How many scores are at or above a cut."""
    found = 0
    for group in range(tops.size):
        if tops[group] >= cut:
            found += simd.count(row, group * GROUP, cut)
    return found


@jit
def gather_between(row: Any, tops: Any, cut: Any, up: Any, ids: Any) -> Any:
    """As ``gather``, without those at or above ``up``."""
    found = 0
    for group in range(tops.size):
        if tops[group] >= cut:
            for start in range(group * GROUP, (group + 1) * GROUP, LANES):
                bits = simd.at_least(row, start, cut) & ~simd.at_least(row, start, up)
                while bits != 0:
                    ids[found] = start + simd.lowest_bit(bits)
                    found += 1
                    bits &= bits - 1
    return found


@jit
def bound(tops: Any, masses: Any, top: Any, t: Any, rest: Any) -> Any:
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = -30.0, 0.0
    for _ in range(12):
        middle = (low + high) / 2
        each = GROUP * math.exp(middle)
        total = 0.0
        for group in range(masses.size):
            total += min(np.float64(masses[group]), each)
        if total <= rest:
            low = middle
        else:
            high = middle
    return np.float32(top + low * t)


@jit
def count_cut(row: Any, groups: Any, k: Any, top: Any, cuts: Any, sums: Any) -> Any:  # noqa: C901
    """A score that at least k tokens reach, and not many more."""
    low, high, span = -np.inf, np.inf, np.float32(4.0)
    for _ in range(16):
        for i in range(4):
            if low == -np.inf:
                cuts[i] = np.float32(top - 2 * span * (i + 1))
            else:
                cuts[i] = np.float32(high + (low - high) * (i + 1) / 5)
            sums[i] = 0.0
        for group in range(groups):
            simd.four_counts(row, group * GROUP, cuts, sums)
        more = high if high < np.inf else np.float64(top)
        enough = False
        for i in range(4):
            if sums[i] >= k:
                low, high, enough = np.float64(cuts[i]), more, True
                break
            more = np.float64(cuts[i])
        if enough and sums[i] <= k + FEW // 4:
            return np.float32(low)
        if not enough:
            if low > -np.inf:
                high = more
            elif span > 1e30:
                return np.float32(-np.inf)
            else:
                span *= np.float32(16.0)
    return np.float32(low)
