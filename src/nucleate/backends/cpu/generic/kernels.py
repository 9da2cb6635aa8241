"""The passes over a whole row, compiled once for all stages. They know no stage and no rule.

x: the row, float32 [V], contiguous and writeable; tail: float32 [256], its last partial group, padded with -inf;
tops: float32 [G], the maximum of each group of 256 tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu import noise, simd
from nucleate.backends.cpu.compile import kernel
from nucleate.backends.cpu.load import with_tail
from nucleate.backends.cpu.simd import GROUP, LANES, Scores
from nucleate.backends.cpu.special.select import ordered
from nucleate.backends.cpu.weights import weigh


@kernel("float32(float32[::1], float32[::1], float32[::1])")
def group_tops(x: Any, tail: Any, tops: Any) -> Any:
    """Fill in tops and tail. Returns the maximum of the row: NaN if there is a NaN, or +inf."""
    row, top, wrong = with_tail(x, tail), np.float32(-np.inf), False
    for group in range(tops.size):
        tops[group] = simd.top(row, group * GROUP)
        wrong |= not tops[group] < np.inf
        top = max(top, tops[group])
    return np.float32(np.nan) if wrong else top


@kernel("void(float32[::1], float32[::1], float64, float64, float64[::1], float64[::1])")
def group_masses(x: Any, tail: Any, top: Any, slope: Any, masses: Any, sums: Any) -> None:
    """The sum of e = exp(d) in each group, d = (x - top) * slope, and in sums those of e and of e * d over the row.

    All float64. The relative error of a sum is below 1e-12: 3e-16 for each exp, 1e-16 for each of at most V / 256 + 8
    additions that a term goes through.
    """
    sums[0], sums[1] = 0.0, 0.0
    for group in range(masses.size):
        start = group * GROUP
        whole = start + GROUP <= x.size
        masses[group] = weigh(x if whole else tail, start if whole else 0, top, slope, sums)
        sums[0] += masses[group]


@kernel("void(float32[::1], float32[::1], int64, float32, float64[::1])")
def moments(x: Any, tail: Any, groups: Any, origin: Any, sums: Any) -> None:
    """How many scores are finite, and the sums of x - origin and of its square. origin: float32; sums: float64 [3]."""
    sums[:] = 0.0
    for group in range(groups):
        simd.moments(Scores(x, tail), group * GROUP, origin, sums)


@kernel("float64(float64[::1], float64)")
def threshold_by_mass(masses: Any, rest: Any) -> Any:
    """A d (see ``group_masses``) below which all tokens together weigh at most ``rest``; -inf if none is found.

    The tokens of a group that are below d weigh at most 256 * exp(d), and at most as much as the group.
    """
    low, high = -700.0, 0.0
    for _ in range(16):
        middle = (low + high) / 2.0
        most, total = GROUP * math.exp(middle), 0.0
        for group in range(masses.size):
            total += min(masses[group], most)
        if total <= rest:
            low = middle
        else:
            high = middle
    return low if low > -700.0 else -np.inf


@kernel("int64(float32[::1], float32[::1], float32[::1], float32, int64[::1])")
def keys_from(x: Any, tail: Any, tops: Any, threshold: Any, keys: Any) -> Any:
    """One int64 per token at or above a threshold; returns how many. In ascending order the tokens are ranked.

    The upper half is the score, highest first, the lower half the token id.
    """
    row, n = Scores(x, tail), 0
    for group in range(tops.size):
        if tops[group] >= threshold:
            for start in range(group * GROUP, (group + 1) * GROUP, LANES):
                found = simd.at_least(row, start, threshold)
                while found != 0:
                    token = np.int64(start + simd.lowest_bit(found))
                    score = ordered(x[token] + np.float32(0.0))  # +0.0 turns -0.0 into 0.0: they are equal
                    keys[n] = (np.int64(~score) << 32) | token
                    n += 1
                    found &= found - 1
    return n


@kernel("void(uint64, uint64, int64, int64[::1], float64[::1])")
def uniforms(seed: Any, step: Any, stream: Any, ids: Any, out: Any) -> None:
    """``core.noise.uniform`` of each id. seed, step: uint64."""
    for i in range(ids.size):
        out[i] = noise.uniform(seed, step, stream, ids[i])


@kernel("void(float32[::1], int32[::1])")
def forbid(x: Any, words: Any) -> None:
    """Set -inf where the bit of a token is 0. words: int32 [V / 32 or more]."""
    for word in range((x.size + 31) // 32):
        bits = words[word]
        if bits != -1:
            start = word * 32
            for bit in range(min(32, x.size - start)):
                if (bits >> bit) & 1 == 0:
                    x[start + bit] = -np.inf
