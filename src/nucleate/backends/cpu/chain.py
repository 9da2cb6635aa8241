"""One row through temperature, top-n-sigma, top-k, min-p, top-p and the draw: the chain that nearly every request has.

All of these cuts keep a prefix of one order, so the row is read once for the highest score of each group of 256; from
these follows a bound on the cut, and only groups that reach it are looked at again. Scores stay as they are: everything
is said of d = (x - top) / t. Carries no meaning of its own: tests hold it equal to the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.races import race_few, race_groups, race_in
from nucleate.backends.cpu.select import (
    FEW,
    ID,
    beside,
    bound,
    count,
    count_cut,
    cut_key,
    gather,
    gather_between,
    keep_first,
    key,
    kth_highest,
    lowest_at_least,
)
from nucleate.backends.cpu.simd import GROUP
from nucleate.core.maths import SLACK

NOT_DRAWN = -1
LOWEST = np.finfo(np.float32).min
"""What is at or above it is in: -inf is not."""


class Chain(NamedTuple):
    """The parameters of a row; neutral ones do nothing."""

    t: Any  #: temperature; 0 takes the first token
    sigmas: Any  #: top-n-sigma; 0 keeps all
    k: Any  #: top-k; 0 keeps all
    m: Any  #: min-p; 0 keeps all
    p: Any  #: top-p; 1 keeps all


class Work(NamedTuple):
    """Room to work in, for rows of N scores in G groups. Nothing in it outlives a row."""

    tops: Any  #: float32 [G]
    masses: Any  #: float32 [G]
    race: Any  #: float64 [G]
    ids: Any  #: int64 [N]
    keys: Any  #: int64 [N]
    weights: Any  #: float64 [N]
    others: Any  #: float64 [N]
    cuts: Any  #: float32 [8]
    sums: Any  #: float64 [8]


class Exponent(NamedTuple):
    """How a score becomes a weight, exp((x - top) / t): what the vectors need to know."""

    top: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    least: Any  #: what is further below has no weight


@jit
def draw(x: Any, size: Any, chain: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from a row. x: float32 [N], of which ``size`` are scores, padded with -inf to whole groups.

    NOT_DRAWN for a row with NaN, +inf or no finite score.
    """
    top = read(x, work.tops)
    if not -np.inf < top < np.inf:
        return NOT_DRAWN
    if chain.t == 0.0 or chain.k == 1:
        return first(x, work.tops, top)
    c = 1.4426950408889634 / chain.t
    high = np.float32(c)
    exponent = Exponent(top, high, np.float32(c - np.float64(high)), np.float32(-126.0 / c))
    below = floor(x, top, chain, work)
    cut = lowest_at_least(np.float64(top), below * chain.t) if below > -np.inf else np.float32(-np.inf)
    whole = 0.0
    counted = 0 < chain.k < size
    if counted:
        cut = np.float32(max(cut, at_most(x, top, chain.k, work)))
    elif below == -np.inf:
        whole = weigh(x, exponent, work)
        if chain.p >= 1.0:
            winner = race_groups(work.masses, seed, step, work.race)
            return race_in(x, winner * GROUP, np.float32(-np.inf), ID, np.float64(top), chain.t, seed, step)
        cut = bound(work.tops, work.masses, np.float64(top), chain.t, (1.0 - chain.p) * whole)
    cut = max(np.float32(cut), LOWEST)
    if not counted and count(x, work.tops, cut) > FEW:
        return draw_of_many(x, cut, whole, chain, exponent, seed, step, work)
    found = gather(x, work.tops, cut, work.ids)
    return draw_of_few(x, found, whole, chain, np.float64(top), seed, step, work)


