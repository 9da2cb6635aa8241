"""Finds the tokens at or above a threshold, and the shortest prefix of the ranking that reaches a number or a weight.

Only groups whose maximum reaches the threshold are read. The prefix is found by bisection: passes that only count are
branch-free vector loops, and about ten of them are faster than one pass that moves data.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from nucleate.jit.compiler import inline, jit, loose
from nucleate.sampling.backends.numba import block_ops
from nucleate.sampling.backends.numba.block_ops import WORD_BITS
from nucleate.sampling.backends.numba.fused.workspace import INEXACT_COUNT, NONE, edited_group_address, find_edit, score
from nucleate.sampling.backends.numba.vector_lanes import GROUP_SIZE, LANES

MAX_UNCERTAIN = 64
"""So many tokens may be in doubt."""

BY_COUNT, BY_WEIGHT = 0.0, -1.0

LOWEST = np.finfo(np.float32).min
"""What is at or above it is in: -inf is not."""

UNBOUNDED = np.float32(np.inf)

MAX_INT64 = np.int64(0x7FFFFFFFFFFFFFFF)


@inline
def sortable_bits(x: Any) -> Any:
    """The bits of a float64 as an integer that is ordered as it is."""
    bits = np.float64(x + 0.0).view(np.int64)  # of -0.0 it makes 0.0
    return bits ^ ((bits >> 63) & MAX_INT64)


@inline
def from_sortable_bits(bits: Any) -> Any:
    """The inverse of ``ordered``."""
    return np.int64(bits ^ ((bits >> 63) & MAX_INT64)).view(np.float64)


@inline
def next_up(x: Any) -> Any:
    """The float32 that follows x, which is not infinite, upwards."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)  # of -0.0 it makes 0.0
    return np.int32(bits + (1 if bits >= 0 else -1)).view(np.float32)


@jit
def round_to_float32(x: Any, upper: Any) -> Any:
    """The float32 next to a number, or itself, upwards or downwards, but LOWEST at least."""
    nearest = np.float32(max(x, np.float64(LOWEST)))
    if np.float64(nearest) < x and upper:
        nearest = next_up(nearest)
    elif np.float64(nearest) > x and not upper:
        nearest = -next_up(-nearest)
    return max(nearest, LOWEST)


@jit
def gather_candidates(threshold: Any, upper: Any, work: Any) -> Any:
    """Put the ids of all scores from a cut to below another into ``ids``, ascending, these into ``scores``, as float64,
    and 1 into ``weights``; returns how many.

    Without branches that would be guessed wrong at every other group: those that reach the cut are listed first. Most
    of these have one score, or some in every part.
    """
    ids, groups, selected, found = work.ids, work.selected_groups, 0, 0
    for group in range(work.group_maxima.size):
        groups[selected] = group
        selected += work.group_maxima[group] >= threshold
    for i in range(selected):
        start, address = groups[i] * GROUP_SIZE, edited_group_address(groups[i], work)
        a, b = bitmask_between(address, threshold, upper), bitmask_between(address + 4 * WORD_BITS, threshold, upper)
        c, d = (
            bitmask_between(address + 8 * WORD_BITS, threshold, upper),
            bitmask_between(address + 12 * WORD_BITS, threshold, upper),
        )
        if block_ops.popcount(a) + block_ops.popcount(b) + block_ops.popcount(c) + block_ops.popcount(d) == 1:
            ids[found] = (
                start + block_ops.trailing_zeros(a | b | c | d) + WORD_BITS * ((b != 0) + 2 * (c != 0) + 3 * (d != 0))
            )
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
    return block_ops.bitmask_at_least(address, threshold) & ~block_ops.bitmask_at_least(address, upper)


@jit
def append_set_bits(bits: Any, start: Any, ids: Any, found: Any) -> Any:
    """Write the places of the bits that are set; four at a time, be they there or not. Returns where they end."""
    end = found + block_ops.popcount(bits)
    while True:
        for i in range(4):
            ids[found + i] = start + block_ops.trailing_zeros(bits)
            bits &= bits - 1
        if bits == 0:
            return end
        found += 4


