"""The last token of a prefix of the order, where too many tokens are in question to look at one by one.

Passes over the row weigh, or count, what is at or above several scores at once, and close in on the one where the goal
is reached, until few tokens are left between two of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.select import FEW, ID, count, floating, gather_between, kth_highest, next_up
from nucleate.backends.cpu.special.share import share

LEFT = 512
"""So few tokens between two scores are looked at one by one."""

SAMPLE = 512


@jit
def last_by_weight(row: Any, cut: Any, whole: Any, p: Any, t: Any, exponent: Any, work: Any) -> Any:
    """The token at which the first ones reach a part p of a weight. cut: it is not below; whole: of it, 0: theirs."""
    top, high, low, least = exponent
    if whole == 0.0:
        for group in range(work.tops.size):
            whole += simd.mass_above(row, group * GROUP, top, high, low, least, cut)
    cut = max(cut, np.float32(np.float64(top) - 30.0 * t))  # what is further below weighs less than the slack
    return close_in(row, cut, 0.0, next_up(top), whole, p * whole, False, t, exponent, work)


@jit
def last_by_count(row: Any, top: Any, k: Any, work: Any, exponent: Any) -> Any:
    """The k-th token of the order; ID where there are no more."""
    inside = count(row, work.tops, np.finfo(np.float32).min)
    if inside <= k:
        return ID
    cut, above, up, reached = np.finfo(np.float32).min, 0.0, next_up(top), np.float64(inside)
    if reached > LEFT:
        sample(row.x, k, np.float64(inside), work)
        cut, above, up, reached = section(row, cut, above, up, reached, np.float64(k), True, exponent, work)
    return close_in(row, cut, above, up, reached, np.float64(k), True, 1.0, exponent, work)


@jit
def sample(x: Any, k: Any, inside: Any, work: Any) -> None:
    """Cuts around the k-th highest score, as some scores have it."""
    stride = max(1, x.size // SAMPLE)
    found = 0
    for i in range(0, x.size, stride):
        work.weights[found] = x[i]
        found += x[i] > -np.inf
    place = k * (found / inside)
    most = min(found, int(place + 5.0 * math.sqrt(place)) + 8)
    if found == 0:
        work.cuts[:] = np.finfo(np.float32).min
        return
    kth_highest(work.weights[:found], work.others, most)
    best = work.others[:most]
    best.sort()
    for i in range(8):
        rank = place + (1.1 * i - 1.6) * math.sqrt(place) + (i - 1)
        work.cuts[i] = np.float32(best[most - 1 - min(max(int(rank), 0), most - 1)])


@jit
def section(
    row: Any, cut: Any, above: Any, up: Any, reached: Any, goal: Any, counting: Any, exponent: Any, work: Any
) -> Any:
    """Between which of some cuts the goal is reached: (the lower, the weight above the upper, it, the lower's)."""
    cuts, sums = work.cuts, work.sums
    top, high, low, least = exponent
    sums[:] = 0.0
    used = 4 if counting else 8
    for group in range(work.tops.size):
        if work.tops[group] >= cuts[used - 1]:
            if counting:
                simd.four_counts(row, group * GROUP, cuts, sums)
            else:
                simd.masses_above(row, group * GROUP, top, high, low, least, cuts, sums)
    for i in range(used):
        if sums[i] >= goal:
            if cuts[i] > cut:
                cut, reached = cuts[i], sums[i]
            break
        if cuts[i] < up:
            up, above = cuts[i], sums[i]
    return cut, above, up, reached


@jit
def close_in(  # noqa: C901  # one loop, told in full
    row: Any, cut: Any, above: Any, up: Any, reached: Any, goal: Any, counting: Any, t: Any, exponent: Any, work: Any
) -> Any:
    """The token at which the goal is reached; it is in [cut, up). What is at or above ``up`` weighs ``above``."""
    for turn in range(60):
        left = reached - above if counting else count(row, work.tops, cut) - count(row, work.tops, up)
        if next_up(cut) >= up or left <= (LEFT if counting else FEW):
            break
        if turn > 1:  # few scores, many times?
            work.cuts[0], work.cuts[1] = np.float32(np.inf), np.float32(-np.inf)
            for group in range(work.tops.size):
                if work.tops[group] >= cut:
                    simd.span(row, group * GROUP, cut, up, work.cuts)
            cut, up = work.cuts[0], next_up(work.cuts[1])
            if next_up(cut) >= up:
                break
        part = (goal - above) / (reached - above)
        place_cuts(work.cuts, 4 if counting else 8, np.float64(cut), np.float64(up), part, turn % 3)
        cut, above, up, reached = section(row, cut, above, up, reached, goal, counting, exponent, work)
    n, top = gather_between(row, work.tops, cut, up, work.ids), np.float64(exponent.top)
    if next_up(cut) >= up:  # by id alone
        weight = 1.0 if counting else math.exp((np.float64(cut) - top) / t)
        for i in range(n - 1):
            above += weight
            if above >= goal:
                return work.ids[i]
        return work.ids[n - 1]
    for i in range(n):
        work.others[i] = row.x[work.ids[i]]
        work.weights[i] = 1.0 if counting else math.exp((work.others[i] - top) / t)
    first = share(work.others[:n], work.weights[:n], goal - above, -1.0, not counting)
    need = first.need
    for i in range(n):
        need -= floating(first.low) <= work.others[i] < floating(first.high)
        if need == 0:
            return work.ids[i]
    return work.ids[n - 1]


@jit
def place_cuts(cuts: Any, count: Any, low: Any, high: Any, part: Any, turn: Any) -> None:
    """Cuts between two, from above: first at equal distances, then close around where the weight should be."""
    if turn == 1:
        guess, near, middle = high + (low - high) * min(max(part, 0.0), 1.0), (high - low) / 64, (count - 1) / 2
        for i in range(count):
            cuts[i] = np.float32(min(max(guess + near * (middle - i) * abs(middle - i) / 2, low), high))
    else:
        for i in range(count):
            cuts[i] = np.float32(high + (low - high) * (i + 1) / (count + 1))
