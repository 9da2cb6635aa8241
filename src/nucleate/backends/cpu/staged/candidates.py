"""Reading a row as it lies in memory, for the few of its tokens that matter, and for the draw. Knows no stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import noise, simd
from nucleate.backends.cpu.doubles import exp, highest, loose
from nucleate.backends.cpu.load import with_tail
from nucleate.backends.cpu.simd import GROUP, LANES, Scores
from nucleate.backends.cpu.special.cuts import read
from nucleate.backends.cpu.special.select import count_cut, kth_highest
from nucleate.backends.cpu.squeeze import EIGHT, how_many, squeeze, squeeze_places
from nucleate.backends.cpu.staged.old import kernel
from nucleate.backends.cpu.weights import CUTS, count, weigh_some
from nucleate.backends.cpu.weights import LANES as SOME

LOWEST_32 = np.finfo(np.float32).min
STEP = 0.6
"""Between two cuts, in nats."""

LITTLE = 1e-290
"""What weighs less may be too light for float64."""


@kernel
def tops_of(x: Any, tail: Any, tops: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf. Fills ``tail``."""
    return read(with_tail(x, tail), tops)


@kernel
def kth(x: Any, tail: Any, tops: Any, top: Any, k: Any, work: Any, cuts: Any, sums: Any) -> Any:
    """A score that at least k tokens reach, or all; mostly not many more."""
    if k <= tops.size:
        return kth_highest(tops, work, k)
    return count_cut(Scores(x, tail), tops.size, k, top, cuts, sums)


@kernel
def tops_of_many(x: Any, m: Any, tops: Any) -> Any:
    """The highest of each 256 of m scores that are float64, and of what is left; returns how many there are."""
    n = 0
    for start in range(0, m, GROUP):
        tops[n] = highest(x[start : min(start + GROUP, m)])
        n += 1
    return n


@kernel
def kth_top(tops: Any, work: Any, k: Any) -> Any:
    """The k-th highest."""
    return kth_highest(tops, work, k)


@kernel
def pick_out(x: Any, tail: Any, tops: Any, cut: Any, ids: Any, scores: Any, base: Any) -> Any:
    """The tokens at or above a cut; returns how many."""
    row, n = Scores(x, tail), 0
    for group in range(tops.size):
        if tops[group] >= cut:
            for start in range(group * GROUP, (group + 1) * GROUP, LANES):
                found = simd.at_least(row, start, cut)
                if found & (found - 1) and start + LANES <= x.size:
                    for half in range(0, LANES, EIGHT):
                        bits = np.int32((found >> half) & 255)
                        squeeze(bits, x, start + half, scores, n)
                        squeeze_places(bits, start + half, ids, n)
                        n += how_many(bits)
                        squeeze(np.int32(255), x, start + half, base, start + half)
                    continue
                while found != 0:
                    token = start + simd.lowest_bit(found)
                    ids[n], scores[n], base[token] = token, x[token], x[token]
                    n += 1
                    found &= found - 1
    return n


@kernel
def raised(x: Any, tail: Any, tops: Any, top: Any, cut: Any, slope: Any, rest: Any, cuts: Any, counts: Any) -> Any:
    """A higher cut, if there is an easy one, below which all tokens together weigh at most ``rest``.

    They are counted between a few cuts, and taken to weigh as much as the upper one of the two.
    """
    reached = 0
    for group in range(tops.size):
        reached += tops[group] >= cut
    if 2 * reached < tops.size:
        return cut
    for i in range(CUTS):
        cuts[i] = np.float32(cut + (i - 1) * STEP / slope)
        counts[i] = 0
    for group in range(tops.size):
        start = group * GROUP
        inside = start + GROUP <= x.size
        count(x if inside else tail, start if inside else 0, cuts, counts)
    above, below = np.int64(x.size), 0.0
    for i in range(CUTS):
        below += (above - counts[i]) * exp((cuts[i] - np.float64(top)) * slope)
        if not below <= rest:
            break
        cut, above = max(cut, cuts[i]), counts[i]
    return cut


@kernel
def all_reach(x: Any, tail: Any, tops: Any, cut: Any) -> Any:
    """Whether all tokens of a row that are in are at or above a cut."""
    row = Scores(x, tail)
    for group in range(tops.size):
        if LOWEST_32 <= tops[group] < cut:
            return False
    for group in range(tops.size):
        start = group * GROUP
        if tops[group] >= cut and simd.count(row, start, cut) < simd.count(row, start, LOWEST_32):
            return False
    return True


@loose
def mass_of(x: Any, top: Any) -> Any:
    mass = 0.0
    for i in range(x.size):
        mass += exp(x[i] - top)
    return mass


@kernel
def groups(x: Any, ids: Any, m: Any, top: Any, starts: Any, masses: Any) -> Any:
    """Where the tokens of each group start, and log sum exp of their scores from the top; returns how many groups."""
    n, start = 0, 0
    while start < m:
        limit = (ids[start] // GROUP + 1) * GROUP
        low, end = start + 1, min(start + GROUP, m)  # the end is the first with an id beyond: ids ascend
        while low < end:
            middle = (low + end) >> 1
            if ids[middle] < limit:
                low = middle + 1
            else:
                end = middle
        mass = 0.0
        for i in range(start, end, SOME):
            mass += weigh_some(x, i, end - i, top)
        starts[n], masses[n] = start, np.log(mass)
        if mass < LITTLE:
            best = highest(x[start:end])
            masses[n] = best - top + np.log(mass_of(x[start:end], best))
        n += 1
        start = end
    starts[n] = m
    return n


@kernel
def uniforms(seed: Any, step: Any, stream: Any, ids: Any, n: Any, out: Any) -> None:
    """The noise of each id."""
    for i in range(n):
        out[i] = noise.uniform(seed, step, stream, ids[i])


@kernel
def groups_of(x: Any, tops: Any, top: Any, slope: Any, weights: Any, numbers: Any, masses: Any) -> Any:
    """Of a whole row times a slope: the groups that have tokens, and log sum exp of their scores from the top.

    weights: what each weighs, as of ``summary``. Returns how many groups.
    """
    n = 0
    for group in range(tops.size):
        if tops[group] > -np.inf:
            numbers[n], masses[n] = group, np.log(weights[group])
            if weights[group] < LITTLE:
                best, mass = np.float64(tops[group]), 0.0
                for i in range(group * GROUP, min((group + 1) * GROUP, x.size)):
                    mass += exp((x[i] - best) * slope)
                masses[n] = (best - top) * slope + np.log(mass)
            n += 1
    return n