@jit
def count_at_least(threshold: Any, work: Any) -> Any:
    """How many scores are at or above a cut."""
    found = 0
    for group in range(work.group_maxima.size):
        if work.group_maxima[group] >= threshold:
            address = edited_group_address(group, work)
            for word in range(address, address + 4 * GROUP_SIZE, 4 * WORD_BITS):
                found += block_ops.popcount(block_ops.bitmask_at_least(word, threshold))
    return found


@jit
def top_k_bound(k: Any, deviations: Any, work: Any) -> Any:
    """A score that at least k tokens most likely reach, and not many more: surely where groups are many.

    Else of a sample; so many standard deviations more tokens than k are taken, where some are counted for all.
    """
    if 2 * k <= work.group_maxima.size:
        return round_to_float32(kth_value_bound(work.group_maxima, k), True)
    found = 0  # some of every other group
    for group in range(0, work.size // GROUP_SIZE, 2):
        start = group * GROUP_SIZE + group % (GROUP_SIZE // LANES) * LANES
        for i in range(LANES):
            work.scores[found + i] = score(work, start + i)
        found += LANES
    rank = k * (found / work.size)
    rank += deviations * math.sqrt(rank) + 1.0
    return round_to_float32(kth_value_bound(work.scores[:found], int(rank)), True) if rank <= found else LOWEST


class PrefixBounds(NamedTuple):
    """The first of some numbers, the highest: those at or above ``high``, and some of those from ``low`` on."""

    low: Any
    high: Any
    ties_kept: Any  #: how many of those


@jit
def kth_value_bound(values: Any, k: Any) -> Any:
    """A number that at least k of some reach; of others at most an eighth more, but for equal ones."""
    return prefix_bounds(values, values, np.float64(k), np.float64(k >> 3)).low


@jit
def prefix_bounds(values: Any, weights: Any, target: Any, tolerance: Any) -> Any:
    """The fewest first numbers whose weights (or number) reach a goal; equal ones weigh the same.

    spare: so much more than the goal is as good; BY_WEIGHT: weights count, else the number does.
    """
    by_weight = tolerance < 0.0
    low, high = value_range(values, -MAX_INT64, MAX_INT64)
    count_low, count_high, weight_high = values.size, 0, 0.0
    weight_low = weight_at_least(values, weights, -np.inf) if by_weight else 0.0
    for turn in range(1, 90):
        if low + 1 >= high or count_low - count_high <= 1:
            break
        if turn % 8 == 0:  # few numbers, many times?
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
        return PrefixBounds(
            from_sortable_bits(low), from_sortable_bits(high), min(ties, np.int64(target - weight_high))
        )
    tie_weight = (weight_low - weight_high) / ties
    ties_kept = (
        max(1, min(ties, np.int64(math.ceil((target - weight_high) / tie_weight)))) if tie_weight > 0.0 else ties
    )
    return PrefixBounds(from_sortable_bits(low), from_sortable_bits(high), ties_kept)


@jit
def value_range(values: Any, minimum: Any, maximum: Any) -> Any:
    """Of numbers from one to below another, all as ``ordered``: the lowest, and what follows the highest."""
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
    """The weight of those at or above a cut."""
    total = 0.0
    for i in range(values.size):
        total += weights[i] if values[i] >= threshold else 0.0
    return total


@jit
def keep_prefix(n: Any, target: Any, tolerance: Any, work: Any) -> Any:
    """Keep, of n candidates, the fewest first that reach the goal, see ``share``; they stay in ascending ids."""
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
    """The place of the last of n candidates in the order, but for doubtful ones; NOBODY if there is none."""
    last, x = NONE, np.inf
    for i in range(n):
        if work.scores[i] <= x and work.weights[i] > 0.0:
            last, x = i, work.scores[i]
    return last


@jit
def mark_uncertain(n: Any, total: Any, target: Any, work: Any) -> Any:
    """Make the weights of those of n candidates negative before which others may reach the goal: they may be out.

    total: the weight of all of them, and of those before them. False if they are too many to be listed.
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
