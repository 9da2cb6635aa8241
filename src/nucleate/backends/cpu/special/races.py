"""The two-level Gumbel draw, as a race: the highest log m + gumbel(u) is the least e / m with e = -log1p(-u).

As e is at least u, most tokens are out of the race before a logarithm is taken.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.noise import GROUP as GROUP_STREAM
from nucleate.backends.cpu.noise import TOKEN as TOKEN_STREAM
from nucleate.backends.cpu.noise import uniform
from nucleate.backends.cpu.simd import GROUP

NOBODY = -1


@jit
def race_groups(masses: Any, seed: Any, step: Any, work: Any) -> Any:
    """The group that wins, by the weights of all of them."""
    for group in range(masses.size):
        work[group] = uniform(seed, step, GROUP_STREAM, group)
    best, winner = np.inf, NOBODY
    for group in range(masses.size):
        mass = np.float64(masses[group])
        if mass > 0.0 and work[group] < best * mass:
            time = -math.log1p(-work[group]) / mass
            if time < best:
                best, winner = time, group
    return winner


@jit
def race_in(x: Any, start: Any, cut: Any, last: Any, top: Any, t: Any, seed: Any, step: Any) -> Any:
    """The token that wins, of the group from ``start`` on: those above a cut, or at it with an id up to ``last``."""
    best, winner = np.inf, NOBODY
    for token in range(start, min(start + GROUP, x.size)):
        if x[token] > cut or (x[token] == cut and token <= last):
            weight = math.exp((np.float64(x[token]) - top) / t)
            u = uniform(seed, step, TOKEN_STREAM, token)
            if weight > 0.0 and u < best * weight:
                time = -math.log1p(-u) / weight
                if time < best:
                    best, winner = time, token
    return winner


@jit
def race_few(ids: Any, weights: Any, n: Any, seed: Any, step: Any) -> Any:
    """The draw in two levels among a few tokens, by ascending id."""
    best, winner, i = np.inf, 0, 0
    first, end = 0, 0
    while i < n:
        group, start, mass = ids[i] // GROUP, i, 0.0
        while i < n and ids[i] // GROUP == group:
            mass += weights[i]
            i += 1
        u = uniform(seed, step, GROUP_STREAM, group)
        if mass > 0.0 and u < best * mass:
            time = -math.log1p(-u) / mass
            if time < best:
                best, first, end = time, start, i
    best, winner = np.inf, NOBODY
    for i in range(first, end):
        u = uniform(seed, step, TOKEN_STREAM, ids[i])
        if weights[i] > 0.0 and u < best * weights[i]:
            time = -math.log1p(-u) / weights[i]
            if time < best:
                best, winner = time, ids[i]
    return winner
