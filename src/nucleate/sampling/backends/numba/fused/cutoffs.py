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
    BY_COUNT,
    BY_WEIGHT,
    LOWEST,
    UNBOUNDED,
    count_at_least,
    gather_candidates,
    keep_prefix,
    last_certain,
    mark_uncertain,
    next_up,
    round_to_float32,
    top_k_bound,
)
from nucleate.sampling.backends.numba.fused.threshold_search import MAX_LISTED, gather_around_target
from nucleate.sampling.backends.numba.fused.token_weights import (
    UNIT,
    mass_bound,
    weigh_candidates,
    weigh_groups,
    weight_error,
    weight_exponent,
)
from nucleate.sampling.backends.numba.fused.workspace import (
    EDIT_COUNT,
    INEXACT_COUNT,
    UNCERTAIN_COUNT,
    edited_group_address,
)
from nucleate.sampling.maths import SLACK

MAX_ID = np.int64(0xFFFFFFFF)
"""All ids are up to it."""

UNLISTED, TIED = -1, -2


class KeptTokens(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    threshold: Any  #: float32
    last_id: Any
    listed: (
        Any  #: how many, if they are in ``work.ids``, ascending, with weights; else MANY; TIED if others may be left
    )


class FloorBounds(NamedTuple):
    """What is at or above ``high`` is in, what is below ``low`` is out."""

    low: Any
    high: Any


NO_FLOOR = FloorBounds(-np.inf, -np.inf)


@jit
def truncate(max_score: Any, exact_max: Any, params: Any, work: Any) -> Any:
    """What the cuts leave. top: the highest score as float32. best: it, as float64."""
    before_top_p, after_top_p = row_floors(max_score, exact_max, params, work)
    threshold, total_mass, k = round_to_float32(before_top_p.low, False), 0.0, np.int64(params.k)
    if 0 < k < work.size:
        n = gather_top_k(k, threshold, work)
        n = keep_prefix(n, np.float64(k), BY_COUNT, work) if n > k else n
        return truncate_listed(n, total_mass, before_top_p, after_top_p, max_score, exact_max, params, work)
    if threshold == LOWEST and params.p >= 1.0:
        return KeptTokens(LOWEST, MAX_ID, np.int64(UNLISTED))
    if threshold == LOWEST:
        total_mass = weigh_groups(LOWEST, weight_exponent(max_score, params.t), work)
        remaining_mass = (1.0 - params.p - 2.0 * weight_error(max_score, params.t, work)) * total_mass
        threshold = max(threshold, mass_bound(work.group_masses, np.float64(max_score), params.t, remaining_mass))
    if count_at_least(threshold, work) <= MAX_LISTED:
        return truncate_listed(
            gather_candidates(threshold, UNBOUNDED, work),
            total_mass,
            before_top_p,
            after_top_p,
            max_score,
            exact_max,
            params,
            work,
        )
    if params.p >= 1.0:
        return tokens_above_floor(before_top_p, work)
    return truncate_unlisted(threshold, total_mass, before_top_p, after_top_p, max_score, exact_max, params, work)


@jit
def truncate_listed(
    n: Any, total_mass: Any, before_top_p: Any, after_top_p: Any, max_score: Any, exact_max: Any, params: Any, work: Any
) -> Any:
    """What the cuts leave of n candidates. whole: of what top-p keeps a part; 0: of these."""
    relative_error = weight_error(max_score, params.t, work) if total_mass > 0.0 else 4.0 * UNIT * (work.size + 512)
    n = apply_floor(n, before_top_p, work)
    if n != TIED and params.p < 1.0:
        weigh_candidates(n, exact_max, params.t, work)
        n = apply_floor(apply_top_p(n, 0.0, total_mass, params.p, relative_error, work), after_top_p, work)
    if n != TIED and (params.p >= 1.0 or params.late_t != 1.0):
        weigh_candidates(n, exact_max, params.t * params.late_t, work)
    return KeptTokens(LOWEST, MAX_ID, n)


@jit
def truncate_unlisted(
    threshold: Any,
    total_mass: Any,
    before_top_p: Any,
    after_top_p: Any,
    max_score: Any,
    exact_max: Any,
    params: Any,
    work: Any,
) -> Any:
    """What top-p leaves of the tokens at or above a cut, which are many, and then a floor."""
    t, exponent, relative_error = (
        params.t,
        weight_exponent(max_score, params.t),
        weight_error(max_score, params.t, work),
    )
    mass_at_threshold = total_mass
    if total_mass == 0.0:
        floored = tokens_above_floor(before_top_p, work)
        if floored.listed == TIED:
            return floored
        threshold, total_mass = floored.threshold, weigh_groups(floored.threshold, exponent, work)
        mass_at_threshold = total_mass
    threshold = max(
        threshold, np.float32(np.float64(max_score) - 30.0 * t)
    )  # what is further below weighs less than the slack
    target = params.p * (1.0 - SLACK) * total_mass
    n, mass_before = gather_around_target(
        threshold, mass_at_threshold, target * (1.0 - relative_error), target * (1.0 + relative_error), exponent, work
    )
    weigh_candidates(n, exact_max, t, work)
    n = apply_top_p(n, mass_before, total_mass, params.p, relative_error, work)
    return tokens_up_to_last(n, after_top_p, work) if n != TIED else KeptTokens(LOWEST, MAX_ID, n)


@jit
def row_floors(max_score: Any, exact_max: Any, params: Any, work: Any) -> Any:
    """Those of min-p and top-n-sigma, and that after top-p, if there is top-p."""
    before_top_p, after_top_p = NO_FLOOR, NO_FLOOR
    if params.m > 0.0:
        before_top_p = floor_bounds(exact_max, math.log(params.m) - SLACK, 0.0, params.t)
    if params.sigmas > 0.0:
        deviation, error = standard_deviation(max_score, work)
        sigma_bound = floor_bounds(
            exact_max, -params.sigmas * deviation / params.t - SLACK, params.sigmas * error, params.t
        )
        before_top_p = FloorBounds(max(before_top_p.low, sigma_bound.low), max(before_top_p.high, sigma_bound.high))
    if params.late_m > 0.0:
        after_top_p = floor_bounds(exact_max, math.log(params.late_m) - SLACK, 0.0, params.t)
    if params.p >= 1.0:
        before_top_p, after_top_p = (
            FloorBounds(max(before_top_p.low, after_top_p.low), max(before_top_p.high, after_top_p.high)),
            NO_FLOOR,
        )
    return before_top_p, after_top_p


@jit
def floor_bounds(exact_max: Any, below: Any, error: Any, t: Any) -> Any:
    """The scores whose d is at least ``below``. error: of the bound, but for roundings."""
    at = exact_max + below * t
    error += 64.0 * UNIT * (abs(exact_max) - below * t)
    return FloorBounds(at - error, min(at + error, exact_max))


@jit
def argmax(max_score: Any, work: Any) -> Any:
    """The lowest id that has the highest score, and this, which may be an edited one, as float64."""
    n, best = gather_candidates(max_score, UNBOUNDED, work), 0
    for i in range(1, n):
        best = i if work.scores[i] > work.scores[best] else best
    return work.ids[best], work.scores[best]


@jit
def standard_deviation(max_score: Any, work: Any) -> Any:
    """The population standard deviation of the scores that are in, and the error of it.

    Each sum has at most G + 20 roundings, so that the variance errs by less than 4 (G + 20) units of the mean square.
    """
    work.partial_sums[:3] = 0.0
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] > -np.inf:
            block_ops.moments(edited_group_address(group, work), max_score, np.int64(work.partial_sums.ctypes.data))
    if work.counters[INEXACT_COUNT] > 0:
        for edit in range(work.counters[EDIT_COUNT]):
            if work.edited_scores[edit] > -np.inf:
                approximate, exact = (
                    np.float64(np.float32(work.edited_scores[edit])) - max_score,
                    work.edited_scores[edit] - max_score,
                )
                work.partial_sums[1] += exact - approximate
                work.partial_sums[2] += exact * exact - approximate * approximate
    mean, square = work.partial_sums[1] / work.partial_sums[0], work.partial_sums[2] / work.partial_sums[0]
    variance, error = max(square - mean * mean, 0.0), 4.0 * UNIT * (work.group_maxima.size + 20) * square
    deviation = math.sqrt(variance)
    return deviation, min(error / deviation, math.sqrt(error)) if deviation > 0.0 else math.sqrt(error)