@jit
def read(x: Any, tops: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, wrong = np.float32(-np.inf), False
    for group in range(tops.size):
        best = simd.top(x, group * GROUP)
        tops[group] = best
        wrong |= not best < np.inf
        top = max(top, best)
    return np.float32(np.nan) if wrong else top


@jit
def first(x: Any, tops: Any, top: Any) -> Any:
    """The lowest id that has the highest score."""
    for group in range(tops.size):
        if tops[group] == top:
            for token in range(group * GROUP, group * GROUP + GROUP):
                if x[token] == top:
                    return token
    return NOT_DRAWN


@jit
def floor(x: Any, top: Any, chain: Any, work: Any) -> Any:
    """The lowest d that min-p and top-n-sigma keep."""
    below = -np.inf
    if chain.m > 0.0:
        below = math.log(chain.m) - SLACK
    if chain.sigmas > 0.0:
        below = max(below, -chain.sigmas * deviation(x, top, work) / chain.t - SLACK)
    return below


@jit
def deviation(x: Any, top: Any, work: Any) -> Any:
    """The population standard deviation of the scores that are in."""
    work.sums[:3] = 0.0
    for group in range(work.tops.size):
        if work.tops[group] > -np.inf:
            simd.moments(x, group * GROUP, top, work.sums)
    mean = work.sums[1] / work.sums[0]
    return math.sqrt(max(work.sums[2] / work.sums[0] - mean * mean, 0.0))


@jit
def at_most(x: Any, top: Any, k: Any, work: Any) -> Any:
    """A score that at least k tokens reach, or all: mostly not many more."""
    groups = work.tops.size
    if k <= groups // 2:
        return kth_highest(work.tops, work.race, k)
    # If tokens fall evenly into groups, -log of the share of groups whose top is lower is how many a group has above.
    share = math.exp(-1.2 * k / groups)
    place = groups - int(share * groups)
    if place < groups:
        cut = np.float32(kth_highest(work.tops, work.race, place))
        if k <= count(x, work.tops, cut) <= k + FEW:
            return cut
    return count_cut(x, groups, k, top, work.cuts, work.sums)


@jit
def weigh(x: Any, exponent: Any, work: Any) -> Any:
    """The weight of each group; returns that of all."""
    whole = 0.0
    for group in range(work.masses.size):
        mass = simd.mass(x, group * GROUP, exponent.top, exponent.high, exponent.low, exponent.least)
        work.masses[group] = mass
        whole += mass
    return whole


@jit
def draw_of_few(x: Any, n: Any, whole: Any, chain: Any, top: Any, seed: Any, step: Any, work: Any) -> Any:
    """The draw among n candidates, whose ids are in ``work``. whole: the weight that top-p is a part of; 0: theirs."""
    ids, weights = work.ids, work.weights
    for i in range(n):
        weights[i] = math.exp((np.float64(x[ids[i]]) - top) / chain.t)
    if 0 < chain.k < n:
        n = keep_first(x, ids, weights, work.keys, work.others, n, np.float64(chain.k), False)
    if chain.p < 1.0:
        total = whole
        if whole == 0.0:
            for i in range(n):
                total += weights[i]
        n = keep_first(x, ids, weights, work.keys, work.others, n, chain.p * total * (1.0 - SLACK), True)
    return race_few(ids, weights, n, seed, step)


@jit
def draw_of_many(x: Any, cut: Any, whole: Any, chain: Any, exponent: Any, seed: Any, step: Any, work: Any) -> Any:
    """The draw where many tokens stay: by the weights of the groups' tokens above the cut."""
    top, last = np.float64(exponent.top), ID
    if chain.p < 1.0:
        last = last_of_many(x, cut, whole, chain, exponent, work)
        cut = x[last]
    over = beside(cut, 1)
    for group in range(work.tops.size):
        start = group * GROUP
        if work.tops[group] < cut:
            mass = np.float32(0.0)
        elif start <= last < start + GROUP:
            total = 0.0
            for token in range(start, start + GROUP):
                if x[token] > cut or (x[token] == cut and token <= last):
                    total += math.exp((np.float64(x[token]) - top) / chain.t)
            mass = np.float32(total)
        else:
            least = over if start > last else cut
            mass = simd.mass_above(x, start, exponent.top, exponent.high, exponent.low, exponent.least, least)
        work.masses[group] = mass
    winner = race_groups(work.masses, seed, step, work.race)
    return race_in(x, winner * GROUP, cut, last, top, chain.t, seed, step)


@jit
def place_cuts(cuts: Any, low: Any, high: Any, part: Any, turn: Any) -> None:
    """Eight cuts between two, from above: first at equal distances, then close around where the weight should be."""
    if turn == 1:
        guess, near = high + (low - high) * min(max(part, 0.0), 1.0), (high - low) / 64
        for i in range(8):
            cuts[i] = np.float32(min(max(guess + near * (3.5 - i) * abs(3.5 - i) / 2, low), high))
    else:
        for i in range(8):
            cuts[i] = np.float32(high + (low - high) * (i + 1) / 9)


@jit
def last_of_many(x: Any, cut: Any, whole: Any, chain: Any, exponent: Any, work: Any) -> Any:
    """The last token that top-p keeps of those at or above a cut: passes over the row close in on its score."""
    cuts, sums, groups = work.cuts, work.sums, work.tops.size
    top, high, low, least = exponent
    if whole == 0.0:
        for group in range(groups):
            whole += simd.mass_above(x, group * GROUP, top, high, low, least, cut)
    goal, above, up, reached = chain.p * whole * (1.0 - SLACK), 0.0, beside(top, 1), whole
    cut = max(cut, np.float32(np.float64(top) - 30.0 * chain.t))  # what is further below weighs less than the slack
    left = count(x, work.tops, cut)
    for turn in range(60):
        if beside(cut, 1) == up or left <= FEW:
            break
        place_cuts(cuts, np.float64(cut), np.float64(up), (goal - above) / (reached - above), turn % 3)
        sums[:] = 0.0
        for group in range(groups):
            simd.masses_above(x, group * GROUP, top, high, low, least, cuts, sums)
        for i in range(8):
            if sums[i] >= goal:
                cut, reached = cuts[i], sums[i]
                break
            up, above = cuts[i], sums[i]
        left = count(x, work.tops, cut) - count(x, work.tops, up)
    n = gather_between(x, work.tops, cut, up, work.ids)
    for i in range(n):
        work.keys[i] = key(x[work.ids[i]], work.ids[i])
        work.others[i] = math.exp((np.float64(x[work.ids[i]]) - np.float64(top)) / chain.t)
    return ID - (cut_key(work.keys, work.others, n, goal - above) & ID)


@kernel
def draw_rows(rows: Any, places: Any, slots: Any, columns: Any, seeds: Any, steps: Any, tokens: Any, room: Any) -> None:
    """Draw from some rows. rows: float32 [R, N], N a multiple of 256, padded with -inf.

    places, slots: int64, which rows, and whose columns they have. columns: float64 [5, C], the fields of ``Chain``;
    seeds, steps: uint64 [C]. tokens: int64, one per place. room: float64, as many as ``room_for(N)`` says.
    """
    size = rows.shape[1]
    work = carve(room, size)
    for i in range(places.size):
        slot = slots[i]
        numbers = columns[:, slot]
        chain = Chain(numbers[0], numbers[1], int(numbers[2]), numbers[3], numbers[4])
        tokens[i] = draw(rows[places[i]], size, chain, seeds[slot], steps[slot], work)
        if tokens[i] != NOT_DRAWN:
            steps[slot] += np.uint64(1)


def room_for(size: int) -> int:
    """How many float64 a row of so many scores needs to be worked on."""
    return 4 * size + 3 * (size // GROUP) + 16


@jit
def carve(room: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Work``."""
    groups, end = size // GROUP, 4 * size
    rest = room[end + groups :].view(np.float32)
    return Work(
        rest[:groups],
        rest[groups : 2 * groups],
        room[end : end + groups],
        room[:size].view(np.int64),
        room[size : 2 * size].view(np.int64),
        room[2 * size : 3 * size],
        room[3 * size : end],
        rest[2 * groups : 2 * groups + 8],
        room[end + groups + groups + 4 : end + groups + groups + 12],
    )
