"""Truncation in the fused kernel: top-n-sigma, top-k, min-p and top-p, at a temperature t.

All of these keep a prefix of the same ranking. The group maxima give a bound on the threshold, and only groups whose
maximum reaches it are read again. Scores are not changed; filters work on d = (x - max) / t.

**Near ties.** The result equals the reference, or is TIED. Top-k compares float64 scores exactly. Min-p and top-n-sigma
compare float64 scores with a threshold: a score within its rounding error makes the row TIED. Top-p compares sums of
weights: float32 sums err by at most ``workspace.FLOAT32_ERROR``, float64 sums of n terms by n units of 2^-53.
Tokens within that error of the target are uncertain: kept, but marked, and a draw that depends on them is TIED.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.cpu import block_ops
from nucleate.sampling.cpu.prefix_selection import (
    BY_COUNT,
    BY_WEIGHT,
    LOWEST,
    MAX_LISTED,
    UNBOUNDED,
    count_at_least,
    gather_around_target,
    gather_candidates,
    keep_prefix,
    last_certain,
    mark_uncertain,
    next_up,
    round_to_float32,
    top_k_bound,
)
from nucleate.sampling.cpu.row_kernels import threshold_by_mass
from nucleate.sampling.cpu.workspace import (
    EDIT_COUNT,
    INEXACT_COUNT,
    UNCERTAIN_COUNT,
    UNIT,
    edited_group_address,
    weigh_candidates,
    weigh_groups,
    weight_error,
    weight_exponent,
)
from nucleate.sampling.maths import SLACK

MAX_ID = np.int64(0xFFFFFFFF)
"""Every token id is at most this."""

UNLISTED, TIED = -1, -2


class KeptTokens(NamedTuple):
    """The surviving tokens: scores above the threshold, and scores at it with an id up to ``last_id``."""

    threshold: Any  #: float32
    last_id: Any
    listed: Any  #: number of tokens in ``work.ids`` (ascending) and ``work.weights``; UNLISTED or TIED if not there


class FloorBounds(NamedTuple):
    """A threshold with its error: scores at or above ``high`` are kept, scores below ``low`` are not."""

    low: Any
    high: Any


NO_FLOOR = FloorBounds(-np.inf, -np.inf)


@jit
def truncate(max_score: Any, exact_max: Any, params: Any, work: Any) -> Any:
    """The tokens that survive all filters. max_score, exact_max: the maximum as float32, and as float64."""
    floor, late_floor = row_floors(max_score, exact_max, params, work)
    threshold, total, k = round_to_float32(floor.low, False), 0.0, np.int64(params.k)
    if 0 < k < work.size:
        n = gather_top_k(k, threshold, work)
        n = keep_prefix(n, np.float64(k), BY_COUNT, work) if n > k else n
        return truncate_listed(n, total, floor, late_floor, max_score, exact_max, params, work)
    if threshold == LOWEST and params.p >= 1.0:
        return KeptTokens(LOWEST, MAX_ID, np.int64(UNLISTED))
    if threshold == LOWEST:
        total = weigh_groups(LOWEST, weight_exponent(max_score, params.t), work)
        tail = (1.0 - params.p - 2.0 * weight_error(max_score, params.t, work)) * total
        lowest = max(threshold_by_mass(work.group_masses, tail), -30.0)  # lower scores weigh less than SLACK
        threshold = max(threshold, np.float32(np.float64(max_score) + lowest * params.t))
    if count_at_least(threshold, work) <= MAX_LISTED:
        n = gather_candidates(threshold, UNBOUNDED, work)
        return truncate_listed(n, total, floor, late_floor, max_score, exact_max, params, work)
    if params.p >= 1.0:
        return tokens_above_floor(floor, work)
    return truncate_unlisted(threshold, total, floor, late_floor, max_score, exact_max, params, work)


@jit
def truncate_listed(
    n: Any, total: Any, floor: Any, late_floor: Any, max_score: Any, exact_max: Any, params: Any, work: Any
) -> Any:
    """The tokens that survive among n candidates. total: mass that top-p refers to; 0: that of the candidates."""
    error = weight_error(max_score, params.t, work) if total > 0.0 else 4.0 * UNIT * (work.size + 512)
    n = apply_floor(n, floor, work)
    if n != TIED and params.p < 1.0:
        weigh_candidates(n, exact_max, params.t, work)
        n = apply_floor(apply_top_p(n, 0.0, total, params.p, error, work), late_floor, work)
    if n != TIED and (params.p >= 1.0 or params.late_t != 1.0):
        weigh_candidates(n, exact_max, params.t * params.late_t, work)
    return KeptTokens(LOWEST, MAX_ID, n)


@jit
def truncate_unlisted(
    threshold: Any, total: Any, floor: Any, late_floor: Any, max_score: Any, exact_max: Any, params: Any, work: Any
) -> Any:
    """Apply top-p, then a floor, to the tokens at or above a threshold when they are too many to list."""
    t, exponent, error = params.t, weight_exponent(max_score, params.t), weight_error(max_score, params.t, work)
    mass_at_threshold = total
    if total == 0.0:
        floored = tokens_above_floor(floor, work)
        if floored.listed == TIED:
            return floored
        threshold, total = floored.threshold, weigh_groups(floored.threshold, exponent, work)
        mass_at_threshold = total
    threshold = max(threshold, np.float32(np.float64(max_score) - 30.0 * t))  # lower scores weigh less than SLACK
    target = params.p * (1.0 - SLACK) * total
    n, mass_before = gather_around_target(
        threshold, mass_at_threshold, target * (1.0 - error), target * (1.0 + error), exponent, work
    )
    weigh_candidates(n, exact_max, t, work)
    n = apply_top_p(n, mass_before, total, params.p, error, work)
    return tokens_up_to_last(n, late_floor, work) if n != TIED else KeptTokens(LOWEST, MAX_ID, n)


@jit
def row_floors(max_score: Any, exact_max: Any, params: Any, work: Any) -> Any:
    """The floor of min-p and top-n-sigma, and that of a min-p after top-p."""
    floor, late_floor = NO_FLOOR, NO_FLOOR
    if params.m > 0.0:
        floor = floor_bounds(exact_max, math.log(params.m) - SLACK, 0.0, params.t)
    if params.sigmas > 0.0:
        deviation, error = standard_deviation(max_score, work)
        below = -params.sigmas * deviation / params.t - SLACK
        sigma_floor = floor_bounds(exact_max, below, params.sigmas * error, params.t)
        floor = FloorBounds(max(floor.low, sigma_floor.low), max(floor.high, sigma_floor.high))
    if params.late_m > 0.0:
        late_floor = floor_bounds(exact_max, math.log(params.late_m) - SLACK, 0.0, params.t)
    if params.p >= 1.0:
        floor = FloorBounds(max(floor.low, late_floor.low), max(floor.high, late_floor.high))
        late_floor = NO_FLOOR
    return floor, late_floor


@jit
def floor_bounds(exact_max: Any, below: Any, error: Any, t: Any) -> Any:
    """The threshold for d >= below, with its error. error: that of ``below``, without rounding."""
    at = exact_max + below * t
    error += 64.0 * UNIT * (abs(exact_max) - below * t)
    return FloorBounds(at - error, min(at + error, exact_max))


@jit
def argmax(max_score: Any, work: Any) -> Any:
    """The lowest id with the maximum score, and that score as float64."""
    n, best = gather_candidates(max_score, UNBOUNDED, work), 0
    for i in range(1, n):
        best = i if work.scores[i] > work.scores[best] else best
    return work.ids[best], work.scores[best]


@jit
def standard_deviation(max_score: Any, work: Any) -> Any:
    """The population standard deviation of the finite scores, and an error bound for it.

    Each sum has at most G + 20 roundings, so the error of the variance is below 4 (G + 20) units of the mean square.
    """
    work.partial_sums[:3] = 0.0
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] > -np.inf:
            block_ops.moments(edited_group_address(group, work), max_score, np.int64(work.partial_sums.ctypes.data))
    if work.counters[INEXACT_COUNT] > 0:
        for edit in range(work.counters[EDIT_COUNT]):
            if work.edited_scores[edit] > -np.inf:
                approximate = np.float64(np.float32(work.edited_scores[edit])) - max_score
                exact = work.edited_scores[edit] - max_score
                work.partial_sums[1] += exact - approximate
                work.partial_sums[2] += exact * exact - approximate * approximate
    mean, square = work.partial_sums[1] / work.partial_sums[0], work.partial_sums[2] / work.partial_sums[0]
    variance, error = max(square - mean * mean, 0.0), 4.0 * UNIT * (work.group_maxima.size + 20) * square
    deviation = math.sqrt(variance)
    return deviation, min(error / deviation, math.sqrt(error)) if deviation > 0.0 else math.sqrt(error)


@jit
def gather_top_k(k: Any, threshold: Any, work: Any) -> Any:
    """Gather at least the top k tokens, or all at or above a threshold if there are fewer."""
    for deviations in (2.5, 10.0, 1e9):
        low = max(threshold, top_k_bound(k, deviations, work))
        n = gather_candidates(low, UNBOUNDED, work)
        if n >= k or low == threshold:
            break
    return n


@jit
def apply_floor(n: Any, floor: Any, work: Any) -> Any:
    """Keep the candidates at or above a floor. Returns their number, or TIED."""
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
    """All tokens at or above a floor, not listed."""
    low, high = round_to_float32(floor.low, True), round_to_float32(floor.high, True)
    if low > LOWEST and work.counters[INEXACT_COUNT] > 0:  # rounded scores may be on either side
        low, high = -next_up(-low), next_up(high)
    tied = low != high and count_at_least(low, work) != count_at_least(high, work)
    return KeptTokens(high, MAX_ID, np.int64(TIED if tied else UNLISTED))


@jit
def apply_top_p(n: Any, mass_before: Any, total: Any, p: Any, error: Any, work: Any) -> Any:
    """Apply top-p to n candidates, and mark uncertain ones. Returns the number kept, or TIED.

    mass_before: mass of the higher-ranked tokens. total: mass that top-p refers to; 0: that of the candidates.
    """
    mass = mass_before
    for i in range(n):
        mass += work.weights[i]
    target = p * (1.0 - SLACK) * (total if total > 0.0 else mass)
    if target * (1.0 + error) < mass:
        n, mass = keep_prefix(n, target * (1.0 + error) - mass_before, BY_WEIGHT, work), mass_before
        for i in range(n):
            mass += work.weights[i]
    return n if mark_uncertain(n, mass, target * (1.0 - error), work) else np.int64(TIED)


@jit
def tokens_up_to_last(n: Any, late_floor: Any, work: Any) -> Any:
    """All tokens ranked up to the last of n candidates, and at or above a floor."""
    uncertain = 0
    for i in range(n):
        work.uncertain_ids[uncertain] = work.ids[i]
        uncertain += work.weights[i] < 0.0
        work.weights[i] = abs(work.weights[i])
    work.counters[UNCERTAIN_COUNT] = uncertain
    last = last_certain(n, work)
    threshold, token, kept = np.float32(work.scores[last]), work.ids[last], tokens_above_floor(late_floor, work)
    if kept.listed != TIED and kept.threshold <= threshold:
        inexact = work.counters[INEXACT_COUNT] > 0
        tied = inexact and count_at_least(threshold, work) > count_at_least(next_up(threshold), work) + 1
        return KeptTokens(threshold, token, np.int64(TIED if tied else UNLISTED))
    return kept
