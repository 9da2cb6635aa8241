"""The last token of a prefix of the order, where too many tokens are in question to look at one by one.

Passes over the row weigh what is at or above several scores at once, and close in on the one where the goal
is reached, until few tokens are left between two of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.special.select import FEW, count, gather_between, next_up
from nucleate.backends.cpu.special.share import BY_WEIGHT, doubt, keep_first, last_of
from nucleate.backends.cpu.special.work import DOUBTED

CUTS = 8
"""Scores that one pass looks at."""


@jit
def section(cut: Any, above: Any, up: Any, reached: Any, least: Any, goal: Any, exponent: Any, work: Any) -> Any:
    """Between which of some cuts the goal is reached: (the lower, the weight above the upper, it, the lower's)."""
    cuts, sums = work.cuts, work.sums
    sums[:] = 0.0
    for group in range(work.tops.size):
        if work.tops[group] >= cuts[CUTS - 1]:
            at = work.at[group]
            simd.masses_above(at, 0, exponent.top, exponent.high, exponent.low, exponent.least, cuts, sums)
    for i in range(CUTS):
        if sums[i] >= goal:
            if cuts[i] > cut:
                cut, reached = cuts[i], sums[i]
            break
        if sums[i] < least and cuts[i] < up:
            up, above = cuts[i], sums[i]
    return cut, above, up, reached


@jit
def close_in(cut: Any, top: Any, reached: Any, least: Any, goal: Any, exponent: Any, work: Any) -> Any:
    """Gather the tokens around that at which a goal is reached: (how many, the weight of those above, where these end).

    cut: it is not below, where ``reached`` is reached. least: the goal may be as low.
    """
    above, up = 0.0, next_up(top)
    for turn in range(60):
        if next_up(cut) >= up or count(cut, work) - count(up, work) <= FEW:
            break
        if turn > 1:  # few scores, many times?
            work.cuts[0], work.cuts[1] = np.float32(np.inf), np.float32(-np.inf)
            for group in range(work.tops.size):
                if work.tops[group] >= cut:
                    simd.span(work.at[group], 0, cut, up, work.cuts)
            cut, up = work.cuts[0], next_up(work.cuts[1])
            if next_up(cut) >= up:
                break
        part = (goal - above) / (reached - above)
        place_cuts(work.cuts, np.float64(cut), np.float64(up), part, turn % 3)
        cut, above, up, reached = section(cut, above, up, reached, least, goal, exponent, work)
    return gather_between(cut, up, work), above, up


@jit
def settle_last(n: Any, above: Any, least: Any, goal: Any, work: Any) -> Any:
    """Where, among n candidates with weights, the goal is reached: (place, whether that is told).

    Those before which others may reach it are listed.
    """
    total = above
    for i in range(n):
        total += work.weights[i]
    kept = keep_first(n, goal - above, BY_WEIGHT, work) if goal < total else n
    total, last = above, last_of(kept, work)
    for i in range(kept):
        total += work.weights[i]
    token, told, listed = work.ids[last], doubt(kept, total, least, work), 0
    for i in range(kept):
        if work.weights[i] < 0.0:
            work.doubts[listed] = work.ids[i]
            listed += 1
    work.state[DOUBTED] = listed
    return token, told


@jit
def place_cuts(cuts: Any, low: Any, high: Any, part: Any, turn: Any) -> None:
    """Cuts between two, from above: first at equal distances, then close around where the weight should be."""
    if turn == 1:
        guess, near, middle = high + (low - high) * min(max(part, 0.0), 1.0), (high - low) / 64, (CUTS - 1) / 2
        for i in range(CUTS):
            cuts[i] = np.float32(min(max(guess + near * (middle - i) * abs(middle - i) / 2, low), high))
    else:
        for i in range(CUTS):
            cuts[i] = np.float32(high + (low - high) * (i + 1) / (CUTS + 1))
