"""Finding and counting the tokens at or above a cut; only groups whose highest score reaches it are looked at.

A token is ranked by its key: higher scores, and of equal ones lower ids, have higher keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import inline, jit
from nucleate.backends.cpu.doubles import loose
from nucleate.backends.cpu.simd import GROUP, LANES
from nucleate.backends.cpu.special.work import score

WORD = 64

FEW = 4096
"""More candidates than this are narrowed down by passes over the row, not one by one."""

ID = np.int64(0xFFFFFFFF)


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
    """The lowest float32 x with x - top >= below, both in float64. below: negative."""
    if top + below < -3.4e38:
        return np.float32(-np.inf)
    in_place = np.int64(ordered(np.float32(top + below)))  # mostly it, or beside it; near 0 it may be far from it
    out_place, step = in_place, np.int64(1)
    most = np.int64(ordered(np.float32(top)))
    while in_place < most and np.float64(floating(in_place)) - top < below:
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
def gather(cut: Any, work: Any) -> Any:
    """Put the ids of all scores at or above a cut into ``ids``, ascending, and these into ``scores``; returns how many.

    Without branches that would be guessed wrong at every other group: those that reach the cut are listed first. Most
    of these have one score, or some in every part.
    """
    ids, groups, count, found = work.ids, work.groups, 0, 0
    for group in range(work.tops.size):
        groups[count] = group
        count += work.tops[group] >= cut
    for i in range(count):
        start, at = groups[i] * GROUP, work.at[groups[i]]
        a, b = simd.word_at_least(at, 0, cut), simd.word_at_least(at, WORD, cut)
        c, d = simd.word_at_least(at, 2 * WORD, cut), simd.word_at_least(at, 3 * WORD, cut)
        if simd.ones(a) + simd.ones(b) + simd.ones(c) + simd.ones(d) == 1:
            ids[found] = start + simd.lowest_one(a | b | c | d) + WORD * ((b != 0) + 2 * (c != 0) + 3 * (d != 0))
            found += 1
        else:
            found = spell(a, start, ids, found)
            found = spell(b, start + WORD, ids, found)
            found = spell(c, start + 2 * WORD, ids, found)
            found = spell(d, start + 3 * WORD, ids, found)
    for i in range(found):
        work.scores[i] = score(work, ids[i])
    return found


@jit
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
def count(cut: Any, work: Any) -> Any:
    """How many scores are at or above a cut."""
    found = 0
    for group in range(work.tops.size):
        if work.tops[group] >= cut:
            found += simd.count(work.at[group], 0, cut)
    return found


@jit
def gather_between(cut: Any, up: Any, work: Any) -> Any:
    """As ``gather``, without those at or above ``up``."""
    found = 0
    for group in range(work.tops.size):
        if work.tops[group] >= cut:
            for start in range(0, GROUP, LANES):
                at = work.at[group]
                bits = simd.at_least(at, start, cut) & ~simd.at_least(at, start, up)
                while bits != 0:
                    work.ids[found] = group * GROUP + start + simd.lowest_bit(bits)
                    work.scores[found] = score(work, work.ids[found])
                    found += 1
                    bits &= bits - 1
    return found


@loose
def at_most(masses: Any, each: Any) -> Any:
    """The sum of masses, where no more than ``each`` counts of one."""
    total = 0.0
    for group in range(masses.size):
        total += min(np.float64(masses[group]), each)
    return total


@jit
def bound(masses: Any, top: Any, t: Any, rest: Any) -> Any:
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = -30.0, 0.0
    for _ in range(12):
        middle = (low + high) / 2
        if at_most(masses, GROUP * math.exp(middle)) <= rest:
            low = middle
        else:
            high = middle
    return np.float32(top + low * t)
