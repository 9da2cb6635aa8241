"""Gumbel-max sampling in two levels, a group and then one of its tokens, in float64 as in the reference.

The float32 masses of the groups only select the groups that can win; the tokens of these groups are read again.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_pool import MAX_ID, TILE_GROUPS, is_kept, list_groups, tile_ids
from nucleate.sampling.backends.triton.device_memory import load_scores
from nucleate.sampling.backends.triton.float_bits import INFINITY, MASS_ERROR
from nucleate.sampling.backends.triton.triton_philox import GROUP, TOKEN, exponentials


@jit
def select_group(source, scratch, groups, kept, top, params, seed, step, width: tl.constexpr):
    """The group with the highest log mass plus Gumbel noise; equivalently, with the lowest E / mass, E exponential.

    An upper bound on the mass gives a lower bound on this time. Groups are evaluated in about the order of these
    bounds, until no remaining bound is below the best time.
    """
    bound_G = tl.where(groups.tops >= kept.threshold, mass_bounds(groups, top, params), 0.0)
    time_G = exponentials(seed, step, GROUP, tl.arange(0, width)) / tl.where(bound_G > 0.0, bound_G, 1.0)
    time_G = tl.where(bound_G > 0.0, time_G, INFINITY)
    limit = 4.0 / tl.sum(bound_G, 0)  # about four groups are below it
    best, winner = limit * 0.0 - INFINITY, tl.argmin(time_G, 0)
    next_time, end = tl.min(time_G, 0), limit * 0.0 + INFINITY
    while (next_time <= end) & (next_time < INFINITY):
        limit = tl.maximum(limit, 2.0 * next_time)
        chosen_G = time_G <= tl.minimum(limit, end)
        count = list_groups(chosen_G, scratch, width)
        key, group = best_group(source, scratch, count, kept, top, params, seed, step)
        better = (key > best) | ((key == best) & (key > -INFINITY) & (group < winner))
        best, winner = tl.where(better, key, best), tl.where(better, group, winner)
        end = tl.exp(-best) * (1.0 + 1e-9)
        time_G = tl.where(chosen_G & (tl.cumsum(chosen_G.to(tl.int32), 0) <= TILE_GROUPS), INFINITY, time_G)
        next_time = tl.min(time_G, 0)
    return winner


@jit
def mass_bounds(groups, top, params):
    """Upper bounds on the masses of groups after the late temperature, before top-p."""
    mass_G = groups.masses
    if (params.p < 1.0) & (params.late_t != 1.0):
        base_G = groups.own
        if params.late_t > 1.0:  # the power mean of 256 weights of at most 1
            base_G = tl.exp(tl.log(tl.maximum(base_G, 1.0) / GROUP_SIZE) / params.late_t) * GROUP_SIZE
        mass_G = tl.where(groups.tops > -INFINITY, base_G * tl.exp(scaled_scores(groups.tops, top, params)), 0.0)
    return mass_G * (1.0 + MASS_ERROR)


@jit
def best_group(source, scratch, count, kept, top, params, seed, step):
    """The highest score with noise among the first tile of listed groups, and its group."""
    ids = tile_ids(scratch, count, 0)
    x = load_scores(source, ids)
    y = tl.where(is_kept(x, ids, kept), scaled_scores(x, top, params), -INFINITY)
    y_GT = tl.reshape(y, (TILE_GROUPS, GROUP_SIZE))
    top_G = tl.max(y_GT, 1)
    base_G = tl.where(top_G > -INFINITY, top_G, 0.0)
    mass_G = tl.sum(tl.exp(y_GT - base_G[:, None]), 1)
    slot = tl.arange(0, TILE_GROUPS)
    group_G = tl.load(scratch.groups + slot, mask=slot < count, other=MAX_ID)
    key_G = top_G + tl.log(tl.maximum(mass_G, 1.0)) - tl.log(exponentials(seed, step, GROUP, group_G))
    key = tl.max(key_G, 0)
    return key, tl.min(tl.where(key_G == key, group_G, MAX_ID), 0)


@jit
def select_token(source, group, kept, top, params, seed, step):
    """The kept token of a group with the highest score plus noise."""
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    x = load_scores(source, ids)
    key = scaled_scores(x, top, params) - tl.log(exponentials(seed, step, TOKEN, ids))
    key = tl.where(is_kept(x, ids, kept), key, -INFINITY)
    return tl.min(tl.where(key == tl.max(key, 0), ids, MAX_ID), 0)


@jit
def scaled_scores(x, top, params):
    """Scores minus the top, after both temperatures: float64, with the rounding of the reference."""
    return (x.to(tl.float64) - top.to(tl.float64)) / params.t / params.late_t
