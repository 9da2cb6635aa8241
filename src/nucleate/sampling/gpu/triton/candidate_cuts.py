"""Truncates rows whose candidates fit a pool, and prepares the other rows for ``histogram_selection``.

The statistics of the groups give the thresholds of min-p and top-n-sigma, and bounds on those of top-k and top-p. The
result equals that of the reference backend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.gpu.triton.device_memory import (
    GROUP_SIZE,
    MAX_ID,
    TILE,
    KeptRange,
    fill_pool,
    group_temperature,
    is_kept,
    list_groups,
    load_pool,
    select_prefix,
)
from nucleate.sampling.gpu.triton.histogram_selection import (
    HIGH,
    LOW,
    POOLED,
    VIEW_HIGHEST,
    VIEW_LOWEST,
    VIEW_ORIGIN,
    VIEW_SCALE,
    WEIGHT_UNIT,
    clear_bins,
    make_view,
    top_p_target,
)
from nucleate.sampling.gpu.triton.triton_numbers import (
    INFINITY,
    LOWEST,
    MASS_ERROR,
    SLACK,
    fixed_weight,
    from_ordered,
    lowest_kept,
    to_ordered,
)

TOP_P_MARGIN = tl.constexpr(1e-5)
"""Safety margin of the bound of top-p, relative to the partition function: more than SLACK + 2 MASS_ERROR."""
TOTAL_WEIGHT = tl.constexpr(2.0**61)
"""The approximate sum of all weights of a row in fixed point."""
MAX_POOLED_GROUPS = tl.constexpr(128)
"""The maximum number of groups from which tokens are pooled speculatively. It limits the wasted reads of flat rows."""


class GroupStats(NamedTuple):
    """The statistics of the groups of a row, from the first kernel."""

    tops: Any  #: float32 [width]
    own: Any  #: float64 [width]: sum of exp((x - top of the group) / t); t: see ``group_temperature``
    masses: Any  #: float64 [width]: the same relative to the top of the row
    moments: Any  #: the address of the row in ``GroupSums.moments``


class CutBounds(NamedTuple):
    """Bounds on the tokens that the filters keep."""

    floor: Any  #: float32: the lowest score that min-p and top-n-sigma keep
    lowest: Any  #: float32: a lower bound on the score of the k-th token, at least the floor
    low: Any  #: float32: a lower bound on the threshold, at least ``lowest``
    has_top_k: Any  #: whether top-k may remove tokens
    mass: Any  #: float64: the partition function for top-p; 0 if another filter comes before it


@jit
def truncate(source, scratch, groups, top, params, pending, width: tl.constexpr):
    """The kept tokens; and 1 if the row is pending, because it has too many candidates or top-p is nearly tied."""
    bound = make_bounds(groups, top, params, source.size, width)
    kept, is_pending = KeptRange(bound.lowest, tl.full((), MAX_ID, tl.int32)), tl.full((), 0, tl.int32)
    if bound.has_top_k | (params.p < 1.0):
        count, is_pending = list_groups(groups.tops >= bound.low, scratch, width), is_pending + 1
        if (count <= MAX_POOLED_GROUPS) | (max_candidates(groups, bound.low, params) <= TILE):
            n = fill_pool(source, scratch, count, bound.low)
            if n <= TILE:
                kept, near_tie = truncate_pool(scratch, n, bound, groups, top, params)
                is_pending = near_tie.to(tl.int32)
        if is_pending != 0:
            prepare_pending(scratch, groups, bound, top, params.t, pending, width)
    return kept, is_pending


@jit
def truncate_pool(scratch, n, bound, groups, top, params):
    """The kept tokens of a pool; and whether the error of the partition function could change the result of top-p."""
    pool, kept, near_tie = load_pool(scratch, n), KeptRange(bound.low, tl.full((), MAX_ID, tl.int32)), n < 0
    if bound.has_top_k & (params.k < n):
        kept = select_prefix(pool, (pool.x > -INFINITY).to(tl.int64), params.k.to(tl.int64), top).kept
    if params.p < 1.0:
        unit = weight_unit(tl.minimum(tl.sum(groups.masses, 0), n.to(tl.float64)))
        weight = fixed_weight(pool.x, top, params.t, unit)
        weight = tl.where(is_kept(pool.x, pool.ids, kept), weight, 0)
        total_weight = tl.sum(weight, 0)
        if bound.mass > 0.0:
            total_weight = (bound.mass * unit).to(tl.int64)
        target = top_p_target(params.p, total_weight)
        selection = select_prefix(pool, weight, target, top)
        kept = selection.kept
        if bound.mass > 0.0:
            margin = target.to(tl.float64) * (2.0 * MASS_ERROR)
            near_tie = (selection.before + margin >= target) | (selection.total - margin < target)
    return kept, near_tie


@jit
def prepare_pending(scratch, groups, bound, top, t, pending, width: tl.constexpr):
    """Initialise the state of a pending row."""
    origin, end = likely_range(groups.tops, t)
    origin, end = tl.maximum(bound.low.to(tl.float64), origin), tl.minimum(end, top.to(tl.float64))
    view = make_view(bound.lowest, top, origin, tl.where(end > origin, end, top.to(tl.float64)))
    tl.store(pending.views + VIEW_ORIGIN, view.origin)
    tl.store(pending.views + VIEW_SCALE, view.scale)
    tl.store(pending.views + WEIGHT_UNIT, weight_unit(tl.sum(groups.masses, 0)))
    tl.store(pending.views + VIEW_LOWEST, bound.lowest.to(tl.float64))
    tl.store(pending.views + VIEW_HIGHEST, top.to(tl.float64))
    tl.store(pending.flags + POOLED, 0)
    tl.store(pending.flags + LOW, MAX_ID)
    tl.store(pending.flags + HIGH, -MAX_ID)
    clear_bins(pending.counts, pending.weights)
    tl.debug_barrier()
    tl.store(scratch.groups + tl.arange(0, width), tl.zeros((width,), tl.int32))


@jit
def likely_range(tops_G, t):
    """A score range that contains most tokens of a flat row, from the mean and mean deviation of the group maxima.

    Deviations are clipped at four times the mean deviation, so that outliers matter little. This is a heuristic: scores
    outside share the first or last bin, which can only cost more reads.
    """
    valid_G = tops_G > -INFINITY
    x_G, n = tl.where(valid_G, tops_G, 0.0).to(tl.float64), tl.sum(valid_G.to(tl.float64), 0)
    mean, margin = tl.sum(x_G, 0) / n, tl.full((), INFINITY, tl.float64)
    for _ in range(12):
        y_G = tl.minimum(tl.maximum(x_G, mean - margin), mean + margin)
        mean = tl.sum(tl.where(valid_G, y_G, 0.0), 0) / n
        margin = 4.0 * tl.sum(tl.where(valid_G, tl.abs(y_G - mean), 0.0), 0) / n
    margin = tl.where(margin > 0.0, margin, 2.0 * t)
    return mean - 5.0 * margin, mean + 1.5 * margin


@jit
def weight_unit(mass):
    """The fixed-point value of the weight 1. mass: an upper bound on the sum of the weights."""
    return tl.full((), TOTAL_WEIGHT, tl.float64) / tl.maximum(mass, 1.0)


@jit
def make_bounds(groups, top, params, size, width: tl.constexpr):
    floor = floor_score(groups, top, params, width)
    has_top_k = (params.k > 0.0) & (params.k < size)
    lowest = floor
    if has_top_k & (params.k <= tl.sum((groups.tops > -INFINITY).to(tl.int32), 0)):
        lowest = tl.maximum(lowest, kth_bound(groups.tops, params.k, top))
    mass = tl.where(has_top_k | (floor > LOWEST), 0.0, tl.sum(groups.masses, 0))
    low = lowest
    if (mass > 0.0) & (params.p < 1.0):
        low = tl.maximum(low, top_p_bound(groups.masses, (1.0 - params.p - TOP_P_MARGIN) * mass, top, params.t))
    return CutBounds(floor, lowest, low, has_top_k, mass)


@jit
def max_candidates(groups, low, params):
    """An upper bound on the number of tokens with at least this score: each has at least its weight."""
    ratio_G = tl.exp((groups.tops.to(tl.float64) - low.to(tl.float64)) / group_temperature(params))
    count_G = tl.minimum(groups.own * (1.0 + MASS_ERROR) * ratio_G, GROUP_SIZE)
    return tl.sum(tl.where(groups.tops >= low, count_G, 0.0), 0)


@jit
def apply_late_min_p(kept, top, params):
    """Apply the min-p after top-p."""
    if params.late_m > 0.0:
        threshold = lowest_kept(top, params.t, tl.log(params.late_m) - SLACK)
        last_id = tl.where(threshold > kept.threshold, MAX_ID, kept.last_id)
        kept = KeptRange(tl.maximum(kept.threshold, threshold), last_id)
    return kept


@jit
def floor_score(groups, top, params, width: tl.constexpr):
    """The lowest score that min-p and top-n-sigma keep: float32."""
    threshold = top * 0.0 + LOWEST
    if params.m > 0.0:
        threshold = tl.maximum(threshold, lowest_kept(top, params.t, tl.log(params.m) - SLACK))
    if params.sigmas > 0.0:
        below = -params.sigmas * deviation(groups, top, width) / params.t - SLACK
        threshold = tl.maximum(threshold, lowest_kept(top, params.t, below))
    return threshold


@jit
def deviation(groups, top, width: tl.constexpr):
    """The population standard deviation of the finite scores."""
    moments_G, valid_G = groups.moments + tl.arange(0, width), groups.tops > -INFINITY
    n_G = tl.load(moments_G, mask=valid_G, other=0.0)
    sum_G = tl.load(moments_G + width, mask=valid_G, other=0.0)
    square_G = tl.load(moments_G + 2 * width, mask=valid_G, other=0.0)
    off_G = tl.where(valid_G, groups.tops, top).to(tl.float64) - top.to(tl.float64)
    n = tl.sum(n_G, 0)
    mean = tl.sum(sum_G + n_G * off_G, 0) / n
    square = tl.sum(square_G + off_G * (2.0 * sum_G + n_G * off_G), 0) / n
    return tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@jit
def kth_bound(tops_G, k, top):
    """The k-th highest group maximum: at least k tokens reach it."""
    low, high = to_ordered(top * 0.0 + LOWEST), to_ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((tops_G >= from_ordered(middle)).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return from_ordered(low)


@jit
def top_p_bound(masses_G, rest, top, t):
    """A score below which all tokens together have at most the weight ``rest``."""
    low, high = tl.full((), -40.0, tl.float64), tl.full((), 0.0, tl.float64)
    found = tl.full((), -INFINITY, tl.float64)
    for _ in range(20):
        middle = (low + high) / 2.0
        little = tl.sum(tl.minimum(masses_G, tl.exp(middle) * GROUP_SIZE), 0) <= rest
        found = tl.where(little, middle, found)
        low, high = tl.where(little, middle, low), tl.where(little, high, middle)
    return tl.maximum((top.to(tl.float64) + found * t).to(tl.float32), LOWEST)
