"""Finding the token at which the weights reach a goal, without sorting. Tokens are as in ``keep``."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import BLOCK, extremes, inside, loose, told
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.select import stir
from nucleate.backends.cpu.staged.old import kernel

ALL, WRONG = -1, -2
BINS = 2048


@jit
def lowest_reaching(v: Any, w: Any, n: Any, above: Any, goal: Any, strict: Any) -> Any:
    """The lowest of n values at which the weights up to it reach a goal (strict: exceed it), and the sum before it.

    above: the sum before all of them. Shuffles both.
    """
    low, high, state = 0, n, np.int64(1)
    while True:
        one = stir(state)
        other = stir(one)
        state = stir(other)
        a, b, c = (
            v[low + (one * (high - low) >> 32)],
            v[low + (other * (high - low) >> 32)],
            v[low + (state * (high - low) >> 32)],
        )
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
