"""The cuts of the chain: what temperature, top-n-sigma, top-k, min-p and top-p leave of a row.

All of these keep a prefix of one order, so the row is read once for the highest score of each group of 256; from these
follows a bound on the cut, and only groups that reach it are looked at again. Scores stay as they are: everything is
said of d = (x - top) / t. Carries no meaning of its own: tests hold it equal to the reference.

**Near ties.** Top-k compares float32 scores, which is exact. A score is compared with the bound of min-p and
top-n-sigma in float64, so that only one within a few last bits of it is in doubt, and then the row is ``tied``. Top-p
compares a sum of weights with a part of another. Where these are float32 sums, WHOLE bounds the error, in units of
2^-24: 4 + |d| / t for each weight, 20 more for the sum of a group (see ``races``), and the mean of |d| / t by weight is
at most log V, 12. Tokens within it of the goal are doubtful: kept, but marked, and a draw that one of them could change
is made again with float64 sums. Of these, as of the reference's own, the error is n units of 2^-53 for n numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP, LANES
from nucleate.backends.cpu.special.sections import close_in, settle_last
from nucleate.backends.cpu.special.select import FEW, ID, bound, count, gather, lowest_at_least, next_up
from nucleate.backends.cpu.special.share import BY_NUMBER, BY_WEIGHT, doubt, keep_first, last_of, reached
from nucleate.backends.cpu.special.table import NOT_DRAWN
from nucleate.backends.cpu.special.weights import (
    LOWEST,
    MANY,
    UNIT,
    Exponent,
    Kept,
    exponent_of,
    rounding,
    weigh,
    weigh_few,
)
from nucleate.backends.cpu.special.work import EDITED, INEXACT, patch_above, score
from nucleate.core.maths import SLACK

WHOLE = 4e-6
"""The relative error of a sum of float32 weights, and of a part of it."""

DEVIATIONS = 2.5
"""Standard deviations: so many more tokens than k are taken, where some are counted for all."""


@jit
def narrow(top: Any, chain: Any, exact: Any, work: Any) -> Any:  # noqa: C901  # one cut after the other
    """What the cuts leave. exact: sums are float64."""
    size, t, exponent = work.size, chain.t, exponent_of(top, chain.t)
    best, tied, late, cut = np.float64(top), False, LOWEST, LOWEST
    if chain.m > 0.0 or chain.sigmas > 0.0 or chain.late_m > 0.0:
        best, tied = unrounded(top, work)
    if chain.m > 0.0:
        cut, near = floor(best, math.log(chain.m) - SLACK, 0.0, t, LOWEST, work)
        tied |= near
    if chain.sigmas > 0.0:
        deviation, error = deviation_of(top, work)
        cut, near = floor(best, -chain.sigmas * deviation / t - SLACK, chain.sigmas * error / t, t, cut, work)
        tied |= near
    if chain.late_m > 0.0:
        late, near = floor(best, math.log(chain.late_m) - SLACK, 0.0, t, LOWEST, work)
        tied |= near
    k = np.int64(chain.k)
    counted, whole, floored, bounded = 0 < k < size, 0.0, cut, LOWEST
    if counted:
        bounded = kth_bound(k, work)
        cut = max(cut, bounded)
    elif chain.m == 0.0 and chain.sigmas == 0.0:
        if chain.p < 1.0:
            whole = weigh(LOWEST, exponent, t, exact, work)
            cut = max(cut, bound(work.masses, np.float64(top), t, (1.0 - chain.p) * whole * (1.0 - 1e-5)))
        elif chain.late_m == 0.0:
            return Kept(LOWEST, LOWEST, ID, MANY, tied)
    lowest = cut
    if whole != 0.0 or chain.p >= 1.0:  # else those below weigh too
        cut = max(cut, late)
    patch_above(work, lowest)
    if not counted and count(cut, work) > FEW:
        if chain.p >= 1.0:
            return Kept(cut, next_up(cut), ID, MANY, tied)
        return last_by_weight(lowest, late, whole, chain.p, t, tied, exact, exponent, work)
    found = gather(cut, work)
    if counted and not sure(k, work) and cut == bounded and not k <= found <= k + FEW:
        bounded = kth_counted(top, k, work)
        cut = max(floored, bounded, late if chain.p >= 1.0 else LOWEST)
        patch_above(work, cut)
        found = gather(cut, work)
    return keep_few(found, whole, late, chain, k, np.float64(top), tied, exact, work)


@jit
def unrounded(top: Any, work: Any) -> Any:
    """The highest score, which may be an edited one, as float64; and whether it is one of several that may be."""
    best, edited = np.float64(top), False
    if work.state[INEXACT] > 0:
        for edit in range(work.state[EDITED]):
            if np.float32(work.values[edit]) == top:
                best, edited = work.values[edit], True
        patch_above(work, top)
    return best, edited and count(top, work) > 1


@jit
def floor(best: Any, below: Any, margin: Any, t: Any, least: Any, work: Any) -> Any:
    """The lowest score whose d is at least ``below``, or ``least``, if higher; whether one is too near to say."""
    margin -= 32.0 * UNIT * below
    low = max(lowest_at_least(best, (below - margin) * t), least)
    high = max(lowest_at_least(best, (below + margin) * t), least)
    cut, tied = low, False
    if low != high:
        cut = max(lowest_at_least(best, below * t), least)
        patch_above(work, low)
        tied = count(low, work) != count(high, work)
    if work.state[INEXACT] > 0:
        for edit in range(work.state[EDITED]):
            x, d = np.float32(work.values[edit]), (work.values[edit] - best) / t
            tied |= x >= least and ((d >= below) != (x >= cut) or abs(d - below) <= margin)
    return cut, tied


@jit
def deviation_of(top: Any, work: Any) -> Any:
    """The population standard deviation of the scores that are in, and the error of it.

    Each sum has at most G + 20 roundings, so that the variance errs by less than 4 (G + 20) units of the mean square.
    """
    patch_above(work, LOWEST)
    work.sums[:3] = 0.0
    for group in range(work.tops.size):
        if work.tops[group] > -np.inf:
            simd.moments(work.at[group], 0, top, work.sums)
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
def first(top: Any, work: Any) -> Any:
    """The lowest id that has the highest score."""
    patch_above(work, top)
    if work.state[INEXACT] > 0 and unrounded(top, work)[1]:
        return NOT_DRAWN
    for group in range(work.tops.size):
        if work.tops[group] == top:
            for token in range(group * GROUP, group * GROUP + GROUP):
                if score(work, token) == top:
                    return token
    return NOT_DRAWN


@jit
def sure(k: Any, work: Any) -> Any:
    """Whether ``kth_bound`` is told by the highest of the groups, so that it is more than likely."""
    return k <= work.tops.size // 2


@jit
def kth_bound(k: Any, work: Any) -> Any:
    """A score that at least k tokens most likely reach, and not many more."""
    if sure(k, work):
        return reached(work.tops, k)
    some, found = work.weights.view(np.float32), 0  # some of every other group
    for group in range(0, work.size // GROUP, 2):
        start = group * GROUP + group % (GROUP // LANES) * LANES
        for i in range(LANES):
            some[found + i] = score(work, start + i)
        found += LANES
    place = k * (found / work.size)
    place += DEVIATIONS * math.sqrt(place) + 1.0
    return max(reached(some[:found], int(place)), LOWEST) if place <= found else LOWEST


@jit
def kth_counted(top: Any, k: Any, work: Any) -> Any:
    """The score of the k-th token. To count is to weigh with weights of 1, exp(0)."""
    patch_above(work, LOWEST)
    inside = count(LOWEST, work)
    if inside <= k:
        return LOWEST
    goal, each = np.float64(k), np.float32(0.0)
    n, above, _ = close_in(LOWEST, top, np.float64(inside), goal, goal, Exponent(top, each, each, LOWEST), work)
    work.weights[:n] = 1.0
    return np.float32(work.scores[last_of(keep_first(n, goal - above, BY_NUMBER, work), work)])


@jit
def last_by_weight(
    cut: Any, late: Any, whole: Any, p: Any, t: Any, tied: Any, exact: Any, exponent: Any, work: Any
) -> Any:
    """What top-p leaves of many tokens, none of them below a cut. whole: of what it keeps a part; 0: of these."""
    top, reached = np.float64(exponent.top), whole
    if whole == 0.0:
        whole = weigh(cut, exponent, t, exact, work)
        reached = whole
    cut = max(cut, np.float32(top - 30.0 * t))  # what is further below weighs less than the slack
    goal, wide = p * (1.0 - SLACK) * whole, WHOLE + rounding(exponent.top, t, work)
    slop = 4.0 * UNIT * (work.size + 512) if exact else wide
    n, above, up = close_in(cut, exponent.top, reached, goal * (1.0 - wide), goal * (1.0 + wide), exponent, work)
    if exact:
        above = weigh(up, exponent, t, True, work)
    weigh_few(n, top, t, work)
    last, told = settle_last(n, above, goal * (1.0 - slop), goal * (1.0 + slop), work)
    cut = score(work, last)
    tied |= not told or blurred(cut, work)
    return Kept(late, next_up(late), ID, MANY, tied) if late > cut else Kept(cut, next_up(cut), last, MANY, tied)


@jit
def blurred(cut: Any, work: Any) -> Any:
    """Whether tokens of several scores, edited ones, may have been rounded to that of a cut."""
    if work.state[INEXACT] > 0:
        for edit in range(work.state[EDITED]):
            if np.float32(work.values[edit]) == cut:
                return count(cut, work) > count(next_up(cut), work) + 1
    return False


@jit
def keep_few(n: Any, whole: Any, late: Any, chain: Any, k: Any, top: Any, tied: Any, exact: Any, work: Any) -> Any:
    """What is left of n candidates, with the weights of the draw.

    whole: what top-p keeps a part of; 0: all that top-k left. late: the score below which min-p after top-p cuts.
    """
    counted, weights, scores = 0 < k < n, work.weights, work.scores
    if counted:
        n = keep_first(n, np.float64(k), BY_NUMBER, work)
    t = chain.t if chain.p < 1.0 else chain.t * chain.late_t
    weigh_few(n, top, t, work)
    cut = np.float32(scores[last_of(n, work)]) if counted or chain.p < 1.0 else LOWEST
    if chain.p < 1.0:
        total = 0.0
        for i in range(n):
            total += weights[i]
        slop = 4.0 * UNIT * (work.size + 512)
        if whole == 0.0:
            whole = total
        elif not exact:
            slop = WHOLE + rounding(top, t, work)
        goal, least = chain.p * (1.0 - SLACK) * whole * (1.0 + slop), chain.p * (1.0 - SLACK) * whole * (1.0 - slop)
        if counted:
            tied |= blurred(cut, work)
        if goal < total:
            n, total = keep_first(n, goal, BY_WEIGHT, work), 0.0
            for i in range(n):
                total += weights[i]
        cut = np.float32(scores[last_of(n, work)])
        tied |= not doubt(n, total, least, work)
        if chain.late_m > 0.0 or chain.late_t != 1.0:
            n = once_more(n, late, top, t * chain.late_t, work)
    return Kept(cut, cut, ID, n, tied or ((counted or chain.p < 1.0) and blurred(cut, work)))


@jit
def once_more(n: Any, late: Any, top: Any, t: Any, work: Any) -> Any:
    """Cut n candidates at a score, and weigh what is left at another temperature; doubtful ones stay so."""
    kept, doubtful = 0, 0
    for i in range(n):
        work.ids[kept], work.scores[kept] = work.ids[i], work.scores[i]
        work.doubts[doubtful] = kept
        inside = work.scores[i] >= late
        doubtful += inside and work.weights[i] < 0.0
        kept += inside
    weigh_few(kept, top, t, work)
    for i in range(doubtful):
        work.weights[work.doubts[i]] = -work.weights[work.doubts[i]]
    return kept