@jit
def gather_top_k(k: Any, threshold: Any, work: Any) -> Any:
    """Gather at least k tokens, the first ones, or all at or above a cut if these are fewer."""
    for deviations in (2.5, 10.0, 1e9):
        low = max(threshold, top_k_bound(k, deviations, work))
        n = gather_candidates(low, UNBOUNDED, work)
        if n >= k or low == threshold:
            break
    return n


@jit
def apply_floor(n: Any, floor: Any, work: Any) -> Any:
    """Keep, of n candidates, those above a floor; returns how many, or TIED."""
    kept, certain = 0, 0
    if n == TIED or floor.low == -np.inf:
        return n
    for i in range(n):
        x = work.scores[i]
        work.ids[kept], work.scores[kept], work.weights[kept] = work.ids[i], x, work.weights[i]
        kept += x >= floor.low
        certain += x >= floor.high
    return kept if kept == certain else np.int64(TIED)


@jit
def tokens_above_floor(floor: Any, work: Any) -> Any:
    """All tokens above a floor, of which the row has many."""
    low, high = round_to_float32(floor.low, True), round_to_float32(floor.high, True)
    if low > LOWEST and work.counters[INEXACT_COUNT] > 0:  # scores that were rounded may be on either side
        low, high = -next_up(-low), next_up(high)
    tied = low != high and count_at_least(low, work) != count_at_least(high, work)
    return KeptTokens(high, MAX_ID, np.int64(TIED if tied else UNLISTED))


