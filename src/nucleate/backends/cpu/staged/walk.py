"""Scales, cuts and a draw over a row as one kernel, which calls the rules of the stages by their addresses.

The same as ``fuse`` does step by step, for the pipelines of which ``straight`` makes a program. Knows no stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import LOWEST
from nucleate.backends.cpu.load import longs_at
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.staged import candidates, keep, summary
from nucleate.backends.cpu.staged.entries import say
from nucleate.backends.cpu.staged.old import kernel
from nucleate.backends.cpu.staged.races import draw
from nucleate.backends.cpu.staged.reach import ALL, BINS, reach
from nucleate.backends.cpu.staged.space import (
    BASE,
    COLUMNS,
    DRAW,
    FLOOR,
    IDS,
    KEYS,
    LONGEST,
    MASS,
    MOMENTS,
    ODD,
    ORDER,
    OTHER,
    PLACES,
    PREFIX,
    RULE,
    SCALE,
    SHAPE,
    SQUARE,
    STRICT,
    SUMS,
    TAIL,
    TARGET,
    TIES,
    TOPS,
    WANTS,
    WEIGHTS,
    Cut,
    Raw,
    V,
    W,
    X,
    doubles,
    floats,
    longs,
    tell,
    told,
)
from nucleate.backends.cpu.staged.uncut import listed, looked_at, of_groups, raw_row, scale_raw, score_at


@jit
def kept_row(cut: Any, wants: Any, i: Any, space: Any) -> None:
    """What rules ask of the tokens that are left."""
    five = doubles(space, W, 5)
    asked = wants & (MASS | MOMENTS) | (MASS if wants & SQUARE else 0)
    if asked:
        summary.statistics(doubles(space, X, cut.m), cut.m, cut.top, asked, five)
    tell(told(space, i), np.float64(cut.m), five[0], five[1], five[2], five[3], five[4])


@jit
def scale_kept(cut: Any, i: Any, steps: Any, space: Any) -> Any:
    x, said, ids = doubles(space, X, cut.m), doubles(space, OTHER, cut.m), longs(space, IDS, cut.m)
    say(steps, i, RULE, told(space, i), x, cut.m, cut.top, said)
    top, low = summary.scan(said, cut.m)
    if not top < np.inf:
        return Cut(ODD, top)
    for place in range(cut.m):
        x[place] = said[place]
    m = cut.m
    if low == -np.inf:
        m = keep.keep_above(x, ids, m, 0.0, LOWEST, x, ids)
    return Cut(m, top)


@jit
def floor(raw: Any, cut: Any, i: Any, steps: Any, space: Any) -> Any:
    said = doubles(space, OTHER, 1)
    say(steps, i, RULE, told(space, i), said, 0, 0.0, said)
    least = said[0]
    if not least <= 0.0:
        return Cut(ODD, 0.0)
    if cut.m == 0:
        tops, tail = of_groups(raw, space)
        if least == -np.inf or candidates.all_reach(raw.x, tail, tops, score_at(raw, least, 1)):
            return cut
        cut = listed(raw, score_at(raw, least, -1), steps, space)
    x, ids = doubles(space, X, cut.m), longs(space, IDS, cut.m)
    return Cut(keep.keep_above(x, ids, cut.m, cut.top, least, x, ids), cut.top)


@jit
def prefix(raw: Any, before: Any, i: Any, steps: Any, space: Any) -> Any:
    said, strict, plain = doubles(space, OTHER, 1), steps[i, STRICT] != 0, steps[i, ORDER] == 0
    say(steps, i, TARGET, told(space, i), said, 0, 0.0, said)
    goal = said[0]
    if not goal > 0.0:
        return Cut(ODD, 0.0)
    cut = looked_at(raw, goal, i, steps, space) if before.m == 0 else before
    m, row = cut.m, told(space, i)
    x, ids, base, weights = (
        doubles(space, X, m), longs(space, IDS, m), doubles(space, BASE, raw.x.size), doubles(space, WEIGHTS, m),
    )  # fmt: skip
    say(steps, i, RULE, row, x, m, cut.top, weights)
    order, sign = x if plain else doubles(space, KEYS, m), -1.0 if plain else 1.0
    if not plain:
        say(steps, i, ORDER, row, x, m, cut.top, order)
    v, w, places, sums = (
        doubles(space, V, m), doubles(space, W, m), longs(space, PLACES, max(m, GROUP)), doubles(space, SUMS, BINS),
    )  # fmt: skip
    place = reach(order, sign, weights, x, ids, base, m, goal, strict, v, w, places, sums)
    if place < 0:
        return before if place == ALL else Cut(ODD, 0.0)
    m = keep.keep_until(order, sign, x, ids, base, m, place, strict, steps[i, TIES] != 0, x, ids)
    return Cut(m, cut.top if plain else summary.scan(x, m)[0])


@kernel
def walk(x: Any, program: Any, count: Any, space: Any, seed: Any, step: Any) -> Any:
    """The token drawn from a row, or ODD where it is for others to say.

    x: float32 [V]. program, space: addresses, see ``straight`` and ``room.control``. seed, step: uint64. How many
    tokens were left before the draw is in the last of the rows; 0: all.
    """
    steps, tops = carray(longs_at(program), (count, COLUMNS)), floats(space, TOPS, (x.size + GROUP - 1) // GROUP)
    highest = candidates.tops_of(x, floats(space, TAIL, GROUP), tops)
    if not -np.inf < highest < np.inf:
        return ODD
    weighed = told(space, LONGEST)
    weighed[2] = 0.0
    raw, cut = Raw(x, highest, 1.0, 0.0, 0), Cut(0, 0.0)
    for i in range(count):
        wants, shape = steps[i, WANTS], steps[i, SHAPE]
        if cut.m and shape != DRAW:
            kept_row(cut, wants, i, space)
        elif cut.m == 0:
            raw_row(raw, wants, weighed, i, space)
        if shape == FLOOR:
            cut = floor(raw, cut, i, steps, space)
        elif shape == PREFIX:
            cut = prefix(raw, cut, i, steps, space)
        elif shape == SCALE and cut.m:
            cut = scale_kept(cut, i, steps, space)
        elif shape == SCALE:
            raw, weighed[2] = scale_raw(raw, i, steps, space), 0.0
        if cut.m < 0 or raw.slope == 0.0:
            return ODD
    weighed[7] = cut.m
    return draw(raw, cut, count - 1, steps, seed, step, space)
