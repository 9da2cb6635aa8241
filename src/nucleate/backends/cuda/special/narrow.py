"""The cuts of rows whose candidates fit a pool; the other rows are prepared for ``select``."""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.backends.cuda.special import histogram
from nucleate.backends.cuda.special.cuts import bounds, reaching
from nucleate.backends.cuda.special.floats import ERROR, INFINITY, fixed
from nucleate.backends.cuda.special.pool import LAST, TILE, Kept, first, gather, inside, listed, loaded
from nucleate.backends.cuda.special.select import HIGH, LEAST, LOW, ORIGIN, PLACED, SCALE, TOP, UNIT

ALL = tl.constexpr(2.0**61)
"""What all weights of a row become together, about, in fixed point."""
FEW = tl.constexpr(128)
"""So many groups are worth a try to pool their tokens: of a flat row, which waits after that, it reads few."""


@jit
def narrow(source, room, known, top, numbers, waiting, width: tl.constexpr):
    """What the cuts leave, and 1 for a row that is to wait, as its candidates are too many, or top-p nearly tied."""
    bound = bounds(known, top, numbers, source.size, width)
    kept, waits = Kept(bound.least, tl.full((), LAST, tl.int32)), tl.full((), 0, tl.int32)
    if bound.counted | (numbers.p < 1.0):
        found, waits = listed(known.tops >= bound.low, room, width), waits + 1
        if (found <= FEW) | (reaching(known, bound.low, numbers) <= TILE):
            n = gather(source, room, found, bound.low)
            if n <= TILE:
                kept, unsure = cut_pool(room, n, bound, known, top, numbers)
                waits = unsure.to(tl.int32)
        if waits != 0:
            prepare(room, known, bound, top, numbers.t, waiting, width)
    return kept, waits


@jit
def cut_pool(room, n, bound, known, top, numbers):
    """What the cuts leave of a pool, and whether top-p would cut elsewhere, were the partition function a bit off."""
    pool, kept, unsure = loaded(room, n), Kept(bound.low, tl.full((), LAST, tl.int32)), n < 0
    if bound.counted & (numbers.k < n):
        kept = first(pool, (pool.x > -INFINITY).to(tl.int64), numbers.k.to(tl.int64), top).kept
    if numbers.p < 1.0:
        unit = unit_of(tl.minimum(tl.sum(known.masses, 0), n.to(tl.float64)))
        weight = fixed(pool.x, top, numbers.t, unit)
        weight = tl.where(inside(pool.x, pool.ids, kept), weight, 0)
        amount = tl.sum(weight, 0)
        if bound.partition > 0.0:
            amount = (bound.partition * unit).to(tl.int64)
        goal = histogram.part(numbers.p, amount)
        found = first(pool, weight, goal, top)
        kept = found.kept
        if bound.partition > 0.0:
            off = goal.to(tl.float64) * (2.0 * ERROR)
            unsure = (found.before + off >= goal) | (found.through - off < goal)
    return kept, unsure


@jit
def prepare(room, known, bound, top, t, waiting, width: tl.constexpr):
    """Make a row ready for ``select``."""
    origin, end = around(known.tops, t)
    origin, end = tl.maximum(bound.low.to(tl.float64), origin), tl.minimum(end, top.to(tl.float64))
    view = histogram.scaled(bound.least, top, origin, tl.where(end > origin, end, top.to(tl.float64)))
    tl.store(waiting.views + ORIGIN, view.origin)
    tl.store(waiting.views + SCALE, view.scale)
    tl.store(waiting.views + UNIT, unit_of(tl.sum(known.masses, 0)))
    tl.store(waiting.views + LEAST, bound.least.to(tl.float64))
    tl.store(waiting.views + TOP, top.to(tl.float64))
    tl.store(waiting.flags + PLACED, 0)
    tl.store(waiting.flags + LOW, LAST)
    tl.store(waiting.flags + HIGH, -LAST)
    histogram.clear(waiting.counts, waiting.amounts)
    tl.debug_barrier()
    tl.store(room.groups + tl.arange(0, width), tl.zeros((width,), tl.int32))


@jit
def around(tops_G, t):
    """Two scores between which most tokens of a flat row are, by the mean and the mean deviation of the tops of groups.

    What is off by more than four deviations counts as that, so that a few outliers move neither. A guess: scores
    beyond it share a bin, and cost at most more reads.
    """
    there_G = tops_G > -INFINITY
    x_G, n = tl.where(there_G, tops_G, 0.0).to(tl.float64), tl.sum(there_G.to(tl.float64), 0)
    mean, off = tl.sum(x_G, 0) / n, tl.full((), INFINITY, tl.float64)
    for _ in range(12):
        y_G = tl.minimum(tl.maximum(x_G, mean - off), mean + off)
        mean = tl.sum(tl.where(there_G, y_G, 0.0), 0) / n
        off = 4.0 * tl.sum(tl.where(there_G, tl.abs(y_G - mean), 0.0), 0) / n
    off = tl.where(off > 0.0, off, 2.0 * t)
    return mean - 5.0 * off, mean + 1.5 * off


@jit
def unit_of(mass):
    """What a weight of 1 becomes in fixed point, where all weights together are no more than this."""
    return tl.full((), ALL, tl.float64) / tl.maximum(mass, 1.0)
