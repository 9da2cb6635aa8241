"""Finds where top-p's cumulative weight reaches its target when there are too many candidates to list.

Passes over the row sum the weights above several thresholds at once, and narrow them down around the target until few
tokens remain between two of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.fused.prefix_selection import ALL, count, gather, heavier
from nucleate.sampling.backends.numba.fused.workspace import address_of, score
from nucleate.sampling.backends.numba.vector_lanes import GROUP, LANES

CUTS = 8
"""Scores that one pass looks at."""

FEW = 4096
"""More candidates than this are narrowed down by passes over the row, not one by one."""

TURNS = 7
"""Passes at most."""

SAMPLED = 32
"""Groups of which some scores say where to look first."""


@jit
def section(cut: Any, above: Any, up: Any, reached: Any, least: Any, goal: Any, exponent: Any, work: Any) -> Any:
    """Between which of some cuts the goal is reached: (the lower, the weight above the upper, it, the lower's)."""
    cuts, sums = work.cuts, work.sums
    sums[:] = 0.0
    top, high, low, none = exponent
    for group in range(work.tops.size):
        if work.tops[group] >= cuts[CUTS - 1]:
            at = address_of(group, work)
            block_ops.masses_above(at, top, high, low, none, np.int64(cuts.ctypes.data), np.int64(sums.ctypes.data))
    for i in range(CUTS):
        if sums[i] >= goal:
            if cuts[i] > cut:
                cut, reached = cuts[i], sums[i]
            break
        if sums[i] < least and cuts[i] < up:
            up, above = cuts[i], sums[i]
    return cut, above, up, reached


@jit
def close_in(cut: Any, reached: Any, least: Any, goal: Any, exponent: Any, work: Any) -> Any:
    """Gather the tokens around that at which a goal is reached: (how many, the weight of those above).

    cut: it is not below, where ``reached`` is reached. least: the goal may be as low.
    """
    above, up = 0.0, ALL
    for turn in range(TURNS):
        few = count(cut, work) - count(up, work) <= FEW
        if turn > 0 and not few:
            some = work.scores[: gather(cut, up, work)]
            few = some.min() == some.max()
        if few:
            break
        low, high = np.float64(cut), min(np.float64(up), np.float64(exponent.top))
        if turn == 0:
            guess = sampled(goal / reached, low, high, exponent, work)
        else:
            guess = high + (low - high) * min(max((goal - above) / (reached - above), 0.0), 1.0)
        place_cuts(work.cuts, low, high, guess, turn % 2 == 0)
        cut, above, up, reached = section(cut, above, up, reached, least, goal, exponent, work)
    return gather(cut, up, work), above


@jit
def sampled(part: Any, low: Any, high: Any, exponent: Any, work: Any) -> Any:
    """About where a part of the weight of all scores from a cut on is reached, by some of them."""
    n, step, power = 0, max(1, work.tops.size // SAMPLED), exponent.high * math.log(2.0)
    for group in range(0, work.tops.size, step):
        for i in range(LANES):
            x = np.float64(score(work, group * GROUP + group % LANES * LANES + i))
            if x >= low:
                work.scores[n], work.weights[n] = x, math.exp((x - exponent.top) * power)
                n += 1
    goal = part * heavier(work.scores[:n], work.weights[:n], low)
    for _ in range(10):
        middle = (low + high) / 2.0
        if heavier(work.scores[:n], work.weights[:n], middle) >= goal:
            low = middle
        else:
            high = middle
    return low


@jit
def place_cuts(cuts: Any, low: Any, high: Any, guess: Any, near: Any) -> None:
    """Cuts between two, from above: at equal distances, or close around where the weight should be."""
    step, middle = (high - low) / 64, (CUTS - 1) / 2
    for i in range(CUTS):
        if near:
            cuts[i] = np.float32(min(max(guess + step * (middle - i) * abs(middle - i) / 2, low), high))
        else:
            cuts[i] = np.float32(high + (low - high) * (i + 1) / (CUTS + 1))
