"""Bounds on the cuts of the chain that follow from the groups of a row alone: floors, the k-th top, the tail of top-p.

Carries no meaning of its own: tests hold it equal to the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.backends.cuda.special.floats import ERROR, INFINITY, LOWEST, floating, lowest, ordered
from nucleate.backends.cuda.special.memory import weighing
from nucleate.backends.cuda.special.pool import LAST, Kept
from nucleate.backends.cuda.special.stats import GROUP_SIZE
from nucleate.core import maths

SLACK = tl.constexpr(maths.SLACK)
SPARE = tl.constexpr(1e-5)
"""The part of the partition function by which top-p's bound is on the safe side: more than SLACK + 2 ERROR."""


class Groups(NamedTuple):
    """What the first kernel stored of the groups of a row."""

    tops: Any  #: float32 [width]
    own: Any  #: float64 [width]: the sum of exp((x - top of the group) / t), t as of ``numbers.weighing``
    masses: Any  #: float64 [width]: the same from the top of the row
    moments: Any  #: the address of its moments


class Bounds(NamedTuple):
    """What the cuts keep at most."""

    floor: Any  #: float32: the lowest score that min-p and top-n-sigma keep
    least: Any  #: float32: the highest known bound on the score of the k-th token, or the floor
    low: Any  #: float32: at or above ``least``; the cut is at or above it
    counted: Any  #: whether top-k may cut
    partition: Any  #: float64: the partition function of which top-p keeps a part; 0 where floors or top-k come first


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
    return Bounds(lowest_kept, least, low, counted, partition)


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
        kept = Kept(tl.maximum(kept.cut, cut), tl.where(cut > kept.cut, LAST, kept.last))
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
