"""Finds the tokens at or above a threshold, and the shortest prefix of the ranking that reaches a count or a weight.

Only groups whose maximum reaches the threshold are read. The prefix is found by bisection: passes that only count are
branch-free vector loops, and about ten of them are faster than one pass that moves data. When top-p has too many
candidates to list, passes over the row sum the weights above several thresholds at once, and narrow them down around
the target until few tokens remain between two of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.jit.compiler import inline, jit, loose
from nucleate.sampling.cpu import block_ops
from nucleate.sampling.cpu.block_ops import GROUP_SIZE, LANES, WORD_BITS, bitmask_at_least, popcount, trailing_zeros
from nucleate.sampling.cpu.workspace import INEXACT_COUNT, NONE, edited_group_address, find_edit, score

MAX_UNCERTAIN = 64
"""Maximum number of uncertain tokens."""

BY_COUNT, BY_WEIGHT = 0.0, -1.0

LOWEST = np.finfo(np.float32).min
"""The lowest finite score."""

UNBOUNDED = np.float32(np.inf)

MAX_INT64 = np.int64(0x7FFFFFFFFFFFFFFF)


@inline
def sortable_bits(x: Any) -> Any:
    """The bits of a float64 as an integer with the same order."""
    bits = np.float64(x + 0.0).view(np.int64)  # + 0.0 turns -0.0 into 0.0
    return bits ^ ((bits >> 63) & MAX_INT64)


@inline
def from_sortable_bits(bits: Any) -> Any:
    """The inverse of ``sortable_bits``."""
    return np.int64(bits ^ ((bits >> 63) & MAX_INT64)).view(np.float64)


@inline
def next_up(x: Any) -> Any:
    """The next float32 above a finite x."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)  # + 0.0 turns -0.0 into 0.0
    return np.int32(bits + (1 if bits >= 0 else -1)).view(np.float32)


@jit
def round_to_float32(x: Any, upper: Any) -> Any:
    """A number rounded to float32, up (upper) or down, and at least LOWEST."""
    nearest = np.float32(max(x, np.float64(LOWEST)))
    if np.float64(nearest) < x and upper:
        nearest = next_up(nearest)
    elif np.float64(nearest) > x and not upper:
        nearest = -next_up(-nearest)
    return max(nearest, LOWEST)


@jit
def gather_candidates(threshold: Any, upper: Any, work: Any) -> Any:
    """List the tokens with threshold <= score < upper, with ids ascending, float64 scores, and weights of 1.

    Returns their number. Selects the groups first, without branches, because every other one would be mispredicted.
    Most selected groups have one such token, or some in each quarter.
    """
    ids, groups, selected, found = work.ids, work.selected_groups, 0, 0
    for group in range(work.group_maxima.size):
        groups[selected] = group
        selected += work.group_maxima[group] >= threshold
    for i in range(selected):
        start, address = groups[i] * GROUP_SIZE, edited_group_address(groups[i], work)
        a, b = bitmask_between(address, threshold, upper), bitmask_between(address + 4 * WORD_BITS, threshold, upper)
        c = bitmask_between(address + 8 * WORD_BITS, threshold, upper)
        d = bitmask_between(address + 12 * WORD_BITS, threshold, upper)
        if popcount(a) + popcount(b) + popcount(c) + popcount(d) == 1:
            ids[found] = start + trailing_zeros(a | b | c | d) + WORD_BITS * ((b != 0) + 2 * (c != 0) + 3 * (d != 0))
            found += 1
        else:
            found = append_set_bits(a, start, ids, found)
            found = append_set_bits(b, start + WORD_BITS, ids, found)
            found = append_set_bits(c, start + 2 * WORD_BITS, ids, found)
            found = append_set_bits(d, start + 3 * WORD_BITS, ids, found)
    for i in range(found):
        work.scores[i], work.weights[i] = score(work, ids[i]), 1.0
    if work.counters[INEXACT_COUNT] > 0:
        for i in range(found):
            edit = find_edit(work, ids[i])
            work.scores[i] = work.edited_scores[edit] if edit >= 0 else work.scores[i]
    return found


@inline
def bitmask_between(address: Any, threshold: Any, upper: Any) -> Any:
    return bitmask_at_least(address, threshold) & ~bitmask_at_least(address, upper)


@jit
def append_set_bits(bits: Any, start: Any, ids: Any, found: Any) -> Any:
    """Append start + i for each bit i that is set, four at a time without branches. Returns the new length."""
    end = found + popcount(bits)
    while True:
        for i in range(4):
            ids[found + i] = start + trailing_zeros(bits)
            bits &= bits - 1
        if bits == 0:
            return end
        found += 4


@jit
def count_at_least(threshold: Any, work: Any) -> Any:
    """The number of scores at or above a threshold."""
    found = 0
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] >= threshold:
            address = edited_group_address(group, work)
            for word in range(address, address + 4 * GROUP_SIZE, 4 * WORD_BITS):
                found += popcount(bitmask_at_least(word, threshold))
    return found


