"""Finds the tokens at or above a threshold, and the shortest prefix of the ranking that reaches a number or a weight.

Only groups whose maximum reaches the threshold are read. The prefix is found by bisection: passes that only count are
branch-free vector loops, and about ten of them are faster than one pass that moves data.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.jit.compiler import inline, jit, loose
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.block_ops import WORD
from nucleate.sampling.backends.numba.fused.workspace import INEXACT, NOBODY, address_of, edit_of, score
from nucleate.sampling.backends.numba.vector_lanes import GROUP, LANES

DOUBTS = 64
"""So many tokens may be in doubt."""

BY_NUMBER, BY_WEIGHT = 0.0, -1.0

LOWEST = np.finfo(np.float32).min
"""What is at or above it is in: -inf is not."""

ALL = np.float32(np.inf)

ENDLESS = np.int64(0x7FFFFFFFFFFFFFFF)


@inline
def ordered(x: Any) -> Any:
    """The bits of a float64 as an integer that is ordered as it is."""
    bits = np.float64(x + 0.0).view(np.int64)  # of -0.0 it makes 0.0
    return bits ^ ((bits >> 63) & ENDLESS)


@inline
def floating(place: Any) -> Any:
    """The inverse of ``ordered``."""
    return np.int64(place ^ ((place >> 63) & ENDLESS)).view(np.float64)


@inline
def next_up(x: Any) -> Any:
    """The float32 that follows x, which is not infinite, upwards."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)  # of -0.0 it makes 0.0
    return np.int32(bits + (1 if bits >= 0 else -1)).view(np.float32)


@jit
def rounded(x: Any, up: Any) -> Any:
    """The float32 next to a number, or itself, upwards or downwards, but LOWEST at least."""
    near = np.float32(max(x, np.float64(LOWEST)))
    if np.float64(near) < x and up:
        near = next_up(near)
    elif np.float64(near) > x and not up:
        near = -next_up(-near)
    return max(near, LOWEST)


@jit
def gather(cut: Any, up: Any, work: Any) -> Any:
    """Put the ids of all scores from a cut to below another into ``ids``, ascending, these into ``scores``, as float64,
    and 1 into ``weights``; returns how many.

    Without branches that would be guessed wrong at every other group: those that reach the cut are listed first. Most
    of these have one score, or some in every part.
    """
    ids, groups, count, found = work.ids, work.groups, 0, 0
    for group in range(work.tops.size):
        groups[count] = group
        count += work.tops[group] >= cut
    for i in range(count):
        start, at = groups[i] * GROUP, address_of(groups[i], work)
        a, b = word_between(at, cut, up), word_between(at + 4 * WORD, cut, up)
        c, d = word_between(at + 8 * WORD, cut, up), word_between(at + 12 * WORD, cut, up)
        if block_ops.ones(a) + block_ops.ones(b) + block_ops.ones(c) + block_ops.ones(d) == 1:
            ids[found] = start + block_ops.lowest_one(a | b | c | d) + WORD * ((b != 0) + 2 * (c != 0) + 3 * (d != 0))
            found += 1
        else:
            found = spell(a, start, ids, found)
            found = spell(b, start + WORD, ids, found)
            found = spell(c, start + 2 * WORD, ids, found)
            found = spell(d, start + 3 * WORD, ids, found)
    for i in range(found):
        work.scores[i], work.weights[i] = score(work, ids[i]), 1.0
    if work.state[INEXACT] > 0:
        for i in range(found):
            edit = edit_of(work, ids[i])
            work.scores[i] = work.values[edit] if edit >= 0 else work.scores[i]
    return found


@inline
def word_between(at: Any, cut: Any, up: Any) -> Any:
    return block_ops.word_at_least(at, cut) & ~block_ops.word_at_least(at, up)


@jit
def spell(bits: Any, start: Any, ids: Any, found: Any) -> Any:
    """Write the places of the bits that are set; four at a time, be they there or not. Returns where they end."""
    end = found + block_ops.ones(bits)
    while True:
        for i in range(4):
            ids[found + i] = start + block_ops.lowest_one(bits)
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
            at = address_of(group, work)
            for word in range(at, at + 4 * GROUP, 4 * WORD):
                found += block_ops.ones(block_ops.word_at_least(word, cut))
    return found


