"""A row of which nothing has been cut, in the kernel ``walk``: as ``raw`` and ``shortlist`` have it. Knows no stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.select import floating, ordered
from nucleate.backends.cpu.staged import candidates, summary
from nucleate.backends.cpu.staged.candidates import LOWEST_32
from nucleate.backends.cpu.staged.entries import say
from nucleate.backends.cpu.staged.reach import BINS
from nucleate.backends.cpu.staged.space import (
    BASE,
    BENT,
    COUNTED,
    COUNTS,
    CUTS,
    IDS,
    KEYS,
    MASS,
    MASSES,
    MODE,
    MOMENTS,
    ORDER,
    OTHER,
    RULE,
    SCALE,
    SHAPE,
    SQUARE,
    SUMMED,
    SUMS,
    TAIL,
    TOPS,
    TRIED,
    WEIGHTS,
    WEIGHTS_G,
    Cut,
    Raw,
    V,
    X,
    doubles,
    floats,
    longs,
    tell,
    told,
)

STEEPEST = 1e200
CLOSE = 1e-9
MOST = 4096
TRIES = 256
MOST_TRIED = 32_768
"""As in ``raw`` and ``shortlist``."""

FAR = 2.0**20
"""A line is told by what it is so far from the top: by a power of two, so that slopes are exact."""


@jit
def of_groups(raw: Any, space: Any) -> Any:
    return floats(space, TOPS, (raw.x.size + GROUP - 1) // GROUP), floats(space, TAIL, GROUP)


@jit
def raw_row(raw: Any, wants: Any, weighed: Any, i: Any, space: Any) -> None:
    """What rules ask of a row that has not been cut. weighed: mass and entropy, if they are known."""
    n, square, mean, var = np.float64(raw.x.size), np.nan, np.nan, np.nan
    tops, tail = of_groups(raw, space)
    top = np.float64(raw.highest)
    for turn in range(2):  # the masses, and those of squares
        if turn == 0 and wants & MASS and not weighed[2]:
            summary.summary(raw.x, tail, top, raw.slope, weighed, doubles(space, WEIGHTS_G, tops.size))
            weighed[2] = 1.0
        elif turn == 1 and wants & SQUARE:
            summary.summary(raw.x, tail, top, 2.0 * raw.slope, weighed[3:], doubles(space, MASSES, tops.size))
            square = weighed[3]
    if wants & MOMENTS:
        sums = doubles(space, SUMS, 3)
        summary.moments(raw.x, tail, raw.highest, tops.size, sums)
        n = sums[0]
        mean = sums[1] / n
        var = max(sums[2] / n - mean * mean, 0.0) * raw.slope * raw.slope
        mean *= raw.slope
    tell(told(space, i), n, weighed[0], square, weighed[1], mean, var)


@jit
def scale_raw(raw: Any, i: Any, steps: Any, space: Any) -> Any:
    """The same row after one more scale, a line; with a slope of 0 where that is too steep, or is not seen."""
    x, said = doubles(space, KEYS, 3), doubles(space, OTHER, 3)
    x[0], x[1], x[2] = 0.0, -1.0, -FAR
    say(steps, i, RULE, told(space, i), x, 3, 0.0, said)
    own = (said[0] - said[2]) / FAR
    slope = raw.slope * own
    if not (0.0 < slope < STEEPEST and abs(said[0] - said[1] - own) <= CLOSE * own):
        slope = 0.0
    return Raw(raw.x, raw.highest, slope, raw.blur + 1e-15 * abs(said[0]) / slope, i + 1)


@jit
def score_at(raw: Any, cut: Any, way: Any) -> Any:
    """A score as given that is surely below a cut, from the top; or, the other way, above it."""
    below, highest = cut / raw.slope, np.float64(raw.highest)
    given = highest + below + way * (raw.blur + 1e-6 * (abs(highest) + abs(below)))  # for roundings
    score = np.float32(max(given, np.float64(LOWEST_32)))
    return max(floating(ordered(score) + np.int32(way)), LOWEST_32)


@jit
def listed(raw: Any, cut: Any, steps: Any, space: Any) -> Any:
    """The tokens at or above a cut of the scores as given, as the scales leave them."""
    tops, tail = of_groups(raw, space)
    many = tops.size * GROUP
    x = doubles(space, X, many + GROUP)
    m = candidates.pick_out(raw.x, tail, tops, cut, longs(space, IDS, many), x, doubles(space, BASE, many))
    return Cut(m, scaled(np.float64(raw.highest), m, raw.scales, steps, space))


@jit
def scaled(top: Any, m: Any, count: Any, steps: Any, space: Any) -> Any:
    """What the scales of the first steps make of m scores, and of the top; returns that."""
    x, said = doubles(space, X, m + 1), doubles(space, OTHER, m + 1)
    for i in range(count):
        if steps[i, SHAPE] == SCALE:  # others before have cut nothing
            x[m] = top
            say(steps, i, RULE, told(space, i), x, m + 1, top, said)
            for place in range(m):
                x[place] = said[place]
            top = said[m]
    return top


@jit
def looked_at(raw: Any, goal: Any, i: Any, steps: Any, space: Any) -> Any:
    """Tokens among which all are whose weights reach a goal, see ``shortlist``."""
    mode, row = steps[i, MODE], told(space, i)
    counted, tries = mode & 7 == COUNTED and goal <= MOST, TRIES if mode & 7 == TRIED else 0
    least = LOWEST_32
    if mode & 7 == SUMMED:
        rest = 0.99 * (row[2] - goal)
        if rest > CLOSE * row[2]:
            least = summed(raw, rest, mode, i, steps, space)
    tops, tail = of_groups(raw, space)
    v, cuts, sums = doubles(space, V, tops.size), floats(space, CUTS, 8), doubles(space, SUMS, BINS)
    while True:
        last = not 0 < 4 * tries <= min(raw.x.size, 4 * MOST_TRIED)
        if counted or not last:
            k = np.int64(np.ceil(goal)) if counted else tries
            least = candidates.kth(raw.x, tail, tops, raw.highest, k, v, cuts, sums)
        elif tries:
            least = LOWEST_32
        cut = listed(raw, max(least, LOWEST_32), steps, space)
        if last:
            return cut
        weights = doubles(space, WEIGHTS, cut.m)
        say(steps, i, RULE, row, doubles(space, X, cut.m), cut.m, cut.top, weights)
        if weights.sum() > goal * (1.0 + CLOSE):
            return cut
        tries *= 16 if tries == TRIES else 8


@jit
def summed(raw: Any, rest: Any, mode: Any, i: Any, steps: Any, space: Any) -> Any:
    """A score below which all tokens together weigh at most ``rest``."""
    cut, highest = np.log(rest / raw.x.size), np.float64(raw.highest)
    given = np.float32(highest + cut / raw.slope)
    if given > LOWEST_32:
        tops, tail = of_groups(raw, space)
        cuts, counts = floats(space, CUTS, 4), longs(space, COUNTS, 4)
        found = candidates.raised(raw.x, tail, tops, raw.highest, given, raw.slope, rest, cuts, counts)
        if found != given:
            cut = max(cut, (np.float64(found) - highest) * raw.slope)
    if mode & BENT:
        centre = centre_of(i, steps, space)
        if not -FAR < centre < FAR:
            return LOWEST_32
        cut = min(cut, 2.0 * centre)
    return score_at(raw, cut - CLOSE * (1.0 + abs(cut)), -1)


@jit
def centre_of(i: Any, steps: Any, space: Any) -> Any:
    """Where an order that is the absolute value of a line is 0; NaN if that is not seen."""
    x, said = doubles(space, KEYS, 3), doubles(space, OTHER, 3)
    x[0], x[1], x[2], far = 0.0, -2.0 * FAR, -4.0 * FAR, 0.0
    for turn in range(2):
        say(steps, i, ORDER, told(space, i), x, 3, 0.0, said)
        if turn == 0:
            far, near = said[0] * (2.0 * FAR) / (said[2] - said[1]), CLOSE * said[0]
            x[0], x[1] = far, -far
    return -far if said[1] <= near else far if said[0] <= near else np.nan
