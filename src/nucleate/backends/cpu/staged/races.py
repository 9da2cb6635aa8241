"""The draw of the kernel ``walk``: first a group by its mass, then one of its tokens, by the rule of a Draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.staged import candidates
from nucleate.backends.cpu.staged.entries import say
from nucleate.backends.cpu.staged.space import (
    IDS,
    KEYS,
    MASSES,
    NOISE,
    ODD,
    PLACES,
    RULE,
    STARTS,
    TOPS,
    WEIGHTS_G,
    X,
    doubles,
    floats,
    longs,
)
from nucleate.backends.cpu.staged.uncut import scaled
from nucleate.core import noise


@jit
def draw(raw: Any, cut: Any, i: Any, steps: Any, seed: Any, step: Any, space: Any) -> Any:
    """The token, or ODD."""
    groups = (raw.x.size + GROUP - 1) // GROUP
    masses, starts = doubles(space, MASSES, groups), longs(space, STARTS, groups + 1)
    places, ids = longs(space, PLACES, groups), longs(space, IDS, groups * GROUP)
    x = doubles(space, X, raw.x.size + GROUP)
    if cut.m:
        count = candidates.groups(x, ids, cut.m, cut.top, starts, masses)
        for group in range(count):
            places[group] = ids[starts[group]] // GROUP
    else:
        tops, weights_G = floats(space, TOPS, groups), doubles(space, WEIGHTS_G, groups)
        count = candidates.groups_of(raw.x, tops, np.float64(raw.highest), raw.slope, weights_G, places, masses)
    start, m, top, winner = 0, count, 0.0, 0
    for turn in range(2):  # one call of what is compiled for both
        if turn == 1 and cut.m:
            start, m, top = starts[winner], starts[winner + 1] - starts[winner], cut.top
        elif turn == 1:
            m = members(raw, places[winner], ids, x)
            top = scaled(np.float64(raw.highest), m, raw.scales, steps, space)
        those = ids[start : start + m] if turn else places[:m]
        given = x[start : start + m] if turn else masses[:m]
        stream = noise.TOKEN if turn else noise.GROUP
        winner = race(given, those, top, stream, i, steps, seed, step, space)
        if winner < 0:
            return ODD
    return ids[start + winner]


@jit
def members(raw: Any, group: Any, ids: Any, x: Any) -> Any:
    """The tokens of a group, and their scores as given; returns how many."""
    m = 0
    for token in range(group * GROUP, min(group * GROUP + GROUP, raw.x.size)):
        ids[m], x[m] = token, raw.x[token]
        m += raw.x[token] > -np.inf
    return m


@jit
def race(x: Any, ids: Any, top: Any, stream: Any, i: Any, steps: Any, seed: Any, step: Any, space: Any) -> Any:
    """The place of the highest score, of equal ones the first; ODD if one is NaN."""
    u, said = doubles(space, NOISE, ids.size), doubles(space, KEYS, ids.size)
    candidates.uniforms(seed, step, stream, ids, ids.size, u)
    say(steps, i, RULE, u, x, ids.size, top, said)
    best, winner = -np.inf, 0
    for place in range(ids.size):
        score = said[place]
        if score > best:
            best, winner = score, place
        if score != score:  # noqa: PLR0124  # NaN
            return ODD
    return winner