@jit
def kth_bound(k: Any, deviations: Any, work: Any) -> Any:
    """A score that at least k tokens most likely reach, and not many more: surely where groups are many.

    Else of a sample; so many standard deviations more tokens than k are taken, where some are counted for all.
    """
    if 2 * k <= work.tops.size:
        return rounded(reached(work.tops, k), True)
    found = 0  # some of every other group
    for group in range(0, work.size // GROUP, 2):
        start = group * GROUP + group % (GROUP // LANES) * LANES
        for i in range(LANES):
            work.scores[found + i] = score(work, start + i)
        found += LANES
    place = k * (found / work.size)
    place += deviations * math.sqrt(place) + 1.0
    return rounded(reached(work.scores[:found], int(place)), True) if place <= found else LOWEST


class PrefixShare(NamedTuple):
    """The first of some numbers, the highest: those at or above ``high``, and some of those from ``low`` on."""

    low: Any
    high: Any
    need: Any  #: how many of those


@jit
def reached(values: Any, k: Any) -> Any:
    """A number that at least k of some reach; of others at most an eighth more, but for equal ones."""
    return share(values, values, np.float64(k), np.float64(k >> 3)).low


@jit
def share(values: Any, weights: Any, goal: Any, spare: Any) -> Any:
    """The fewest first numbers whose weights (or number) reach a goal; equal ones weigh the same.

    spare: so much more than the goal is as good; BY_WEIGHT: weights count, else the number does.
    """
    by_weight = spare < 0.0
    low, high = ends(values, -ENDLESS, ENDLESS)
    inside, above, light = values.size, 0, 0.0
    heavy = heavier(values, weights, -np.inf) if by_weight else 0.0
    for turn in range(1, 90):
        if low + 1 >= high or inside - above <= 1:
            break
        if turn % 8 == 0:  # few numbers, many times?
            low, high = ends(values, low, high)
            continue
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found = how_many(values, floating(middle))
        weight = heavier(values, weights, floating(middle)) if by_weight else np.float64(found)
        if weight >= goal:
            low, inside, heavy = middle, found, weight
            if weight <= goal + spare:
                break
        else:
            high, above, light = middle, found, weight
    count = inside - above
    if not by_weight:
        return PrefixShare(floating(low), floating(high), min(count, np.int64(goal - light)))
    each = (heavy - light) / count
    need = max(1, min(count, np.int64(math.ceil((goal - light) / each)))) if each > 0.0 else count
    return PrefixShare(floating(low), floating(high), need)


@jit
def ends(values: Any, least: Any, most: Any) -> Any:
    """Of numbers from one to below another, all as ``ordered``: the lowest, and what follows the highest."""
    low, high = np.int64(most), np.int64(least)
    for i in range(values.size):
        place = ordered(np.float64(values[i]))
        low = min(low, place if place >= least else most)
        high = max(high, place if place < most else least)
    return low, high + 1


@jit
def how_many(values: Any, cut: Any) -> Any:
    found = 0
    for i in range(values.size):
        found += values[i] >= cut
    return found


@loose
def heavier(values: Any, weights: Any, cut: Any) -> Any:
    """The weight of those at or above a cut."""
    total = 0.0
    for i in range(values.size):
        total += weights[i] if values[i] >= cut else 0.0
    return total


@jit
def keep_first(n: Any, goal: Any, spare: Any, work: Any) -> Any:
    """Keep, of n candidates, the fewest first that reach the goal, see ``share``; they stay in ascending ids."""
    ids, weights, scores = work.ids, work.weights, work.scores
    first = share(scores[:n], weights[:n], goal, spare)
    need, kept = first.need, 0
    for i in range(n):
        x = scores[i]
        ids[kept], weights[kept], scores[kept] = ids[i], weights[i], x
        in_question = (x >= first.low) & (x < first.high)
        kept += (x >= first.high) | (in_question & (need > 0))
        need -= in_question
    return kept


@jit
def last_of(n: Any, work: Any) -> Any:
    """The place of the last of n candidates in the order, but for doubtful ones; NOBODY if there is none."""
    last, x = NOBODY, np.inf
    for i in range(n):
        if work.scores[i] <= x and work.weights[i] > 0.0:
            last, x = i, work.scores[i]
    return last


@jit
def doubt(n: Any, total: Any, goal: Any, work: Any) -> Any:
    """Make the weights of those of n candidates negative before which others may reach the goal: they may be out.

    total: the weight of all of them, and of those before them. False if they are too many to be listed.
    """
    for _ in range(DOUBTS):
        last = last_of(n, work)
        if last == NOBODY:
            return True
        total -= work.weights[last]
        if total < goal:
            return True
        work.weights[last] = -work.weights[last]
    return False
