"""Token weights exp((x - max) / t): float32 sums over groups, float64 where a decision may be close."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit, loose
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.float64 import exp
from nucleate.sampling.backends.numba.fused.workspace import INEXACT_COUNT, edited_group_address
from nucleate.sampling.backends.numba.row_loading import floats_at
from nucleate.sampling.backends.numba.vector_lanes import GROUP_SIZE

FLOAT32_ERROR = 1e-5
"""Bounds the relative error of a sum of float32 weights, in units of 2^-24: a weight is exp(d) with x - top rounded
once, so it errs by |d| units, and by 4 of its own (``vector_lanes.exp``, 2e-7); a sum of 256 in four sums of 16 lanes
adds 10. In a race the noise makes up for at most 46 (u is at least 2^-65), so a group that may win has a d above -52;
in a sum over the row the mean of |d| by weight is at most log V, 12."""

HALF_UNIT, UNIT = 2.0**-24, 2.0**-53
"""Relative errors of one rounding to float32 and to float64."""


class WeightExponent(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t): what the vectors need to know."""

    max_score: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    underflow: Any  #: what is further below has no weight


@jit
def weight_exponent(max_score: Any, t: Any) -> Any:
    scale = 1.4426950408889634 / t
    high = np.float32(scale)
    return WeightExponent(max_score, high, np.float32(scale - np.float64(high)), np.float32(-126.0 / scale))


@jit
def weight_error(max_score: Any, t: Any, work: Any) -> Any:
    """ERROR, and by how much the rounding of edited scores to float32, half a unit of their size, changes a weight."""
    return FLOAT32_ERROR + (
        HALF_UNIT * (abs(np.float64(max_score)) / t + 64.0) if work.counters[INEXACT_COUNT] > 0 else 0.0
    )


@inline
def group_mass(group: Any, threshold: Any, exponent: Any, work: Any) -> Any:
    """The weight of a group's tokens at or above a cut."""
    address = edited_group_address(group, work)
    return np.float64(
        block_ops.mass_above(address, exponent.max_score, exponent.high, exponent.low, exponent.underflow, threshold)
    )


@jit
def weigh_groups(threshold: Any, exponent: Any, work: Any) -> Any:
    """The weight of each group's tokens at or above a cut; returns that of all."""
    total = 0.0
    for group in range(work.group_masses.size):
        mass = group_mass(group, threshold, exponent, work) if work.group_maxima[group] >= threshold else 0.0
        work.group_masses[group] = mass
        total += mass
    return total


@loose
def capped_sum(masses: Any, cap: Any) -> Any:
    """The sum of masses, where no more than ``each`` counts of one."""
    total = 0.0
    for group in range(masses.size):
        total += min(np.float64(masses[group]), cap)
    return total


@jit
def mass_bound(masses: Any, max_score: Any, t: Any, remaining_mass: Any) -> Any:
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = -30.0, 0.0
    for _ in range(12):
        middle = (low + high) / 2
        if capped_sum(masses, GROUP_SIZE * math.exp(middle)) <= remaining_mass:
            low = middle
        else:
            high = middle
    return np.float32(max_score + low * t)


@jit
def weigh_candidates(n: Any, exact_max: Any, t: Any, work: Any) -> None:
    """The weights of n candidates; doubtful ones stay so."""
    for i in range(n):
        weight = exp((work.scores[i] - exact_max) / t)
        work.weights[i] = weight if work.weights[i] > 0.0 else -weight


@jit
def weigh_group(kept: Any, group: Any, exact_max: Any, t: Any, work: Any) -> Any:
    """The weights of a group's tokens as float64 in ``work.weights``, 0 for those that are out; returns their sum."""
    x, start, weights, mass = (
        carray(floats_at(edited_group_address(group, work)), GROUP_SIZE),
        group * GROUP_SIZE,
        work.weights,
        0.0,
    )
    for i in range(GROUP_SIZE):
        weights[i] = np.float64(x[i])
    edit = work.last_edit[group] if work.counters[INEXACT_COUNT] > 0 else -1
    while edit >= 0:
        weights[work.edited_ids[edit] - start] = work.edited_scores[edit]
        edit = work.previous_edit[edit]
    for i in range(GROUP_SIZE):  # a loop of its own, so that it becomes vectors
        weights[i] = exp((weights[i] - exact_max) / t)
    for i in range(GROUP_SIZE):
        is_kept = (x[i] > kept.threshold) | ((x[i] == kept.threshold) & (start + i <= kept.last_id))
        weights[i] = weights[i] if is_kept else 0.0
        mass += weights[i]
    return mass
