"""The cuts of the chain: what temperature, top-n-sigma, top-k, min-p and top-p leave of a row.

All of these keep a prefix of one order, so the row is read once for the highest score of each group of 256; from these
follows a bound on the cut, and only groups that reach it are looked at again. Scores stay as they are: everything is
said of d = (x - top) / t. Carries no meaning of its own: tests hold it equal to the reference.

**Near ties.** Candidates have float64 scores, and top-k compares them exactly. A score is compared with the bound of
min-p and top-n-sigma in float64, so that only one within a few last bits of it is in doubt, and then the row is TIED.
Top-p compares a sum of weights with a part of another. Where these are float32 sums, ``token_weights.ERROR`` bounds the
error; else, as of the reference's own, it is n units of 2^-53 for n numbers. Tokens within it of the goal are doubtful:
kept, but marked, and a draw that one of them could change is TIED.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.fused.prefix_selection import (
    ALL,
    BY_NUMBER,
    BY_WEIGHT,
    LOWEST,
    count,
    doubt,
    gather,
    keep_first,
    kth_bound,
    last_of,
    next_up,
    rounded,
)
from nucleate.sampling.backends.numba.fused.threshold_search import FEW, close_in
from nucleate.sampling.backends.numba.fused.token_weights import UNIT, bound, error_of, exponent_of, weigh, weigh_few
from nucleate.sampling.backends.numba.fused.workspace import DOUBTED, EDITED, INEXACT, address_of
from nucleate.sampling.maths import SLACK

LAST = np.int64(0xFFFFFFFF)
"""All ids are up to it."""

MANY, TIED = -1, -2


class KeptTokens(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    cut: Any  #: float32
    last: Any
    n: Any  #: how many, if they are in ``work.ids``, ascending, with weights; else MANY; TIED if others may be left


class FloorBounds(NamedTuple):
    """What is at or above ``high`` is in, what is below ``low`` is out."""

    low: Any
    high: Any


NO_FLOOR = FloorBounds(-np.inf, -np.inf)


@jit
def narrow(top: Any, best: Any, chain: Any, work: Any) -> Any:
    """What the cuts leave. top: the highest score as float32. best: it, as float64."""
    early, late = floors(top, best, chain, work)
    cut, whole, k = rounded(early.low, False), 0.0, np.int64(chain.k)
    if 0 < k < work.size:
        n = gather_first(k, cut, work)
        n = keep_first(n, np.float64(k), BY_NUMBER, work) if n > k else n
        return few_left(n, whole, early, late, top, best, chain, work)
    if cut == LOWEST and chain.p >= 1.0:
        return KeptTokens(LOWEST, LAST, np.int64(MANY))
    if cut == LOWEST:
        whole = weigh(LOWEST, exponent_of(top, chain.t), work)
        rest = (1.0 - chain.p - 2.0 * error_of(top, chain.t, work)) * whole
        cut = max(cut, bound(work.masses, np.float64(top), chain.t, rest))
    if count(cut, work) <= FEW:
        return few_left(gather(cut, ALL, work), whole, early, late, top, best, chain, work)
    if chain.p >= 1.0:
        return above_floor(early, work)
    return many_left(cut, whole, early, late, top, best, chain, work)


@jit
def few_left(n: Any, whole: Any, early: Any, late: Any, top: Any, best: Any, chain: Any, work: Any) -> Any:
    """What the cuts leave of n candidates. whole: of what top-p keeps a part; 0: of these."""
    slop = error_of(top, chain.t, work) if whole > 0.0 else 4.0 * UNIT * (work.size + 512)
    n = filtered(n, early, work)
    if n != TIED and chain.p < 1.0:
        weigh_few(n, best, chain.t, work)
        n = filtered(nucleus(n, 0.0, whole, chain.p, slop, work), late, work)
    if n != TIED and (chain.p >= 1.0 or chain.late_t != 1.0):
        weigh_few(n, best, chain.t * chain.late_t, work)
    return KeptTokens(LOWEST, LAST, n)


@jit
def many_left(cut: Any, whole: Any, early: Any, late: Any, top: Any, best: Any, chain: Any, work: Any) -> Any:
    """What top-p leaves of the tokens at or above a cut, which are many, and then a floor."""
    t, exponent, slop = chain.t, exponent_of(top, chain.t), error_of(top, chain.t, work)
    reached = whole
    if whole == 0.0:
        kept = above_floor(early, work)
        if kept.n == TIED:
            return kept
        cut, whole = kept.cut, weigh(kept.cut, exponent, work)
        reached = whole
    cut = max(cut, np.float32(np.float64(top) - 30.0 * t))  # what is further below weighs less than the slack
    goal = chain.p * (1.0 - SLACK) * whole
    n, above = close_in(cut, reached, goal * (1.0 - slop), goal * (1.0 + slop), exponent, work)
    weigh_few(n, best, t, work)
    n = nucleus(n, above, whole, chain.p, slop, work)
    return last_kept(n, late, work) if n != TIED else KeptTokens(LOWEST, LAST, n)


@jit
def floors(top: Any, best: Any, chain: Any, work: Any) -> Any:
    """Those of min-p and top-n-sigma, and that after top-p, if there is top-p."""
    early, late = NO_FLOOR, NO_FLOOR
    if chain.m > 0.0:
        early = floor(best, math.log(chain.m) - SLACK, 0.0, chain.t)
    if chain.sigmas > 0.0:
        deviation, error = deviation_of(top, work)
        wide = floor(best, -chain.sigmas * deviation / chain.t - SLACK, chain.sigmas * error, chain.t)
        early = FloorBounds(max(early.low, wide.low), max(early.high, wide.high))
    if chain.late_m > 0.0:
        late = floor(best, math.log(chain.late_m) - SLACK, 0.0, chain.t)
    if chain.p >= 1.0:
        early, late = FloorBounds(max(early.low, late.low), max(early.high, late.high)), NO_FLOOR
    return early, late


@jit
def floor(best: Any, below: Any, error: Any, t: Any) -> Any:
    """The scores whose d is at least ``below``. error: of the bound, but for roundings."""
    at = best + below * t
    error += 64.0 * UNIT * (abs(best) - below * t)
    return FloorBounds(at - error, min(at + error, best))


@jit
def first(top: Any, work: Any) -> Any:
    """The lowest id that has the highest score, and this, which may be an edited one, as float64."""
    n, best = gather(top, ALL, work), 0
    for i in range(1, n):
        best = i if work.scores[i] > work.scores[best] else best
    return work.ids[best], work.scores[best]


@jit
def deviation_of(top: Any, work: Any) -> Any:
    """The population standard deviation of the scores that are in, and the error of it.

    Each sum has at most G + 20 roundings, so that the variance errs by less than 4 (G + 20) units of the mean square.
    """
    work.sums[:3] = 0.0
    for group in range(work.tops.size):
        if work.tops[group] > -np.inf:
            block_ops.moments(address_of(group, work), top, np.int64(work.sums.ctypes.data))
    if work.state[INEXACT] > 0:
        for edit in range(work.state[EDITED]):
            if work.values[edit] > -np.inf:
                rounded, true = np.float64(np.float32(work.values[edit])) - top, work.values[edit] - top
                work.sums[1] += true - rounded
                work.sums[2] += true * true - rounded * rounded
    mean, square = work.sums[1] / work.sums[0], work.sums[2] / work.sums[0]
    variance, error = max(square - mean * mean, 0.0), 4.0 * UNIT * (work.tops.size + 20) * square
    deviation = math.sqrt(variance)
    return deviation, min(error / deviation, math.sqrt(error)) if deviation > 0.0 else math.sqrt(error)


@jit
def gather_first(k: Any, cut: Any, work: Any) -> Any:
    """Gather at least k tokens, the first ones, or all at or above a cut if these are fewer."""
    for deviations in (2.5, 10.0, 1e9):
        low = max(cut, kth_bound(k, deviations, work))
        n = gather(low, ALL, work)
        if n >= k or low == cut:
            break
    return n


@jit
def filtered(n: Any, floor: Any, work: Any) -> Any:
    """Keep, of n candidates, those above a floor; returns how many, or TIED."""
    kept, sure = 0, 0
    if n == TIED or floor.low == -np.inf:
        return n
    for i in range(n):
        x = work.scores[i]
        work.ids[kept], work.scores[kept], work.weights[kept] = work.ids[i], x, work.weights[i]
        kept += x >= floor.low
        sure += x >= floor.high
    return kept if kept == sure else np.int64(TIED)


@jit
def above_floor(floor: Any, work: Any) -> Any:
    """All tokens above a floor, of which the row has many."""
    low, high = rounded(floor.low, True), rounded(floor.high, True)
    if low > LOWEST and work.state[INEXACT] > 0:  # scores that were rounded may be on either side
        low, high = -next_up(-low), next_up(high)
    tied = low != high and count(low, work) != count(high, work)
    return KeptTokens(high, LAST, np.int64(TIED if tied else MANY))


@jit
def nucleus(n: Any, above: Any, whole: Any, p: Any, slop: Any, work: Any) -> Any:
    """Keep, of n candidates, what top-p does, and mark doubtful ones; returns how many, or TIED.

    above: the weight of the tokens before them. whole: of what it keeps a part; 0: of these.
    """
    total = above
    for i in range(n):
        total += work.weights[i]
    goal = p * (1.0 - SLACK) * (whole if whole > 0.0 else total)
    if goal * (1.0 + slop) < total:
        n, total = keep_first(n, goal * (1.0 + slop) - above, BY_WEIGHT, work), above
        for i in range(n):
            total += work.weights[i]
    return n if doubt(n, total, goal * (1.0 - slop), work) else np.int64(TIED)


@jit
def last_kept(n: Any, late: Any, work: Any) -> Any:
    """All tokens up to the last of n candidates, and above a floor."""
    listed = 0
    for i in range(n):
        work.doubts[listed] = work.ids[i]
        listed += work.weights[i] < 0.0
        work.weights[i] = abs(work.weights[i])
    work.state[DOUBTED] = listed
    last = last_of(n, work)
    cut, token, kept = np.float32(work.scores[last]), work.ids[last], above_floor(late, work)
    if kept.n != TIED and kept.cut <= cut:
        tied = work.state[INEXACT] > 0 and count(cut, work) > count(next_up(cut), work) + 1
        return KeptTokens(cut, token, np.int64(TIED if tied else MANY))
    return kept
