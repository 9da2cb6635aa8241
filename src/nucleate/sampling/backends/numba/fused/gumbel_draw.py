"""The two-level Gumbel draw as an exponential race: argmax of log m + gumbel(u) is argmin of e / m, e = -log1p(-u).

Since e >= u, most entries lose before a logarithm is computed, and most groups before their mass is: 256 times the
weight of the group maximum bounds it. The winner must lead by more than the error of the times, else the row is TIED.
For float32 masses that error is ``token_weights.FLOAT32_ERROR``. In float64, a time takes ten operations on numbers
below 64 and a sum of 256, here and in the reference: an error below 1300 units of 2^-53. TIME_ERROR is 9000 units."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba.float64 import exp
from nucleate.sampling.backends.numba.fused.fused_sampler import NOT_DRAWN as TIED
from nucleate.sampling.backends.numba.fused.prefix_selection import next_up
from nucleate.sampling.backends.numba.fused.token_weights import (
    FLOAT32_ERROR,
    group_mass,
    weigh_group,
    weight_error,
    weight_exponent,
)
from nucleate.sampling.backends.numba.fused.workspace import UNCERTAIN_COUNT, score
from nucleate.sampling.backends.numba.philox import uniform, uniforms
from nucleate.sampling.backends.numba.vector_lanes import GROUP_SIZE
from nucleate.sampling.noise import GROUP as GROUP_STREAM
from nucleate.sampling.noise import TOKEN as TOKEN_STREAM

TIME_ERROR = 1e-12
"""Relative error of a time in float64."""


@jit
def uncertain_mass(group: Any, exact_max: Any, t: Any, work: Any) -> Any:
    """The weight of a group's uncertain tokens."""
    mass = 0.0
    for i in range(work.counters[UNCERTAIN_COUNT]):
        if work.uncertain_ids[i] >> 8 == group:
            mass += math.exp((np.float64(score(work, work.uncertain_ids[i])) - exact_max) / t) * (1.0 + FLOAT32_ERROR)
    return mass


@jit
def race_groups(kept: Any, max_score: Any, exact_max: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw from surviving tokens that are not listed. max_score, exact_max: see ``cutoffs.truncate``."""
    exponent, error = weight_exponent(max_score, t), weight_error(max_score, t, work)
    groups, times = work.group_maxima.size, work.race_times
    uniforms(work.noise, groups, seed, step, GROUP_STREAM, 0)
    for group in range(groups):  # lower bounds
        e = work.noise[group] * (1.0 - 2.0 * error)
        times[group] = e / (GROUP_SIZE * exp((np.float64(work.group_maxima[group]) - exact_max) / t))
    first = 0
    for group in range(groups):
        if work.group_maxima[group] < kept.threshold:
            times[group] = np.inf
        first = group if times[group] < times[first] else first
    winner: Any = np.int64(TIED)
    best_time, best_latest, second_time = np.inf, np.inf, np.inf
    for index in range(-1, groups):
        group = first if index < 0 else index
        if index == first or not times[group] <= best_latest:
            continue
        start = group * GROUP_SIZE
        if start <= kept.last_id < start + GROUP_SIZE:
            mass = weigh_group(kept, group, exact_max, t, work)
        else:
            threshold = next_up(kept.threshold) if start > kept.last_id else kept.threshold
            mass = group_mass(group, threshold, exponent, work)
        e, min_mass = -math.log1p(-work.noise[group]), mass * (1.0 - error)
        if work.counters[UNCERTAIN_COUNT] > 0:
            min_mass -= uncertain_mass(group, exact_max, t, work)
        earliest = e / (mass * (1.0 + error)) if mass > 0.0 else np.inf
        if earliest < best_time:
            winner, best_time, second_time = group, earliest, best_time
            best_latest = e / min_mass if min_mass > 0.0 else np.inf
        else:
            second_time = min(second_time, earliest)
    return TIED if second_time <= best_latest else race_in_group(kept, winner, exact_max, t, seed, step, work)


@jit
def race_in_group(kept: Any, group: Any, exact_max: Any, t: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw a token of the winning group."""
    start = group * GROUP_SIZE
    weigh_group(kept, group, exact_max, t, work)
    uniforms(work.noise, GROUP_SIZE, seed, step, TOKEN_STREAM, start)
    for i in range(GROUP_SIZE):
        work.ids[i] = start + i
    for i in range(work.counters[UNCERTAIN_COUNT]):
        if work.uncertain_ids[i] >> 8 == group:
            work.weights[work.uncertain_ids[i] & 255] *= -1.0
    return race_tokens(0, GROUP_SIZE, work)


@jit
def race_candidates(n: Any, seed: Any, step: Any, work: Any) -> Any:
    """Draw from n candidates in ascending order of ids. Uncertain tokens have negative weights."""
    ids, weights = work.ids, work.weights
    best_time, best_latest, second_time, best_start, best_end, i = np.inf, np.inf, np.inf, 0, 0, 0
    while i < n:
        group, start, mass, min_mass = ids[i] >> 8, i, 0.0, 0.0
        while i < n and ids[i] >> 8 == group:
            mass += abs(weights[i])
            min_mass += max(weights[i], 0.0)
            i += 1
        u = uniform(seed, step, GROUP_STREAM, group)
        if u < second_time * mass:
            e = -math.log1p(-u)
            time = e / mass
            if time < best_time:
                best_time, second_time, best_start, best_end = time, best_time, start, i
                best_latest = e / min_mass if min_mass > 0.0 else np.inf
            else:
                second_time = min(second_time, time)
    if second_time * (1.0 - TIME_ERROR) <= best_latest:
        return TIED
    for i in range(best_start, best_end):
        work.noise[i - best_start] = uniform(seed, step, TOKEN_STREAM, ids[i])
    return race_tokens(best_start, best_end, work)


@jit
def race_tokens(first: Any, end: Any, work: Any) -> Any:
    """Draw from the candidates first..end, all of one group, with the noise in ``work.noise``."""
    winner: Any = np.int64(TIED)
    best_time, second_time = np.inf, np.inf
    for i in range(first, end):
        u, weight = work.noise[i - first], abs(work.weights[i])
        if u < second_time * weight:
            time = -math.log1p(-u) / weight
            if time < best_time:
                best_time, second_time, winner = time, best_time, work.ids[i] if work.weights[i] > 0.0 else TIED
            else:
                second_time = min(second_time, time)
    return TIED if second_time * (1.0 - TIME_ERROR) <= best_time else winner
