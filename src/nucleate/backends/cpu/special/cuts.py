"""The cuts of the chain: what temperature, top-n-sigma, top-k, min-p and top-p leave of a row.

All of these keep a prefix of one order, so the row is read once for the highest score of each group of 256; from these
follows a bound on the cut, and only groups that reach it are looked at again. Scores stay as they are: everything is
said of d = (x - top) / t. Carries no meaning of its own: tests hold it equal to the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import exp
from nucleate.backends.cpu.simd import GROUP, LANES
from nucleate.backends.cpu.special.sections import last_by_count, last_by_weight
from nucleate.backends.cpu.special.select import FEW, ID, bound, count, gather, lowest_at_least
from nucleate.backends.cpu.special.share import keep_first, reached
from nucleate.backends.cpu.special.table import NOT_DRAWN
from nucleate.core.maths import SLACK

SURE = 2.5
"""Standard deviations: so many more tokens than k are taken, where some are counted for all."""

LOWEST = np.finfo(np.float32).min
"""What is at or above it is in: -inf is not."""


class Chain(NamedTuple):
    """The parameters of a row; neutral ones do nothing."""

    t: Any  #: temperature; 0 takes the first token
    sigmas: Any  #: top-n-sigma; 0 keeps all
    k: Any  #: top-k; 0 keeps all
    m: Any  #: min-p; 0 keeps all
    p: Any  #: top-p; 1 keeps all
    late_m: Any  #: min-p after top-p
    late_t: Any  #: temperature after the cuts; 1 does nothing


class Exponent(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t): what the vectors need to know."""

    top: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    least: Any  #: what is further below has no weight


