"""Passes over a whole row, shared by all stages.

x: the row, float32 [V], contiguous and writeable; tail: float32 [256], its last partial group, padded with -inf;
maxima: float32 [G], the maximum of each group of 256 tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import kernel, loose
from nucleate.sampling.cpu import block_ops, kernel_maths
from nucleate.sampling.cpu.block_ops import GROUP_SIZE, WORD_BITS, group_address, pad_tail
from nucleate.sampling.cpu.kernel_maths import LOG2_E, exp
from nucleate.sampling.noise import GROUP as GROUP_STREAM
from nucleate.sampling.noise import TOKEN as TOKEN_STREAM

LN_2 = math.log(2.0)
TIE_TOLERANCE = 1e-8
"""Race times with a smaller relative difference are left to the reference. Sums of weights are exact to 1e-12."""


@kernel("float32(float32[::1], float32[::1], float32[::1])")
def group_maxima(x: Any, tail: Any, maxima: Any) -> Any:
    """Fill in maxima and tail. Returns the maximum of the row; NaN if it has a NaN or +inf."""
    top, invalid = np.float32(-np.inf), False
    pad_tail(x, tail)
    for group in range(maxima.size):
        maxima[group] = block_ops.maximum(group_address(x, tail, group))
        invalid |= not maxima[group] < np.inf
        top = max(top, maxima[group])
    return np.float32(np.nan) if invalid else top


@kernel("void(float32[::1], float32[::1], float64, float64, float64, float64, float64[::1], float64[::1])")
def group_masses(x: Any, tail: Any, top: Any, c1: Any, c2: Any, c3: Any, masses: Any, sums: Any) -> None:
    """masses: sum of e = exp(d) per group. sums: of e, e * d and e * e, over the row. float64.

    d = c1 * z + c2 * z**2 + c3 * z**3, z = x - top; without bends faster. Relative error below 1e-12: 5e-14 per exp,
    and 1e-16 for each of at most V / 256 + 8 additions per term.
    """
    sums[:] = 0.0
    is_line, more = c2 == 0.0 and c3 == 0.0, np.int64(sums[1:].ctypes.data)
    for group in range(masses.size):
        at = group_address(x, tail, group)
        if is_line:
            masses[group] = block_ops.mass_sums(at, top, c1 * LOG2_E, more)
        else:
            masses[group] = block_ops.curved_mass_sums(at, top, c1 * LOG2_E, c2 * LOG2_E, c3 * LOG2_E, more)
        sums[0] += masses[group]
    sums[1] *= LN_2


@kernel("void(float32[::1], float32[::1], int64, float32, float64[::1])")
def moments(x: Any, tail: Any, groups: Any, origin: Any, sums: Any) -> None:
    """sums: the number of finite scores, and the sums of x - origin and of its square. origin: float32."""
    sums[:] = 0.0
    for group in range(groups):
        block_ops.moments(group_address(x, tail, group), origin, np.int64(sums.ctypes.data))


@kernel(
    "void(float32[::1], float32[::1], float64, float64, float64, uint16[::1], float64[:, ::1], float64[:, ::1], int64, "
    "float64[::1], float64[::1])"
)
def binned_masses(
    x: Any,
    tail: Any,
    top: Any,
    slope: Any,
    scale: Any,
    bins: Any,
    weights: Any,
    histogram: Any,
    rows: Any,
    masses: Any,
    sums: Any,
) -> None:
    """``group_masses``, with a histogram of -d: sums of e, and if ``rows`` is 2 of e * d, per bin.

    scale: bins per unit of d; the last bin has all the rest. bins: on return, the bin of each score, and of a padded
    tail. weights: scratch [2, 256]. histogram: [2, bins].
    """
    sums[:] = 0.0
    for row in range(rows):
        for i in range(histogram.shape[1]):
            histogram[row, i] = 0.0
    last = np.float64(histogram.shape[1] - 1)
    e_at, e_d_at = np.int64(weights.ctypes.data), np.int64(weights[1].ctypes.data)
    for group in range(masses.size):
        start = group * GROUP_SIZE
        masses[group] = block_ops.binned_mass_sums(
            *(group_address(x, tail, group), top, slope * LOG2_E, -scale * LN_2, last),
            *(np.int64(bins[start:].ctypes.data), e_at, e_d_at, np.int64(sums[1:].ctypes.data)),
        )
        sums[0] += masses[group]
        for row in range(rows):
            for i in range(GROUP_SIZE):
                histogram[row, np.uint64(bins[start + i])] += weights[row, i]
    sums[1] *= LN_2
    for i in range(histogram.shape[1]):
        histogram[1, i] *= LN_2


@kernel("int64(float32[::1], uint16[::1], int64, int64, int64, int64, float32[::1], int64[::1])")
def split_bins(x: Any, bins: Any, first: Any, end: Any, listed: Any, listed_end: Any, out: Any, ids: Any) -> Any:
    """Copy the scores in the bins first..end - 1, -inf in place of the others. out: empty if no copy is needed.

    Lists the ids in the other bins of listed..listed_end - 1, and returns their number. bins: also of a padded tail.
    """
    start, count = np.uint16(first), np.uint16(end - first)
    listed_start, listed_count, n = np.uint16(listed), np.uint16(listed_end - listed), 0
    for i in range(out.size):
        out[i] = x[i] if np.uint16(bins[i] - start) < count else np.float32(-np.inf)
    for word in range(0, bins.size, WORD_BITS):
        at = np.int64(bins.ctypes.data) + 2 * word
        found = block_ops.bitmask_in_bins(at, listed_start, listed_count)
        if found != 0:
            found &= ~block_ops.bitmask_in_bins(at, start, count)
        while found != 0:
            ids[n] = word + block_ops.trailing_zeros(found)
            n += 1
            found &= found - 1
    return n


@kernel("int64(float32[::1], float32[::1], float32, float32, float32[::1], int64[::1])")
def keep_at_least(x: Any, tail: Any, lowest: Any, above: Any, out: Any, ids: Any) -> Any:
    """Copy the scores at or above ``lowest``, -inf in place of the others. Lists the ids of those below ``above``.

    Returns the number of ids; -1 if no score is below ``above``. tail: padded.
    """
    n, kept = 0, 0
    for group in range(-(-x.size // GROUP_SIZE)):
        start, at = group * GROUP_SIZE, group_address(x, tail, group)
        for word in range(0, GROUP_SIZE, WORD_BITS):
            high = block_ops.bitmask_at_least(at + 4 * word, above)
            found = block_ops.bitmask_at_least(at + 4 * word, lowest) & ~high
            kept += block_ops.popcount(high)
            while found != 0:
                ids[n] = start + word + block_ops.trailing_zeros(found)
                n += 1
                found &= found - 1
    for i in range(x.size):
        out[i] = x[i] if x[i] >= lowest else np.float32(-np.inf)
    return n if kept < x.size else np.int64(-1)


@loose
def capped_sum(masses: Any, cap: Any) -> Any:
    """The sum of min(mass, cap)."""
    total = 0.0
    for group in range(masses.size):
        total += min(np.float64(masses[group]), cap)
    return total


@kernel("float64(float64[::1], float64)")
def threshold_by_mass(masses: Any, max_mass: Any) -> Any:
    """A d (see ``group_masses``) below which all tokens together weigh at most ``max_mass``; -inf if none is found.

    The tokens of a group below d weigh at most 256 * exp(d), and at most the mass of the group.
    """
    low, high = -700.0, 0.0
    for _ in range(16):
        middle = (low + high) / 2.0
        if capped_sum(masses, GROUP_SIZE * math.exp(middle)) <= max_mass:
            low = middle
        else:
            high = middle
    return low if low > -700.0 else -np.inf


@kernel("int64(float32[::1], float32[::1], float32[::1], float32, int64[::1])")
def ranking_keys(x: Any, tail: Any, maxima: Any, threshold: Any, keys: Any) -> Any:
    """One int64 per token at or above a threshold; returns how many. In ascending order the tokens are ranked.

    The upper half is the score, highest first, the lower half the token id.
    """
    n = 0
    for group in range(maxima.size):
        if maxima[group] >= threshold:
            at = group_address(x, tail, group)
            for start in range(0, GROUP_SIZE, WORD_BITS):
                found = block_ops.bitmask_at_least(at + 4 * start, threshold)
                while found != 0:
                    token = group * GROUP_SIZE + start + block_ops.trailing_zeros(found)
                    bits = np.float32(x[token] + np.float32(0.0)).view(np.int32)  # +0.0 turns -0.0 into 0.0
                    keys[n] = (np.int64(~(bits ^ ((bits >> 31) & 0x7FFFFFFF))) << 32) | token
                    n += 1
                    found &= found - 1
    return n


@kernel("float64(uint64, uint64, int64, int64)")
def uniform(seed: Any, step: Any, stream: Any, index: Any) -> Any:
    """``noise.uniform`` of one index."""
    return kernel_maths.uniform(seed, step, stream, index)


@kernel("void(uint64, uint64, int64, uint32[::1])")
def token_words(seed: Any, step: Any, stream: Any, out: Any) -> None:
    """``watermark_key.vocabulary_words``. out: a multiple of four groups of 256."""
    for first in range(0, out.size, 4 * GROUP_SIZE):
        ends = first + GROUP_SIZE, first + 2 * GROUP_SIZE, first + 3 * GROUP_SIZE
        out0, out1 = out[first : ends[0]], out[ends[0] : ends[1]]
        out2, out3 = out[ends[1] : ends[2]], out[ends[2] : first + 4 * GROUP_SIZE]
        for i in range(GROUP_SIZE):
            w0, w1, w2, w3 = kernel_maths.words(seed, step, stream, (first >> 2) + i)
            out0[i], out1[i], out2[i], out3[i] = np.uint32(w0), np.uint32(w1), np.uint32(w2), np.uint32(w3)


@kernel("void(uint64, uint64, int64, int64[::1], uint32[::1])")
def listed_words(seed: Any, step: Any, stream: Any, ids: Any, out: Any) -> None:
    """``watermark_key.token_words`` of one seed and step."""
    for i in range(ids.size):
        block = (ids[i] >> 10 << 8) + (ids[i] & 255)
        w0, w1, w2, w3 = kernel_maths.words(seed, step, stream, block)
        which = (ids[i] >> 8) & 3
        out[i] = np.uint32((w0 if which == 0 else w1) if which < 2 else (w2 if which == 2 else w3))


@kernel("void(uint64, uint64, int64, int64, float32, float32[::1])")
def values_below(seed: Any, step: Any, stream: Any, threshold: Any, value: Any, out: Any) -> None:
    """``watermark_key.values_below``. out: a multiple of four groups of 256."""
    for first in range(0, out.size, 4 * GROUP_SIZE):
        ends = first + GROUP_SIZE, first + 2 * GROUP_SIZE, first + 3 * GROUP_SIZE
        out0, out1 = out[first : ends[0]], out[ends[0] : ends[1]]
        out2, out3 = out[ends[1] : ends[2]], out[ends[2] : first + 4 * GROUP_SIZE]
        for i in range(GROUP_SIZE):
            w0, w1, w2, w3 = kernel_maths.words(seed, step, stream, (first >> 2) + i)
            out0[i] = value if np.int64(w0) < threshold else np.float32(0.0)
            out1[i] = value if np.int64(w1) < threshold else np.float32(0.0)
            out2[i] = value if np.int64(w2) < threshold else np.float32(0.0)
            out3[i] = value if np.int64(w3) < threshold else np.float32(0.0)


@kernel("int64(int64[::1], float64[::1], uint64, uint64, int64)")
def gumbel_race(ids: Any, weights: Any, seed: Any, step: Any, stream: Any) -> Any:
    """The id with the highest log(weight) + Gumbel noise, by exponential race; -1 if two are too close."""
    best_time, second_time, winner = np.inf, np.inf, np.int64(-1)
    for i in range(ids.size):
        u = kernel_maths.uniform(seed, step, stream, ids[i])
        if u < best_time * (1.0 + 2.0 * TIE_TOLERANCE) * weights[i]:
            time = -math.log1p(-u) / weights[i]
            if time < best_time:
                best_time, second_time, winner = time, best_time, ids[i]
            else:
                second_time = min(second_time, time)
    return winner if best_time < second_time * (1.0 - TIE_TOLERANCE) else np.int64(-1)


@kernel(
    "int64(float32[::1], float32[::1], float32[::1], float64, float64, float64, float64, float64[:, ::1], "
    "uint64, uint64)"
)
def race_groups(
    x: Any, tail: Any, maxima: Any, top: Any, c1: Any, c2: Any, c3: Any, scratch: Any, seed: Any, step: Any
) -> Any:
    """The group that wins the Gumbel draw; -1 if two are too close. c1, c2, c3: see ``group_masses``.

    scratch: float64 [3, max(G, 2)], the first row has mass to add to each group. The mass of a group is computed only
    if it may win: 256 times the weight of its maximum bounds it, and u bounds its noise.
    """
    more, times, sums = scratch[0], scratch[1, : maxima.size], np.int64(scratch[2].ctypes.data)
    first, winner, best_time, second_time = 0, np.int64(-1), np.inf, np.inf
    kernel_maths.uniforms(times, times.size, seed, step, GROUP_STREAM, 0)
    for group in range(times.size):
        z = np.float64(maxima[group]) - top
        most = exp(((c3 * z + c2) * z + c1) * z) if z > -np.inf else 0.0
        times[group] /= GROUP_SIZE * most * (1.0 + TIE_TOLERANCE) + more[group]
    for group in range(times.size):
        first = group if times[group] < times[first] else first
    for index in range(-1, times.size):
        group = first if index < 0 else index
        if index == first or not times[group] < best_time * (1.0 + 2.0 * TIE_TOLERANCE):
            continue
        mass = more[group]
        if maxima[group] > -np.inf:
            mass += block_ops.curved_mass_sums(
                group_address(x, tail, group), top, c1 * LOG2_E, c2 * LOG2_E, c3 * LOG2_E, sums
            )
        if mass > 0.0:
            time = -math.log1p(-kernel_maths.uniform(seed, step, GROUP_STREAM, group)) / mass
            if time < best_time:
                best_time, second_time, winner = time, best_time, np.int64(group)
            else:
                second_time = min(second_time, time)
    return winner if best_time < second_time * (1.0 - TIE_TOLERANCE) else np.int64(-1)


@loose
def sum_of(numbers: Any) -> Any:
    total = 0.0
    for i in range(numbers.size):
        total += numbers[i]
    return total


@kernel("int64(int64[::1], float64[::1], float64, int64[::1], float64[::1], uint64, uint64)")
def gumbel_sample(ids: Any, x: Any, top: Any, groups: Any, masses: Any, seed: Any, step: Any) -> Any:
    """Two-level Gumbel draw from listed tokens; -1 if two are too close.

    top: maximum of x. groups: scratch [G + 256]. masses: [G + 256]; on return, the first G are the group masses.
    """
    count = masses.size - GROUP_SIZE
    weights_of_group, ids_of_group = masses[count:], groups[count:]
    masses[:count] = 0.0
    for group in range(count):
        groups[group] = group
    last, mass = np.int64(0), 0.0
    for start in range(0, ids.size, GROUP_SIZE):
        end = min(start + GROUP_SIZE, ids.size)
        for i in range(start, end):
            weights_of_group[i - start] = exp(x[i] - top)
        if ids[start] & (GROUP_SIZE - 1) == 0 and ids[end - 1] == ids[start] + GROUP_SIZE - 1:  # a whole group
            masses[last] += mass
            last, mass = ids[start] >> 8, sum_of(weights_of_group)
            continue
        for i in range(start, end):
            if ids[i] >> 8 != last:
                masses[last] += mass
                last, mass = ids[i] >> 8, 0.0
            mass += weights_of_group[i - start]
    masses[last] += mass
    winner, n = gumbel_race(groups[:count], masses[:count], seed, step, GROUP_STREAM), 0
    for i in range(ids.size):
        if ids[i] >> 8 == winner:
            ids_of_group[n], weights_of_group[n] = ids[i], exp(x[i] - top)
            n += 1
    return gumbel_race(ids_of_group[:n], weights_of_group[:n], seed, step, TOKEN_STREAM)


@kernel("void(float32[::1], int32[::1])")
def apply_token_bitmask(x: Any, words: Any) -> None:
    """Set the scores of tokens whose bit is 0 to -inf. words: int32 [at least V / 32]."""
    for word in range((x.size + 31) // 32):
        bits, start = words[word], word * 32
        if bits != -1:
            for bit in range(min(32, x.size - start)):
                x[start + bit] -= np.float32(0.0 if (bits >> np.int32(bit)) & 1 else np.inf)
