"""The cuts of rows whose candidates fit a pool; the other rows are prepared for ``select``.

Floors, the k-th top and the tail of top-p follow from the groups of a row alone, and bound the cuts. Carries no meaning
of its own: tests hold it equal to the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton import histogram
from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_pool import (
    LAST,
    TILE,
    KeptRange,
    first,
    gather,
    inside,
    listed,
    loaded,
)
from nucleate.sampling.backends.triton.device_memory import weighing
from nucleate.sampling.backends.triton.float_bits import (
    ERROR,
    INFINITY,
    LOWEST,
    SLACK,
    fixed,
    floating,
    lowest,
    ordered,
)
from nucleate.sampling.backends.triton.histogram_selection import HIGH, LEAST, LOW, ORIGIN, PLACED, SCALE, TOP, UNIT

SPARE = tl.constexpr(1e-5)
"""The part of the partition function by which top-p's bound is on the safe side: more than SLACK + 2 ERROR."""
ALL = tl.constexpr(2.0**61)
"""What all weights of a row become together, about, in fixed point."""
FEW = tl.constexpr(128)
"""So many groups are worth a try to pool their tokens: of a flat row, which waits after that, it reads few."""


class GroupStats(NamedTuple):
    """What the first kernel stored of the groups of a row."""

    tops: Any  #: float32 [width]
    own: Any  #: float64 [width]: the sum of exp((x - top of the group) / t), t as of ``numbers.weighing``
    masses: Any  #: float64 [width]: the same from the top of the row
    moments: Any  #: the address of its moments


class CutBounds(NamedTuple):
    """What the cuts keep at most."""

    floor: Any  #: float32: the lowest score that min-p and top-n-sigma keep
    least: Any  #: float32: the highest known bound on the score of the k-th token, or the floor
    low: Any  #: float32: at or above ``least``; the cut is at or above it
    counted: Any  #: whether top-k may cut
    partition: Any  #: float64: the partition function of which top-p keeps a part; 0 where floors or top-k come first


@jit
def narrow(source, room, known, top, numbers, waiting, width: tl.constexpr):
    """What the cuts leave, and 1 for a row that is to wait, as its candidates are too many, or top-p nearly tied."""
    bound = bounds(known, top, numbers, source.size, width)
    kept, waits = KeptRange(bound.least, tl.full((), LAST, tl.int32)), tl.full((), 0, tl.int32)
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
    pool, kept, unsure = loaded(room, n), KeptRange(bound.low, tl.full((), LAST, tl.int32)), n < 0
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


@jit
def bounds(groups, top, numbers, size, width: tl.constexpr):
    lowest_kept = floor(groups, top, numbers, width)
    counted = (numbers.k > 0.0) & (numbers.k < size)
    least = lowest_kept
    if counted & (numbers.k <= tl.sum((groups.tops > -INFINITY).to(tl.int32), 0)):
        least = tl.maximum(least, kth(groups.tops, numbers.k, top))
    partition = tl.where(counted | (lowest_kept > LOWEST), 0.0, tl.sum(groups.masses, 0))
    low = least
    if (partition > 0.0) & (numbers.p < 1.0):
        low = tl.maximum(low, tail(groups.masses, (1.0 - numbers.p - SPARE) * partition, top, numbers.t))
    return CutBounds(lowest_kept, least, low, counted, partition)


@jit
def reaching(groups, low, numbers):
    """How many tokens reach a score at most: each weighs at least as much as it."""
    ratio_G = tl.exp((groups.tops.to(tl.float64) - low.to(tl.float64)) / weighing(numbers))
    return tl.sum(tl.where(groups.tops >= low, tl.minimum(groups.own * (1.0 + ERROR) * ratio_G, GROUP_SIZE), 0.0), 0)


@jit
def late(kept, top, numbers):
    """What the min-p after top-p leaves."""
    if numbers.late_m > 0.0:
        cut = lowest(top, numbers.t, tl.log(numbers.late_m) - SLACK)
        kept = KeptRange(tl.maximum(kept.cut, cut), tl.where(cut > kept.cut, LAST, kept.last))
    return kept


@jit
def floor(groups, top, numbers, width: tl.constexpr):
    """The lowest score that min-p and top-n-sigma keep."""
    cut = top * 0.0 + LOWEST
    if numbers.m > 0.0:
        cut = tl.maximum(cut, lowest(top, numbers.t, tl.log(numbers.m) - SLACK))
    if numbers.sigmas > 0.0:
        below = -numbers.sigmas * deviation(groups, top, width) / numbers.t - SLACK
        cut = tl.maximum(cut, lowest(top, numbers.t, below))
    return cut


@jit
def deviation(groups, top, width: tl.constexpr):
    """The population standard deviation of the scores that are in."""
    at_G, there_G = groups.moments + tl.arange(0, width), groups.tops > -INFINITY
    n_G = tl.load(at_G, mask=there_G, other=0.0)
    sum_G = tl.load(at_G + width, mask=there_G, other=0.0)
    square_G = tl.load(at_G + 2 * width, mask=there_G, other=0.0)
    off_G = tl.where(there_G, groups.tops, top).to(tl.float64) - top.to(tl.float64)
    n = tl.sum(n_G, 0)
    mean = tl.sum(sum_G + n_G * off_G, 0) / n
    square = tl.sum(square_G + off_G * (2.0 * sum_G + n_G * off_G), 0) / n
    return tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@jit
def kth(tops_G, k, top):
    """The k-th highest top: at least k tokens reach it."""
    low, high = ordered(top * 0.0 + LOWEST), ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((tops_G >= floating(middle)).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return floating(low)


@jit
def tail(masses_G, rest, top, t):
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = tl.full((), -40.0, tl.float64), tl.full((), 0.0, tl.float64)
    found = tl.full((), -INFINITY, tl.float64)
    for _ in range(20):
        middle = (low + high) / 2.0
        little = tl.sum(tl.minimum(masses_G, tl.exp(middle) * GROUP_SIZE), 0) <= rest
        found = tl.where(little, middle, found)
        low, high = tl.where(little, middle, low), tl.where(little, high, middle)
    return tl.maximum((top.to(tl.float64) + found * t).to(tl.float32), LOWEST)