@jit
def top_k_bound(k: Any, deviations: Any, work: Any) -> Any:
    """A score that at least k tokens reach, and not many more; always so for k up to half the number of groups.

    For a larger k, an estimate from a sample, for k plus so many standard deviations.
    """
    if 2 * k <= work.group_maxima.size:
        return round_to_float32(kth_value_bound(work.group_maxima, k), True)
    found = 0  # sample 16 scores of every other group
    for group in range(0, work.size // GROUP_SIZE, 2):
        start = group * GROUP_SIZE + group % (GROUP_SIZE // LANES) * LANES
        for i in range(LANES):
            work.scores[found + i] = score(work, start + i)
        found += LANES
    rank = k * (found / work.size)
    rank += deviations * math.sqrt(rank) + 1.0
    return round_to_float32(kth_value_bound(work.scores[:found], int(rank)), True) if rank <= found else LOWEST


class PrefixBounds(NamedTuple):
    """A prefix of values in descending order: those >= high, and the first ``ties_kept`` with low <= value < high."""

    low: Any
    high: Any
    ties_kept: Any


@jit
def kth_value_bound(values: Any, k: Any) -> Any:
    """A value that at least k values reach, and at most k / 8 more unless they are equal."""
    return prefix_bounds(values, values, np.float64(k), np.float64(k >> 3)).low


@jit
def prefix_bounds(values: Any, weights: Any, target: Any, tolerance: Any) -> Any:
    """The shortest prefix whose count, or weight, reaches a target. Equal values have equal weights.

    tolerance: BY_WEIGHT for a target weight, else an excess over the target count at which the search may stop.
    """
    by_weight = tolerance < 0.0
    low, high = value_range(values, -MAX_INT64, MAX_INT64)
    count_low, count_high, weight_high = values.size, 0, 0.0
    weight_low = weight_at_least(values, weights, -np.inf) if by_weight else 0.0
    for turn in range(1, 90):
        if low + 1 >= high or count_low - count_high <= 1:
            break
        if turn % 8 == 0:  # in case there are few distinct values
            low, high = value_range(values, low, high)
            continue
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        at_middle = count_values(values, from_sortable_bits(middle))
        weight = weight_at_least(values, weights, from_sortable_bits(middle)) if by_weight else np.float64(at_middle)
        if weight >= target:
            low, count_low, weight_low = middle, at_middle, weight
            if weight <= target + tolerance:
                break
        else:
            high, count_high, weight_high = middle, at_middle, weight
    ties = count_low - count_high
    if not by_weight:
        first, last = from_sortable_bits(low), from_sortable_bits(high)
        return PrefixBounds(first, last, min(ties, np.int64(target - weight_high)))
    per_tie = (weight_low - weight_high) / ties
    ties_kept = max(1, min(ties, np.int64(math.ceil((target - weight_high) / per_tie)))) if per_tie > 0.0 else ties
    return PrefixBounds(from_sortable_bits(low), from_sortable_bits(high), ties_kept)


@jit
def value_range(values: Any, minimum: Any, maximum: Any) -> Any:
    """The lowest value in minimum..maximum, and the highest plus 1, as ``sortable_bits``."""
    low, high = np.int64(maximum), np.int64(minimum)
    for i in range(values.size):
        bits = sortable_bits(np.float64(values[i]))
        low = min(low, bits if bits >= minimum else maximum)
        high = max(high, bits if bits < maximum else minimum)
    return low, high + 1


@jit
def count_values(values: Any, threshold: Any) -> Any:
    found = 0
    for i in range(values.size):
        found += values[i] >= threshold
    return found


@loose
def weight_at_least(values: Any, weights: Any, threshold: Any) -> Any:
    """The weight of the values at or above a threshold."""
    total = 0.0
    for i in range(values.size):
        total += weights[i] if values[i] >= threshold else 0.0
    return total


@jit
def keep_prefix(n: Any, target: Any, tolerance: Any, work: Any) -> Any:
    """Keep the ``prefix_bounds`` prefix of n candidates, in ascending order of ids. Returns its length."""
    ids, weights, scores = work.ids, work.weights, work.scores
    first = prefix_bounds(scores[:n], weights[:n], target, tolerance)
    ties_left, kept = first.ties_kept, 0
    for i in range(n):
        x = scores[i]
        ids[kept], weights[kept], scores[kept] = ids[i], weights[i], x
        is_tie = (x >= first.low) & (x < first.high)
        kept += (x >= first.high) | (is_tie & (ties_left > 0))
        ties_left -= is_tie
    return kept


@jit
def last_certain(n: Any, work: Any) -> Any:
    """The index of the lowest-ranked certain one of n candidates; NONE if there is none."""
    last, x = NONE, np.inf
    for i in range(n):
        if work.scores[i] <= x and work.weights[i] > 0.0:
            last, x = i, work.scores[i]
    return last


@jit
def mark_uncertain(n: Any, total: Any, target: Any, work: Any) -> Any:
    """Mark the candidates that higher-ranked ones may make unnecessary for the target: their weights become negative.

    total: the weight of the n candidates and of all higher-ranked tokens. Returns False if there are too many to mark.
    """
    for _ in range(MAX_UNCERTAIN):
        last = last_certain(n, work)
        if last == NONE:
            return True
        total -= work.weights[last]
        if total < target:
            return True
        work.weights[last] = -work.weights[last]
    return False


THRESHOLDS = 8
"""Thresholds per pass."""

MAX_LISTED = 4096
"""Maximum number of candidates that are listed; more are narrowed down by passes over the row."""

MAX_PASSES = 7
"""Maximum number of passes."""

SAMPLED_GROUPS = 32
"""Groups sampled for the first guess."""


@jit
def narrow_interval(
    lower: Any, mass_at_upper: Any, upper: Any, mass_at_lower: Any, min_target: Any, target: Any, exponent: Any,
    work: Any,
) -> Any:  # fmt: skip
    """One pass: the thresholds around the target, as (lower, mass_at_upper, upper, mass_at_lower)."""
    thresholds, sums = work.thresholds, work.partial_sums
    sums[:] = 0.0
    max_score, high, low, underflow = exponent
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] >= thresholds[THRESHOLDS - 1]:
            address, thresholds_at = edited_group_address(group, work), np.int64(thresholds.ctypes.data)
            block_ops.masses_above(address, max_score, high, low, underflow, thresholds_at, np.int64(sums.ctypes.data))
    for i in range(THRESHOLDS):
        if sums[i] >= target:
            if thresholds[i] > lower:
                lower, mass_at_lower = thresholds[i], sums[i]
            break
        if sums[i] < min_target and thresholds[i] < upper:
            upper, mass_at_upper = thresholds[i], sums[i]
    return lower, mass_at_upper, upper, mass_at_lower


@jit
def gather_around_target(lower: Any, mass_at_lower: Any, min_target: Any, target: Any, exponent: Any, work: Any) -> Any:
    """Gather the tokens around the one that reaches the target: (their number, the weight of higher-ranked tokens).

    lower, mass_at_lower: a lower bound of its score, and the weight there. min_target: the target less its error.
    """
    mass_at_upper, upper = 0.0, UNBOUNDED
    for pass_index in range(MAX_PASSES):
        is_few = count_at_least(lower, work) - count_at_least(upper, work) <= MAX_LISTED
        if pass_index > 0 and not is_few:
            is_few = are_equal(work.scores[: gather_candidates(lower, upper, work)])
        if is_few:
            break
        low, high = np.float64(lower), min(np.float64(upper), np.float64(exponent.max_score))
        if pass_index == 0:
            guess = sampled_quantile(target / mass_at_lower, low, high, exponent, work)
        else:
            guess = high + (low - high) * min(max((target - mass_at_upper) / (mass_at_lower - mass_at_upper), 0.0), 1.0)
        place_thresholds(work.thresholds, low, high, guess, pass_index % 2 == 0)
        lower, mass_at_upper, upper, mass_at_lower = narrow_interval(
            lower, mass_at_upper, upper, mass_at_lower, min_target, target, exponent, work
        )
    return gather_candidates(lower, upper, work), mass_at_upper


@jit
def are_equal(values: Any) -> Any:
    """Whether all values are equal."""
    different = 0
    for i in range(values.size):
        different += values[i] != values[0]
    return different == 0


@jit
def sampled_quantile(fraction: Any, low: Any, high: Any, exponent: Any, work: Any) -> Any:
    """An estimate, from a sample, of the score at which a fraction of the weight above ``low`` is reached."""
    n, step, scale = 0, max(1, work.group_maxima.size // SAMPLED_GROUPS), exponent.high * math.log(2.0)
    for group in range(0, work.group_maxima.size, step):
        for i in range(LANES):
            x = np.float64(score(work, group * GROUP_SIZE + group % LANES * LANES + i))
            if x >= low:
                work.scores[n], work.weights[n] = x, math.exp((x - exponent.max_score) * scale)
                n += 1
    target = fraction * weight_at_least(work.scores[:n], work.weights[:n], low)
    for _ in range(10):
        middle = (low + high) / 2.0
        if weight_at_least(work.scores[:n], work.weights[:n], middle) >= target:
            low = middle
        else:
            high = middle
    return low


@jit
def place_thresholds(thresholds: Any, low: Any, high: Any, guess: Any, near: Any) -> None:
    """Set thresholds between low and high, in descending order: evenly spaced, or close around a guess (near)."""
    step, middle = (high - low) / 64, (THRESHOLDS - 1) / 2
    for i in range(THRESHOLDS):
        if near:
            thresholds[i] = np.float32(min(max(guess + step * (middle - i) * abs(middle - i) / 2, low), high))
        else:
            thresholds[i] = np.float32(high + (low - high) * (i + 1) / (THRESHOLDS + 1))
