"""Searches of the stages' kernels: the highest of each group, the k-th of some numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import inline, jit
from nucleate.backends.cpu.simd import GROUP

FEW = 4096


@inline
def stir(state: Any) -> Any:
    """The next of some numbers below 2**32: pivots are taken by them, as no order of scores is bad for all of these."""
    return (state * 1664525 + 1013904223) & 0xFFFFFFFF


@jit
def kth_highest(values: Any, work: Any, k: Any) -> Any:
    """The k-th highest of some numbers."""
    work[: values.size] = values
    first, last, state = 0, values.size - 1, np.int64(1)
    while first < last:
        state = stir(state)
        pivot, left, right = work[first + (state * (last - first + 1) >> 32)], first, last
        while left <= right:
            while work[left] > pivot:
                left += 1
            while work[right] < pivot:
                right -= 1
            if left <= right:
                work[left], work[right] = work[right], work[left]
                left += 1
                right -= 1
        if k - 1 <= right:
            last = right
        elif k - 1 >= left:
            first = left
        else:
            break
    return work[k - 1]


@jit
def read(row: Any, tops: Any) -> Any:
    """The highest score of each group; returns the highest of all, NaN if there is one, or +inf."""
    top, wrong = np.float32(-np.inf), False
    for group in range(tops.size):
        best = simd.top(row, group * GROUP)
        tops[group] = best
        wrong |= not best < np.inf
        top = max(top, best)
    return np.float32(np.nan) if wrong else top


@jit
def count_cut(row: Any, groups: Any, k: Any, top: Any, cuts: Any, sums: Any) -> Any:  # noqa: C901
    """A score that at least k tokens reach, and not many more."""
    low, high, span = -np.inf, np.inf, np.float32(4.0)
    for _ in range(16):
        for i in range(4):
            if low == -np.inf:
                cuts[i] = np.float32(top - 2 * span * (i + 1))
            else:
                cuts[i] = np.float32(high + (low - high) * (i + 1) / 5)
            sums[i] = 0.0
        for group in range(groups):
            for i in range(4):
                sums[i] += simd.count(row, group * GROUP, cuts[i])
        more = high if high < np.inf else np.float64(top)
        enough = False
        for i in range(4):
            if sums[i] >= k:
                low, high, enough = np.float64(cuts[i]), more, True
                break
            more = np.float64(cuts[i])
        if enough and sums[i] <= k + FEW // 4:
            return np.float32(low)
        if not enough:
            if low > -np.inf:
                high = more
            elif span > 1e30:
                return np.float32(-np.inf)
            else:
                span *= np.float32(16.0)
    return np.float32(low)
