"""The cuts of the chain: what top-n-sigma, top-k, min-p and top-p leave of a row, as the groups of tokens bound it.

All of them keep a prefix of one order. From the groups follows a bound on the cut, and only groups that reach it are
looked at again. Carries no meaning of its own: tests hold it equal to the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY, LOWEST, exponent_of, floating, lowest, ordered
from nucleate.backends.cuda.special.pool import LAST, TILE, Kept, Pool, everything_from, first, gather, listed, reach
from nucleate.backends.cuda.special.stats import GROUP_SIZE
from nucleate.core import maths

SLACK = tl.constexpr(maths.SLACK)
SPARE = tl.constexpr(1e-5)
"""A part of all weight: so much more than top-p may cut is looked at, as the masses of groups are float32."""


class Numbers(NamedTuple):
    """The parameters of a row, float64; see ``plan.Numbers``."""

    t: Any
    sigmas: Any
    k: Any
    m: Any
    p: Any
    late_m: Any
    late_t: Any


class Groups(NamedTuple):
    """What the first kernel told of the groups of a row."""

    tops: Any  #: float32 [width]
    masses: Any  #: float64 [width]: the sum of exp((x - top of the row) / t)
    moments: Any  #: the address of its moments


@jit
def read(numbers: tl.tensor) -> Any:
    """The parameters of a row, at an address. One that is greedy has a temperature that can be divided by."""
    t, k = tl.load(numbers), tl.load(numbers + 2)
    greedy = (t == 0.0) | (k == 1.0)
    return Numbers(
        tl.where(greedy, 1.0, t), tl.load(numbers + 1), tl.where(greedy, 1.0, k), tl.load(numbers + 3),
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6),
    )  # fmt: skip


@jit
def narrow(
    source: tl.tensor, room: tl.tensor, groups: tl.tensor, top: tl.tensor, numbers: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """What the cuts leave."""
    k, p, t = numbers.k, numbers.p, numbers.t
    cut = floor(groups, top, numbers, width)
    floored = cut > LOWEST
    counted = (k > 0.0) & (k < source.size)
    whole = tl.where(counted | floored, 0.0, tl.sum(groups.masses, 0))  # of which top-p keeps a part; 0: what is left
    if counted & (k <= tl.sum((groups.tops > -INFINITY).to(tl.int32), 0)):
        cut = tl.maximum(cut, kth(groups.tops, k, top))
    if (whole > 0.0) & (p < 1.0):
        cut = tl.maximum(cut, bound(groups.masses, (1.0 - p - SPARE) * whole, top, t))
    found = listed(groups.tops, cut, room, width)
    n = gather(source, room, found, cut, top, t, p < 1.0)
    pool, kept = Pool(top, t, exponent_of(t), found, n <= TILE, n), everything_from(cut)
    if counted & (n > k):
        kept = first(source, room, pool, kept, k, False)
    if p < 1.0:
        if whole == 0.0:
            whole = reach(source, room, pool, kept, kept.cut, True)
        kept = first(source, room, pool, kept, p * whole * (1.0 - SLACK), True)
    if numbers.late_m > 0.0:
        late = lowest(top, t, tl.log(numbers.late_m) - SLACK)
        kept = Kept(tl.maximum(kept.cut, late), tl.where(late > kept.cut, LAST, kept.last))
    return kept


@jit
def floor(groups: tl.tensor, top: tl.tensor, numbers: tl.tensor, width: tl.constexpr) -> Any:
    """The lowest score that min-p and top-n-sigma keep."""
    cut = top * 0.0 + LOWEST
    if numbers.m > 0.0:
        cut = tl.maximum(cut, lowest(top, numbers.t, tl.log(numbers.m) - SLACK))
    if numbers.sigmas > 0.0:
        below = -numbers.sigmas * deviation(groups, top, width) / numbers.t - SLACK
        cut = tl.maximum(cut, lowest(top, numbers.t, below))
    return cut


@jit
def deviation(groups: tl.tensor, top: tl.tensor, width: tl.constexpr) -> Any:
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
def kth(tops_G: tl.tensor, k: tl.tensor, top: tl.tensor) -> Any:
    """The k-th highest top: at least k tokens reach it."""
    low, high = ordered(top * 0.0 + LOWEST), ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((tops_G >= floating(middle)).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return floating(low)


@jit
def bound(masses_G: tl.tensor, rest: tl.tensor, top: tl.tensor, t: tl.tensor) -> Any:
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = tl.full((), -40.0, tl.float64), tl.full((), 0.0, tl.float64)
    found = tl.full((), -INFINITY, tl.float64)
    for _ in range(20):
        middle = (low + high) / 2.0
        little = tl.sum(tl.minimum(masses_G, tl.exp(middle) * GROUP_SIZE), 0) <= rest
        found = tl.where(little, middle, found)
        low, high = tl.where(little, middle, low), tl.where(little, high, middle)
    return tl.maximum((top.to(tl.float64) + found * t).to(tl.float32), LOWEST)