class Kept(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    cut: Any  #: float32
    last: Any
    n: Any  #: how many, if they are in ``work.ids``, ascending, with weights; else one of the following


MANY, WEIGHED = -1, -2
"""They are too many to be listed; they are all of them, and groups are weighed."""


@jit
def exponent_of(top: Any, t: Any) -> Any:
    c = 1.4426950408889634 / t
    high = np.float32(c)
    return Exponent(top, high, np.float32(c - np.float64(high)), np.float32(-126.0 / c))


@jit
def narrow(row: Any, top: Any, chain: Any, work: Any) -> Any:
    """What the cuts leave."""
    size, exponent = row.x.size, exponent_of(top, chain.t)
    below = floor(row, top, chain, work)
    late = cut_at(top, math.log(chain.late_m) - SLACK, chain.t) if chain.late_m > 0.0 else LOWEST
    cut = cut_at(top, below, chain.t) if below > -np.inf else LOWEST
    whole = 0.0
    counted = 0 < chain.k < size
    last, bounded, floored = ID, LOWEST, cut
    if counted:
        bounded = kth_bound(row, chain.k, work)
        cut = max(cut, bounded)
    elif below == -np.inf:
        if chain.p < 1.0:
            whole = weigh(row, exponent, work)
            cut = max(cut, bound(work.tops, work.masses, np.float64(top), chain.t, (1.0 - chain.p) * whole))
        elif chain.late_m == 0.0:
            weigh(row, exponent_of(top, chain.t * chain.late_t), work)
            return Kept(LOWEST, ID, WEIGHED)
    if whole != 0.0 or chain.p >= 1.0:  # else those below weigh too
        cut, lowest = max(cut, late), cut
    else:
        lowest = cut
    if not counted and count(row, work.tops, cut) > FEW:
        if chain.p >= 1.0:
            return Kept(cut, ID, MANY)
        last = last_by_weight(row, lowest, whole, chain.p * (1.0 - SLACK), chain.t, exponent, work)
        return Kept(late, ID, MANY) if row.x[last] < late else Kept(row.x[last], last, MANY)
    found = gather(row, work.tops, cut, work.ids, work.keys)
    if counted and not sure(chain.k, work) and cut == bounded and not chain.k <= found <= chain.k + FEW:
        bounded, last = kth_counted(row, top, chain.k, work)
        cut = max(floored, bounded, late if chain.p >= 1.0 else LOWEST)
        found = gather(row, work.tops, cut, work.ids, work.keys)
    if last != ID and row.x[last] == cut:
        found = drop_after(row.x, cut, last, found, work.ids)
    return Kept(cut, ID, keep_few(row.x, found, whole, late, chain, np.float64(top), work))


@jit
def drop_after(x: Any, cut: Any, last: Any, n: Any, ids: Any) -> Any:
    """Drop, of n tokens, those at the cut that come after the last one; how many are left."""
    kept = 0
    for i in range(n):
        ids[kept] = ids[i]
        kept += x[ids[i]] > cut or ids[i] <= last
    return kept


@jit
def cut_at(top: Any, below: Any, t: Any) -> Any:
    """The lowest score whose d is at least ``below``."""
    return max(lowest_at_least(np.float64(top), below * t), LOWEST)


@jit
def read(row: Any, tops: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, wrong = np.float32(-np.inf), False
    for group in range(tops.size):
        best = simd.top(row, group * GROUP)
        tops[group] = best
        wrong |= not best < np.inf
        top = max(top, best)
    return np.float32(np.nan) if wrong else top


@jit
def first(row: Any, tops: Any, top: Any) -> Any:
    """The lowest id that has the highest score."""
    for group in range(tops.size):
        if tops[group] == top:
            for token in range(group * GROUP, min(group * GROUP + GROUP, row.x.size)):
                if row.x[token] == top:
                    return token
    return NOT_DRAWN


@jit
def floor(row: Any, top: Any, chain: Any, work: Any) -> Any:
    """The lowest d that min-p and top-n-sigma keep."""
    below = -np.inf
    if chain.m > 0.0:
        below = math.log(chain.m) - SLACK
    if chain.sigmas > 0.0:
        below = max(below, -chain.sigmas * deviation(row, top, work) / chain.t - SLACK)
    return below


@jit
def deviation(row: Any, top: Any, work: Any) -> Any:
    """The population standard deviation of the scores that are in."""
    work.sums[:3] = 0.0
    for group in range(work.tops.size):
        if work.tops[group] > -np.inf:
            simd.moments(row, group * GROUP, top, work.sums)
    mean = work.sums[1] / work.sums[0]
    return math.sqrt(max(work.sums[2] / work.sums[0] - mean * mean, 0.0))


@jit
def kth_cut(row: Any, top: Any, k: Any, work: Any) -> Any:
    """(a score that at least k tokens reach, or all; the k-th token, if it has that score, or ID)."""
    cut = kth_bound(row, k, work)
    well = sure(k, work) or k <= count(row, work.tops, cut) <= k + FEW
    return (cut, ID) if well else kth_counted(row, top, k, work)


@jit
def sure(k: Any, work: Any) -> Any:
    """Whether ``kth_bound`` is told by the highest of the groups, so that it is more than likely."""
    return k <= work.tops.size // 2


@jit
def kth_bound(row: Any, k: Any, work: Any) -> Any:
    """A score that at least k tokens most likely reach, and not many more."""
    return reached(work.tops, k) if sure(k, work) else max(likely(row.x, k, work), LOWEST)


@jit
def kth_counted(row: Any, top: Any, k: Any, work: Any) -> Any:
    """As ``kth_cut``, where nothing is likely."""
    last = last_by_count(row, top, k, work, exponent_of(top, 1.0))
    return (LOWEST, ID) if last == ID else (row.x[last], last)


@jit
def likely(x: Any, k: Any, work: Any) -> Any:
    """A score that at least k tokens most likely reach, and not many more: as some of every other group have it."""
    some, found = work.others.view(np.float32), 0
    for group in range(0, x.size // GROUP, 2):
        start = group * GROUP + group % (GROUP // LANES) * LANES
        for i in range(LANES):
            some[found + i] = x[start + i]
        found += LANES
    place = k * (found / x.size)
    place += SURE * math.sqrt(place) + 1.0
    return reached(some[:found], int(place)) if place <= found else LOWEST


@jit
def weigh(row: Any, exponent: Any, work: Any) -> Any:
    """The weight of each group; returns that of all."""
    whole = 0.0
    for group in range(work.masses.size):
        mass = simd.mass(row, group * GROUP, exponent.top, exponent.high, exponent.low, exponent.least)
        work.masses[group] = mass
        whole += mass
    return whole


@jit
def keep_few(x: Any, n: Any, whole: Any, late: Any, chain: Any, top: Any, work: Any) -> Any:
    """How many of n candidates are left; their ids are in ``work``, and there also come the weights of the draw.

    whole: what top-p keeps a part of; 0: all that top-k left. late: the score below which min-p after top-p cuts.
    """
    ids, weights = work.ids, work.weights
    if 0 < chain.k < n:
        n = keep_first(x, ids, weights, work.others, n, np.float64(chain.k), False)
    weigh_each(x, ids, weights, n, top, chain.t)
    if chain.p < 1.0:
        total = whole
        if whole == 0.0:
            for i in range(n):
                total += weights[i]
        n = keep_first(x, ids, weights, work.others, n, chain.p * total * (1.0 - SLACK), True)
    if chain.late_m == 0.0 and chain.late_t == 1.0:
        return n
    kept = 0
    for i in range(n):
        if x[ids[i]] >= late:
            ids[kept] = ids[i]
            kept += 1
    weigh_each(x, ids, weights, kept, top, chain.t * chain.late_t)
    return kept


@jit
def weigh_each(x: Any, ids: Any, weights: Any, n: Any, top: Any, t: Any) -> None:
    """The weights of n tokens."""
    for i in range(n):
        weights[i] = np.float64(x[ids[i]])
    for i in range(n):  # a loop of its own, so that it becomes vectors
        weights[i] = exp((weights[i] - top) / t)
