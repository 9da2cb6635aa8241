"""The two-level Gumbel draw, as a race: the highest log m + gumbel(u) is the least time e / m with e = -log1p(-u).

As e is at least u, most are out of the race before a logarithm is taken, and most groups of a row before their mass is:
256 times the weight of its best token is a bound. Whoever wins must do so by more than the error of the times. Float32
masses tell who is left; these are weighed again in float64, and where that is not enough either, the row is TIED.

**Errors**, relative, in units of 2^-24 for float32 and 2^-53 for float64. A float32 weight is exp(d / t) with
d = x - top rounded once, so it errs by |d| / t units, and by 4 of its own (``lanes.exp``, 2e-7); a sum of 256 in four
sums of 16 lanes adds 10. In a race the noise makes up for at most 46 (u is at least 2^-65), so a group that may win has
a d / t above -52: FAST is beyond 52 + 14 units. Where edits were rounded to float32, each score errs by half a unit of
its size more (``cuts.rounding``). In float64 a time is made of ten operations on numbers below 64 and a sum of 256,
here and in the reference: together less than 1300 units. SURE is 9000.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import exp
from nucleate.backends.cpu.load import floats_at
from nucleate.backends.cpu.noise import GROUP as GROUP_STREAM
from nucleate.backends.cpu.noise import TOKEN as TOKEN_STREAM
from nucleate.backends.cpu.noise import uniform, uniforms
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.table import NOT_DRAWN as TIED
from nucleate.backends.cpu.special.work import DOUBTED, EDITED, INEXACT, patch

FAST, SURE = 1e-5, 1e-12
"""Relative errors of a group's mass in float32, and of any time in float64."""


@jit
def weigh_group(kept: Any, group: Any, top: Any, t: Any, work: Any) -> Any:
    """The weights of a group's tokens as float64 in ``work.weights``, 0 for those that are out; returns their sum."""
    x, start, weights = carray(floats_at(work.at[group]), GROUP), group * GROUP, work.weights
    for i in range(GROUP):
        weights[i] = np.float64(x[i])
    edit = work.newest[group] if work.state[INEXACT] > 0 else -1
    while edit >= 0:
        weights[work.tokens[edit] - start] = work.values[edit]
        edit = work.earlier[edit]
    for i in range(GROUP):  # a loop of its own, so that it becomes vectors
        weights[i] = exp((weights[i] - top) / t)
    mass = 0.0
    for i in range(GROUP):
        inside = (x[i] > kept.cut) | ((x[i] == kept.cut) & (start + i <= kept.last))
        weights[i] = weights[i] if inside else 0.0
        mass += weights[i]
    return mass


@jit
def doubted(kept: Any, group: Any, top: Any, t: Any, work: Any) -> Any:
    """The weight of those tokens of a group that may be in or not."""
    mass = 0.0
    for i in range(work.state[DOUBTED]):
        token = work.doubts[i]
        if token >> 8 == group:
            x = np.float64(simd.one_at(work.at[group] + ((token & 255) << 2)))
            mass += math.exp((x - top) / t) * (1.0 + FAST)
    return mass


@jit
def race_many(kept: Any, exponent: Any, t: Any, slop: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from all that are left."""
    top, groups, times = np.float64(exponent.top), work.tops.size, work.times
    uniforms(work.noise, groups, seed, step, GROUP_STREAM, 0)
    for group in range(groups):  # no group is faster than this
        times[group] = work.noise[group] * exp((top - np.float64(work.tops[group])) / t) * ((1.0 - 2.0 * slop) / GROUP)
    first = 0
    for group in range(groups):
        if work.tops[group] < kept.cut:
            times[group] = np.inf
        first = group if times[group] < times[first] else first
    reach, count = np.inf, 0
    for turn in range(-1, groups):
        group = first if turn < 0 else turn
        if turn == first or not times[group] <= reach:
            continue
        if work.state[EDITED] > 0 and work.pending[group] != 0:
            patch(work, group)
        start = group * GROUP
        if start <= kept.last < start + GROUP:
            mass = weigh_group(kept, group, top, t, work)
        else:
            cut = kept.over if start > kept.last else kept.cut
            mass = np.float64(
                simd.mass_above(work.at[group], 0, exponent.top, exponent.high, exponent.low, exponent.least, cut)
            )
        least = mass * (1.0 - slop)
        if work.state[DOUBTED] > 0:
            least -= doubted(kept, group, top, t, work)
        e = -math.log1p(-work.noise[group])
        times[group] = e / (mass * (1.0 + slop))
        work.groups[count] = group
        count += mass > 0.0
        reach = min(reach, e / least) if least > 0.0 else reach
    left = 0
    for i in range(count):
        work.groups[left] = work.groups[i]
        left += times[work.groups[i]] <= reach
    winner = work.groups[0] if left == 1 else decide(kept, left, top, t, work)
    return race_in(kept, winner, top, t, seed, step, work) if winner >= 0 else winner


@jit
def decide(kept: Any, n: Any, top: Any, t: Any, work: Any) -> Any:
    """Which of the first n groups wins, by masses in float64; or TIED."""
    best, latest, rival, winner = np.inf, np.inf, np.inf, np.int64(TIED)
    for i in range(n):
        group = work.groups[i]
        mass = weigh_group(kept, group, top, t, work)
        least = mass * (1.0 - SURE) - doubted(kept, group, top, t, work)
        e = -math.log1p(-work.noise[group])
        time = e / mass if mass > 0.0 else np.inf
        if time < best:
            best, rival, winner = time, best, group
            latest = e / least if least > 0.0 else np.inf
        else:
            rival = min(rival, time)
    return TIED if rival * (1.0 - SURE) <= latest else winner


@jit
def race_in(kept: Any, group: Any, top: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token of a group that wins."""
    start, weights = group * GROUP, work.weights
    weigh_group(kept, group, top, t, work)
    uniforms(work.noise, GROUP, seed, step, TOKEN_STREAM, start)
    best, rival, winner = np.inf, np.inf, TIED
    for i in range(GROUP):
        if work.noise[i] < rival * weights[i]:
            time = -math.log1p(-work.noise[i]) / weights[i]
            if time < best:
                best, rival, winner = time, best, start + i
            else:
                rival = min(rival, time)
    for i in range(work.state[DOUBTED]):
        if work.doubts[i] == winner:
            return TIED
    return TIED if rival * (1.0 - SURE) <= best else winner


@jit
def race_few(ids: Any, weights: Any, n: Any, seed: Any, step: Any) -> Any:
    """The draw among a few tokens, by ascending id. A negative weight is that of a token that may be in or not."""
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
    best, rival, winner = np.inf, np.inf, TIED
    for i in range(first, end):
        u, weight = uniform(seed, step, TOKEN_STREAM, ids[i]), abs(weights[i])
        if u < rival * weight:
            time = -math.log1p(-u) / weight
            if time < best:
                best, rival, winner = time, best, ids[i] if weights[i] > 0.0 else TIED
            else:
                rival = min(rival, time)
    return TIED if rival * (1.0 - SURE) <= best else winner
