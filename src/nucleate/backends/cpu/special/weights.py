"""How much tokens weigh: exp(d), d = (x - top) / t. Sums are float32, or float64 where they must be exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import exp
from nucleate.backends.cpu.special.races import weigh_group
from nucleate.backends.cpu.special.select import ID
from nucleate.backends.cpu.special.work import INEXACT, edit_of, patch_above

LOWEST = np.finfo(np.float32).min
"""What is at or above it is in: -inf is not."""

HALF_UNIT, UNIT = 2.0**-24, 2.0**-53
"""Relative errors of one rounding to float32 and to float64."""


class Exponent(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t): what the vectors need to know."""

    top: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    least: Any  #: what is further below has no weight


class Kept(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    cut: Any  #: float32
    over: Any  #: the next float32
    last: Any
    n: Any  #: how many, if they are in ``work.ids``, ascending, with weights; else MANY
    tied: Any  #: whether others may be left in truth


MANY = -1


@jit
def exponent_of(top: Any, t: Any) -> Any:
    c = 1.4426950408889634 / t
    high = np.float32(c)
    return Exponent(top, high, np.float32(c - np.float64(high)), np.float32(-126.0 / c))


@jit
def rounding(top: Any, t: Any, work: Any) -> Any:
    """By how much the rounding of edited scores may change a weight that counts."""
    return HALF_UNIT * (abs(np.float64(top)) / t + 64.0) if work.state[INEXACT] > 0 else 0.0


@jit
def weigh(cut: Any, exponent: Any, t: Any, exact: Any, work: Any) -> Any:
    """The weight of each group's tokens at or above a cut; returns that of all."""
    patch_above(work, cut)
    whole, those, top = 0.0, Kept(cut, cut, ID, MANY, False), np.float64(exponent.top)
    for group in range(work.masses.size):
        mass, at = 0.0, work.at[group]
        if work.tops[group] >= cut and exact:
            mass = weigh_group(those, group, top, t, work)
        elif work.tops[group] >= cut:
            mass = np.float64(simd.mass_above(at, 0, exponent.top, exponent.high, exponent.low, exponent.least, cut))
        work.masses[group] = mass
        whole += mass
    return whole


@jit
def weigh_few(n: Any, top: Any, t: Any, work: Any) -> None:
    """The weights of n candidates."""
    weights = work.weights
    for i in range(n):
        weights[i] = work.scores[i]
    if work.state[INEXACT] > 0:
        for i in range(n):
            edit = edit_of(work, work.ids[i])
            weights[i] = work.values[edit] if edit >= 0 else weights[i]
    for i in range(n):  # a loop of its own, so that it becomes vectors
        weights[i] = exp((weights[i] - top) / t)
