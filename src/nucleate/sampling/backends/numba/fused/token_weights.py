"""Token weights exp((x - max) / t): float32 sums over groups, float64 where a decision may be close."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit, loose
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.float64 import exp
from nucleate.sampling.backends.numba.fused.workspace import INEXACT, address_of
from nucleate.sampling.backends.numba.row_loading import floats_at
from nucleate.sampling.backends.numba.vector_lanes import GROUP

ERROR = 1e-5
"""Bounds the relative error of a sum of float32 weights, in units of 2^-24: a weight is exp(d) with x - top rounded
once, so it errs by |d| units, and by 4 of its own (``vector_lanes.exp``, 2e-7); a sum of 256 in four sums of 16 lanes
adds 10. In a race the noise makes up for at most 46 (u is at least 2^-65), so a group that may win has a d above -52;
in a sum over the row the mean of |d| by weight is at most log V, 12."""

HALF_UNIT, UNIT = 2.0**-24, 2.0**-53
"""Relative errors of one rounding to float32 and to float64."""


class WeightExponent(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t): what the vectors need to know."""

    top: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    least: Any  #: what is further below has no weight


@jit
def exponent_of(top: Any, t: Any) -> Any:
    c = 1.4426950408889634 / t
    high = np.float32(c)
    return WeightExponent(top, high, np.float32(c - np.float64(high)), np.float32(-126.0 / c))


@jit
def error_of(top: Any, t: Any, work: Any) -> Any:
    """ERROR, and by how much the rounding of edited scores to float32, half a unit of their size, changes a weight."""
    return ERROR + (HALF_UNIT * (abs(np.float64(top)) / t + 64.0) if work.state[INEXACT] > 0 else 0.0)


@inline
def mass_of(group: Any, cut: Any, exponent: Any, work: Any) -> Any:
    """The weight of a group's tokens at or above a cut."""
    at = address_of(group, work)
    return np.float64(block_ops.mass_above(at, exponent.top, exponent.high, exponent.low, exponent.least, cut))


@jit
def weigh(cut: Any, exponent: Any, work: Any) -> Any:
    """The weight of each group's tokens at or above a cut; returns that of all."""
    whole = 0.0
    for group in range(work.masses.size):
        mass = mass_of(group, cut, exponent, work) if work.tops[group] >= cut else 0.0
        work.masses[group] = mass
        whole += mass
    return whole


@loose
def at_most(masses: Any, each: Any) -> Any:
    """The sum of masses, where no more than ``each`` counts of one."""
    total = 0.0
    for group in range(masses.size):
        total += min(np.float64(masses[group]), each)
    return total


@jit
def bound(masses: Any, top: Any, t: Any, rest: Any) -> Any:
    """A score below which all tokens together have at most a weight of ``rest``."""
    low, high = -30.0, 0.0
    for _ in range(12):
        middle = (low + high) / 2
        if at_most(masses, GROUP * math.exp(middle)) <= rest:
            low = middle
        else:
            high = middle
    return np.float32(top + low * t)


@jit
def weigh_few(n: Any, best: Any, t: Any, work: Any) -> None:
    """The weights of n candidates; doubtful ones stay so."""
    for i in range(n):
        weight = exp((work.scores[i] - best) / t)
        work.weights[i] = weight if work.weights[i] > 0.0 else -weight


@jit
def weigh_group(kept: Any, group: Any, best: Any, t: Any, work: Any) -> Any:
    """The weights of a group's tokens as float64 in ``work.weights``, 0 for those that are out; returns their sum."""
    x, start, weights, mass = carray(floats_at(address_of(group, work)), GROUP), group * GROUP, work.weights, 0.0
    for i in range(GROUP):
        weights[i] = np.float64(x[i])
    edit = work.newest[group] if work.state[INEXACT] > 0 else -1
    while edit >= 0:
        weights[work.tokens[edit] - start] = work.values[edit]
        edit = work.earlier[edit]
    for i in range(GROUP):  # a loop of its own, so that it becomes vectors
        weights[i] = exp((weights[i] - best) / t)
    for i in range(GROUP):
        inside = (x[i] > kept.cut) | ((x[i] == kept.cut) & (start + i <= kept.last))
        weights[i] = weights[i] if inside else 0.0
        mass += weights[i]
    return mass
