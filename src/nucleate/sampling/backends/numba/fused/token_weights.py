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
"""Bound on the relative error of a sum of float32 weights (168 units of 2^-24). A weight exp(d), with x - max rounded
once, errs by |d| + 4 units (``vector_lanes.exp``: 2e-7); a sum of 256 in four sums of 16 lanes adds 10. In a race, the
noise outweighs at most d = -46 (u >= 2^-65), so a group that may win has d > -52; in a sum over the row, the weighted
mean of |d| is at most log V, about 12."""

HALF_UNIT, UNIT = 2.0**-24, 2.0**-53
"""Relative errors of one rounding to float32 and to float64."""


class WeightExponent(NamedTuple):
    """The arguments with which ``block_ops`` computes exp((x - max) / t)."""

    max_score: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    underflow: Any  #: lower values of x - max have weight 0


@jit
def weight_exponent(max_score: Any, t: Any) -> Any:
    scale = 1.4426950408889634 / t
    high = np.float32(scale)
    return WeightExponent(max_score, high, np.float32(scale - np.float64(high)), np.float32(-126.0 / scale))


@jit
def weight_error(max_score: Any, t: Any, work: Any) -> Any:
    """FLOAT32_ERROR, plus the effect of rounding edited scores to float32."""
    rounding = HALF_UNIT * (abs(np.float64(max_score)) / t + 64.0) if work.counters[INEXACT_COUNT] > 0 else 0.0
    return FLOAT32_ERROR + rounding


@inline
def group_mass(group: Any, threshold: Any, exponent: Any, work: Any) -> Any:
    """The weight of a group's tokens at or above a threshold."""
    address, (max_score, high, low, underflow) = edited_group_address(group, work), exponent
    return np.float64(block_ops.mass_above(address, max_score, high, low, underflow, threshold))


@jit
def weigh_groups(threshold: Any, exponent: Any, work: Any) -> Any:
    """Fill ``group_masses`` with the weight of each group's tokens at or above a threshold. Returns the sum."""
    total = 0.0
    for group in range(work.group_masses.size):
        mass = group_mass(group, threshold, exponent, work) if work.group_maxima[group] >= threshold else 0.0
        work.group_masses[group] = mass
        total += mass
    return total


@loose
def capped_sum(masses: Any, cap: Any) -> Any:
    """The sum of min(mass, cap)."""
    total = 0.0
    for group in range(masses.size):
        total += min(np.float64(masses[group]), cap)
    return total


@jit
def mass_bound(masses: Any, max_score: Any, t: Any, remaining_mass: Any) -> Any:
    """A score below which all tokens together have at most a weight of ``remaining_mass``."""
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
    """Compute the weights of n candidates; uncertain ones stay negative."""
    for i in range(n):
        weight = exp((work.scores[i] - exact_max) / t)
        work.weights[i] = weight if work.weights[i] > 0.0 else -weight


@jit
def weigh_group(kept: Any, group: Any, exact_max: Any, t: Any, work: Any) -> Any:
    """Compute the float64 weights of a group in ``work.weights``, 0 for removed tokens. Returns their sum."""
    x = carray(floats_at(edited_group_address(group, work)), GROUP_SIZE)
    start, weights, mass = group * GROUP_SIZE, work.weights, 0.0
    for i in range(GROUP_SIZE):
        weights[i] = np.float64(x[i])
    edit = work.last_edit[group] if work.counters[INEXACT_COUNT] > 0 else -1
    while edit >= 0:
        weights[work.edited_ids[edit] - start] = work.edited_scores[edit]
        edit = work.previous_edit[edit]
    for i in range(GROUP_SIZE):  # separate loop, so that LLVM vectorises it
        weights[i] = exp((weights[i] - exact_max) / t)
    for i in range(GROUP_SIZE):
        is_kept = (x[i] > kept.threshold) | ((x[i] == kept.threshold) & (start + i <= kept.last_id))
        weights[i] = weights[i] if is_kept else 0.0
        mass += weights[i]
    return mass
