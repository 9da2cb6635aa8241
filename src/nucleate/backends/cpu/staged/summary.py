"""The statistics of the scores that are in, as far as somebody asks for them. Knows no stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.doubles import LOWEST, exp, extremes, loose, told
from nucleate.backends.cpu.simd import GROUP, Scores
from nucleate.backends.cpu.staged.old import kernel
from nucleate.backends.cpu.weights import weigh

MASS, MOMENTS = 1, 2

LITTLE = 1e-280
"""An entropy that is less may be too small for ``weigh``."""


@kernel
def scan(x: Any, m: Any) -> Any:
    """(highest score, lowest) of m scores. The highest is NaN if one is NaN or +inf, or if all are at -inf."""
    high, low = extremes(x, m)
    return told(high, low)


@kernel
def widen(row: Any, x: Any) -> Any:
    """A row as float64, and what ``scan`` says of it."""
    m = row.size
    for i in range(m):
        x[i] = row[i]
    high, low = extremes(x, m)
    return told(high, low)


@loose
def masses(x: Any, m: Any, top: Any) -> Any:
    mass, square, share = 0.0, 0.0, 0.0
    for i in range(m):
        below = max(x[i] - top, LOWEST)
        e = exp(below)
        mass += e
        square += e * e
        share += e * below
    return mass, square, share


@loose
def masses_and_weights(x: Any, m: Any, top: Any, weights: Any) -> Any:
    mass, square, share = 0.0, 0.0, 0.0
    for i in range(m):
        below = max(x[i] - top, LOWEST)
        e = exp(below)
        weights[i] = e
        mass += e
        square += e * e
        share += e * below
    return mass, square, share


@loose
def mean_of(x: Any, m: Any, top: Any) -> Any:
    total = 0.0
    for i in range(m):
        total += max(x[i] - top, LOWEST)
    return total / m


@loose
def variance_of(x: Any, m: Any, top: Any, mean: Any) -> Any:
    total = 0.0
    for i in range(m):
        far = max(x[i] - top, LOWEST) - mean
        total += far * far
    return total / m


@kernel
def statistics(x: Any, m: Any, top: Any, wanted: Any, row: Any) -> None:
    """Put mass, square, entropy, mean and variance into ``row``, as far as they are wanted."""
    if wanted & MASS:
        mass, square, share = masses(x, m, top)
        row[0], row[1], row[2] = mass, square, np.log(mass) - share / mass
    if wanted & MOMENTS:
        row[3] = mean_of(x, m, top)
        row[4] = variance_of(x, m, top, row[3])


@kernel
def statistics_and_weights(x: Any, m: Any, top: Any, row: Any, weights: Any) -> None:
    """Mass, square and entropy, and exp(x - top) of each score."""
    mass, square, share = masses_and_weights(x, m, top, weights)
    row[0], row[1], row[2] = mass, square, np.log(mass) - share / mass


@loose
def exactly(x: Any, top: Any, slope: Any) -> Any:
    mass, share = 0.0, 0.0
    for i in range(x.size):
        below = max((x[i] - top) * slope, LOWEST)
        e = exp(below)
        mass += e
        share += e * below
    return mass, share


@kernel
def summary(x: Any, tail: Any, top: Any, slope: Any, row: Any, masses: Any) -> None:
    """Mass and entropy of a whole float32 row times a slope, and the mass of each group. tail: as of ``simd``."""
    mass = 0.0
    row[1] = 0.0
    for group in range(masses.size):
        start = group * GROUP
        inside = start + GROUP <= x.size
        masses[group] = weigh(x if inside else tail, start if inside else 0, top, slope, row)
        mass += masses[group]
    share = row[1]
    if -share < LITTLE:  # beside the top there are at most tokens too light for ``weigh``
        mass, share = exactly(x, top, slope)
    row[0], row[1] = mass, np.log(mass) - share / mass


@kernel
def moments(x: Any, tail: Any, top: Any, groups: Any, sums: Any) -> None:
    """How many scores of a row are in, and the sums of x - top and of its square."""
    sums[:] = 0.0
    for group in range(groups):
        simd.moments(Scores(x, tail), group * GROUP, top, sums)
