"""The draw in two levels, a group and then one of its tokens, decided in float64 as the reference decides it.

The float32 masses of groups only say which groups can still win; of these the tokens that are left are read again.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_pool import GROUPS, LAST, ids_of, inside, listed
from nucleate.sampling.backends.triton.device_memory import scores
from nucleate.sampling.backends.triton.float_bits import ERROR, INFINITY
from nucleate.sampling.backends.triton.triton_philox import GROUP, TOKEN, times


@jit
def race(source, room, groups, kept, top, numbers, seed, step, width: tl.constexpr):
    """The group whose log mass plus Gumbel noise is the highest: an exponential time over its mass is the least.

    No group's time is before that of an upper bound on its mass. Groups are looked at in about the order of these
    times, until none is left that could be before the best.
    """
    most_G = tl.where(groups.tops >= kept.cut, most(groups, top, numbers), 0.0)
    time_G = times(seed, step, GROUP, tl.arange(0, width)) / tl.where(most_G > 0.0, most_G, 1.0)
    time_G = tl.where(most_G > 0.0, time_G, INFINITY)
    limit = 4.0 / tl.sum(most_G, 0)  # some four groups are before it
    best, winner = limit * 0.0 - INFINITY, tl.argmin(time_G, 0)
    next_time, end = tl.min(time_G, 0), limit * 0.0 + INFINITY
    while (next_time <= end) & (next_time < INFINITY):
        limit = tl.maximum(limit, 2.0 * next_time)
        chosen_G = time_G <= tl.minimum(limit, end)
        found = listed(chosen_G, room, width)
        key, group = best_of(source, room, found, kept, top, numbers, seed, step)
        better = (key > best) | ((key == best) & (key > -INFINITY) & (group < winner))
        best, winner = tl.where(better, key, best), tl.where(better, group, winner)
        end = tl.exp(-best) * (1.0 + 1e-9)
        time_G = tl.where(chosen_G & (tl.cumsum(chosen_G.to(tl.int32), 0) <= GROUPS), INFINITY, time_G)
        next_time = tl.min(time_G, 0)
    return winner


@jit
def most(groups, top, numbers):
    """Upper bounds on the masses of groups after the last temperature, of which top-p does not know."""
    mass_G = groups.masses
    if (numbers.p < 1.0) & (numbers.late_t != 1.0):
        own_G = groups.own
        if numbers.late_t > 1.0:  # the power mean of 256 weights of at most 1
            own_G = tl.exp(tl.log(tl.maximum(own_G, 1.0) / GROUP_SIZE) / numbers.late_t) * GROUP_SIZE
        mass_G = tl.where(groups.tops > -INFINITY, own_G * tl.exp(tempered(groups.tops, top, numbers)), 0.0)
    return mass_G * (1.0 + ERROR)


@jit
def best_of(source, room, found, kept, top, numbers, seed, step):
    """The highest score with noise of the first listed groups, one tile, and its group."""
    ids = ids_of(room, found, 0)
    x = scores(source, ids)
    y = tl.where(inside(x, ids, kept), tempered(x, top, numbers), -INFINITY)
    y_GT = tl.reshape(y, (GROUPS, GROUP_SIZE))
    top_G = tl.max(y_GT, 1)
    own_G = tl.where(top_G > -INFINITY, top_G, 0.0)
    mass_G = tl.sum(tl.exp(y_GT - own_G[:, None]), 1)
    slot = tl.arange(0, GROUPS)
    group_G = tl.load(room.groups + slot, mask=slot < found, other=LAST)
    key_G = top_G + tl.log(tl.maximum(mass_G, 1.0)) - tl.log(times(seed, step, GROUP, group_G))
    key = tl.max(key_G, 0)
    return key, tl.min(tl.where(key_G == key, group_G, LAST), 0)


@jit
def token_of(source, group, kept, top, numbers, seed, step):
    """The token of a group that wins, among those that are left."""
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    x = scores(source, ids)
    key = tempered(x, top, numbers) - tl.log(times(seed, step, TOKEN, ids))
    key = tl.where(inside(x, ids, kept), key, -INFINITY)
    return tl.min(tl.where(key == tl.max(key, 0), ids, LAST), 0)


@jit
def tempered(x, top, numbers):
    """Scores below the top after both temperatures, float64, rounded as the reference rounds them."""
    return (x.to(tl.float64) - top.to(tl.float64)) / numbers.t / numbers.late_t
