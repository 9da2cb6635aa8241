"""The two-level Gumbel draw, as a race: the highest log m + gumbel(u) is the least time e / m with e = -log1p(-u).

As e is at least u, most are out of the race before a logarithm is taken, and most groups of a row before their mass is:
256 times the weight of its best token is a bound. Whoever wins must do so by more than the error of the times, else the
row is TIED. Of float32 masses that is ``token_weights.ERROR``. In float64 a time is made of ten operations on numbers
below 64 and a sum of 256, here and in the reference: together less than 1300 units of 2^-53. SURE is 9000."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba.float64 import exp
from nucleate.sampling.backends.numba.fused.prefix_selection import next_up
from nucleate.sampling.backends.numba.fused.row_table import NOT_DRAWN as TIED
from nucleate.sampling.backends.numba.fused.token_weights import ERROR, error_of, exponent_of, mass_of, weigh_group
from nucleate.sampling.backends.numba.fused.workspace import DOUBTED, score
from nucleate.sampling.backends.numba.philox import uniform, uniforms
from nucleate.sampling.backends.numba.vector_lanes import GROUP
from nucleate.sampling.noise import GROUP as GROUP_STREAM
from nucleate.sampling.noise import TOKEN as TOKEN_STREAM

SURE = 1e-12
"""Relative error of a time in float64."""


@jit
def doubted(group: Any, best: Any, t: Any, work: Any) -> Any:
    """The weight of those tokens of a group that may be in or not."""
    mass = 0.0
    for i in range(work.state[DOUBTED]):
        if work.doubts[i] >> 8 == group:
            mass += math.exp((np.float64(score(work, work.doubts[i])) - best) / t) * (1.0 + ERROR)
    return mass


@jit
def race_many(kept: Any, top: Any, best: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from all that are left. top, best: as of ``cutoffs.narrow``."""
    exponent, slop = exponent_of(top, t), error_of(top, t, work)
    groups, times = work.tops.size, work.times
    uniforms(work.noise, groups, seed, step, GROUP_STREAM, 0)
    for group in range(groups):  # no group is faster than this
        times[group] = work.noise[group] * (1.0 - 2.0 * slop) / (GROUP * exp((np.float64(work.tops[group]) - best) / t))
    first = 0
    for group in range(groups):
        if work.tops[group] < kept.cut:
            times[group] = np.inf
        first = group if times[group] < times[first] else first
    winner: Any = np.int64(TIED)
    fastest, reach, rival = np.inf, np.inf, np.inf
    for turn in range(-1, groups):
        group = first if turn < 0 else turn
        if turn == first or not times[group] <= reach:
            continue
        start = group * GROUP
        if start <= kept.last < start + GROUP:
            mass = weigh_group(kept, group, best, t, work)
        else:
            mass = mass_of(group, next_up(kept.cut) if start > kept.last else kept.cut, exponent, work)
        e, least = -math.log1p(-work.noise[group]), mass * (1.0 - slop)
        if work.state[DOUBTED] > 0:
            least -= doubted(group, best, t, work)
        earliest = e / (mass * (1.0 + slop)) if mass > 0.0 else np.inf
        if earliest < fastest:
            winner, fastest, rival = group, earliest, fastest
            reach = e / least if least > 0.0 else np.inf
        else:
            rival = min(rival, earliest)
    return TIED if rival <= reach else race_in(kept, winner, best, t, seed, step, work)


@jit
def race_in(kept: Any, group: Any, best: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token of a group that wins."""
    start = group * GROUP
    weigh_group(kept, group, best, t, work)
    uniforms(work.noise, GROUP, seed, step, TOKEN_STREAM, start)
    for i in range(GROUP):
        work.ids[i] = start + i
    for i in range(work.state[DOUBTED]):
        if work.doubts[i] >> 8 == group:
            work.weights[work.doubts[i] & 255] *= -1.0
    return race_between(0, GROUP, work)


@jit
def race_few(n: Any, seed: Any, step: Any, work: Any) -> Any:
    """The draw among n candidates, by ascending id. A negative weight is that of a token that may be in or not."""
    ids, weights = work.ids, work.weights
    best, latest, rival, first, end, i = np.inf, np.inf, np.inf, 0, 0, 0
    while i < n:
        group, start, mass, least = ids[i] >> 8, i, 0.0, 0.0
        while i < n and ids[i] >> 8 == group:
            mass += abs(weights[i])
            least += max(weights[i], 0.0)
            i += 1
        u = uniform(seed, step, GROUP_STREAM, group)
        if u < rival * mass:
            e = -math.log1p(-u)
            time = e / mass
            if time < best:
                best, rival, first, end = time, best, start, i
                latest = e / least if least > 0.0 else np.inf
            else:
                rival = min(rival, time)
    if rival * (1.0 - SURE) <= latest:
        return TIED
    for i in range(first, end):
        work.noise[i - first] = uniform(seed, step, TOKEN_STREAM, ids[i])
    return race_between(first, end, work)


@jit
def race_between(first: Any, end: Any, work: Any) -> Any:
    """The draw among candidates of one group, with their noise."""
    winner: Any = np.int64(TIED)
    best, rival = np.inf, np.inf
    for i in range(first, end):
        u, weight = work.noise[i - first], abs(work.weights[i])
        if u < rival * weight:
            time = -math.log1p(-u) / weight
            if time < best:
                best, rival, winner = time, best, work.ids[i] if work.weights[i] > 0.0 else TIED
            else:
                rival = min(rival, time)
    return TIED if rival * (1.0 - SURE) <= best else winner
