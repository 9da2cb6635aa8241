"""Finds where top-p's cumulative weight reaches its target when there are too many candidates to list.

Passes over the row sum the weights above several thresholds at once, and narrow them down around the target until few
tokens remain between two of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import jit
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.fused.prefix_selection import (
    UNBOUNDED,
    count_at_least,
    gather_candidates,
    weight_at_least,
)
from nucleate.sampling.backends.numba.fused.workspace import edited_group_address, score
from nucleate.sampling.backends.numba.vector_lanes import GROUP_SIZE, LANES

THRESHOLDS = 8
"""Thresholds per pass."""

MAX_LISTED = 4096
"""Maximum number of candidates that are listed; more are narrowed down by passes over the row."""

MAX_PASSES = 7
"""Maximum number of passes."""

SAMPLED_GROUPS = 32
"""Groups sampled for the first guess."""


@jit
def narrow_interval(
    lower: Any, mass_at_upper: Any, upper: Any, mass_at_lower: Any, min_target: Any, target: Any, exponent: Any,
    work: Any,
) -> Any:  # fmt: skip
    """One pass: the thresholds around the target, as (lower, mass_at_upper, upper, mass_at_lower)."""
    thresholds, sums = work.thresholds, work.partial_sums
    sums[:] = 0.0
    max_score, high, low, underflow = exponent
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] >= thresholds[THRESHOLDS - 1]:
            address, thresholds_at = edited_group_address(group, work), np.int64(thresholds.ctypes.data)
            block_ops.masses_above(address, max_score, high, low, underflow, thresholds_at, np.int64(sums.ctypes.data))
    for i in range(THRESHOLDS):
        if sums[i] >= target:
            if thresholds[i] > lower:
                lower, mass_at_lower = thresholds[i], sums[i]
            break
        if sums[i] < min_target and thresholds[i] < upper:
            upper, mass_at_upper = thresholds[i], sums[i]
    return lower, mass_at_upper, upper, mass_at_lower


@jit
def gather_around_target(lower: Any, mass_at_lower: Any, min_target: Any, target: Any, exponent: Any, work: Any) -> Any:
    """Gather the tokens around the one that reaches the target: (their number, the weight of higher-ranked tokens).

    lower, mass_at_lower: a lower bound of its score, and the weight there. min_target: the target less its error.
    """
    mass_at_upper, upper = 0.0, UNBOUNDED
    for pass_index in range(MAX_PASSES):
        is_few = count_at_least(lower, work) - count_at_least(upper, work) <= MAX_LISTED
        if pass_index > 0 and not is_few:
            gathered = work.scores[: gather_candidates(lower, upper, work)]
            is_few = gathered.min() == gathered.max()
        if is_few:
            break
        low, high = np.float64(lower), min(np.float64(upper), np.float64(exponent.max_score))
        if pass_index == 0:
            guess = sampled_quantile(target / mass_at_lower, low, high, exponent, work)
        else:
            guess = high + (low - high) * min(max((target - mass_at_upper) / (mass_at_lower - mass_at_upper), 0.0), 1.0)
        place_thresholds(work.thresholds, low, high, guess, pass_index % 2 == 0)
        lower, mass_at_upper, upper, mass_at_lower = narrow_interval(
            lower, mass_at_upper, upper, mass_at_lower, min_target, target, exponent, work
        )
    return gather_candidates(lower, upper, work), mass_at_upper


@jit
def sampled_quantile(fraction: Any, low: Any, high: Any, exponent: Any, work: Any) -> Any:
    """An estimate, from a sample, of the score at which a fraction of the weight above ``low`` is reached."""
    n, step, scale = 0, max(1, work.group_maxima.size // SAMPLED_GROUPS), exponent.high * math.log(2.0)
    for group in range(0, work.group_maxima.size, step):
        for i in range(LANES):
            x = np.float64(score(work, group * GROUP_SIZE + group % LANES * LANES + i))
            if x >= low:
                work.scores[n], work.weights[n] = x, math.exp((x - exponent.max_score) * scale)
                n += 1
    target = fraction * weight_at_least(work.scores[:n], work.weights[:n], low)
    for _ in range(10):
        middle = (low + high) / 2.0
        if weight_at_least(work.scores[:n], work.weights[:n], middle) >= target:
            low = middle
        else:
            high = middle
    return low


@jit
def place_thresholds(thresholds: Any, low: Any, high: Any, guess: Any, near: Any) -> None:
    """Set thresholds between low and high, in descending order: evenly spaced, or close around a guess (near)."""
    step, middle = (high - low) / 64, (THRESHOLDS - 1) / 2
    for i in range(THRESHOLDS):
        if near:
            thresholds[i] = np.float32(min(max(guess + step * (middle - i) * abs(middle - i) / 2, low), high))
        else:
            thresholds[i] = np.float32(high + (low - high) * (i + 1) / (THRESHOLDS + 1))
