"""The fewest first of some tokens that reach a goal, by number or by weight: found by halving, with nothing moved.

A pass over all of them that only counts is made of vectors and has no branches; ten or so are faster than one that
moves numbers about. Knows no stage.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import BLOCK, bits_of, loose
from nucleate.backends.cpu.special.room import DOUBTS
from nucleate.backends.cpu.special.select import floating, ordered
from nucleate.backends.cpu.special.work import NOBODY
from nucleate.backends.cpu.squeeze import EIGHT, squeeze
from nucleate.backends.cpu.squeeze import how_many as how_many_bits

BY_NUMBER, BY_WEIGHT = 0.0, -1.0


class Share(NamedTuple):
    """The first of some numbers, the highest: those at or above ``high``, and some of those from ``low`` on."""

    low: Any  #: as ``ordered``, as is high
    high: Any
    need: Any  #: how many of those


@jit
def reached(values: Any, k: Any) -> Any:
    """A number that at least k of some float32 reach; of others at most an eighth more, but for equal ones."""
    return floating(share(values, values, np.float64(k), np.float64(k >> 3)).low)


@jit
def share(values: Any, weights: Any, goal: Any, spare: Any) -> Any:
    """The fewest first numbers whose weights (or number) reach a goal; equal ones weigh the same.

    spare: so much more than the goal is as good; BY_WEIGHT: weights count, else the number does.
    """
    by_weight = spare < 0.0
    low, high = ends(values, -(1 << 31), 1 << 31)
    inside, above, light = values.size, 0, 0.0
    heavy = heavier(values, weights, -np.inf) if by_weight else 0.0
    for turn in range(40):
        if high - low <= 1 or inside - above <= 1:
            break
        if turn == 12:  # few numbers, many times?
            low, high = ends(values, low, high)
            continue
        middle = (low + high) >> 1
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
        return Share(low, high, min(count, np.int64(goal - light)))
    each = (heavy - light) / count
    return Share(low, high, max(1, min(count, np.int64(math.ceil((goal - light) / each)))) if each > 0.0 else count)


@jit
def ends(values: Any, least: Any, most: Any) -> Any:
    """Of numbers from one to below another, all as ``ordered``: the lowest, and what follows the highest."""
    low, high = np.int64(most), np.int64(least)
    for i in range(values.size):
        place = np.int64(ordered(np.float32(values[i]) + np.float32(0.0)))  # of -0.0 it makes 0.0
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
    least, sure, need, kept = np.float64(floating(first.low)), np.float64(floating(first.high)), first.need, 0
    full = 0
    if need == how_many(scores[:n], least) - how_many(scores[:n], sure):  # all of those in question
        full = n // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            found = bits_of(scores, start, n, 1.0, 0.0, least, np.nan)
            for place in range(start, start + BLOCK, EIGHT):
                bits = np.int32((found >> (place - start)) & 255)
                squeeze(bits, ids, place, ids, kept)
                squeeze(bits, weights, place, weights, kept)
                squeeze(bits, scores, place, scores, kept)
                kept += how_many_bits(bits)
    for i in range(full, n):
        x = scores[i]
        ids[kept], weights[kept], scores[kept] = ids[i], weights[i], x
        in_question = (x >= least) & (x < sure)
        kept += (x >= sure) | (in_question & (need > 0))
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