@jit
def apply_top_p(n: Any, mass_before: Any, total_mass: Any, p: Any, relative_error: Any, work: Any) -> Any:
    """Keep, of n candidates, what top-p does, and mark doubtful ones; returns how many, or TIED.

    above: the weight of the tokens before them. whole: of what it keeps a part; 0: of these.
    """
    total = mass_before
    for i in range(n):
        total += work.weights[i]
    goal = p * (1.0 - SLACK) * (total_mass if total_mass > 0.0 else total)
    if goal * (1.0 + relative_error) < total:
        n, total = keep_prefix(n, goal * (1.0 + relative_error) - mass_before, BY_WEIGHT, work), mass_before
        for i in range(n):
            total += work.weights[i]
    return n if mark_uncertain(n, total, goal * (1.0 - relative_error), work) else np.int64(TIED)


@jit
def tokens_up_to_last(n: Any, after_top_p: Any, work: Any) -> Any:
    """All tokens up to the last of n candidates, and above a floor."""
    uncertain = 0
    for i in range(n):
        work.uncertain_ids[uncertain] = work.ids[i]
        uncertain += work.weights[i] < 0.0
        work.weights[i] = abs(work.weights[i])
    work.counters[UNCERTAIN_COUNT] = uncertain
    last = last_certain(n, work)
    threshold, token, kept = np.float32(work.scores[last]), work.ids[last], tokens_above_floor(after_top_p, work)
    if kept.listed != TIED and kept.threshold <= threshold:
        tied = (
            work.counters[INEXACT_COUNT] > 0
            and count_at_least(threshold, work) > count_at_least(next_up(threshold), work) + 1
        )
        return KeptTokens(threshold, token, np.int64(TIED if tied else UNLISTED))
    return kept
