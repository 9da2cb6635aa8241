"""Histograms of the scores of a row, with integer counts and weights, and the bins that contain the thresholds."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.float_bits import SLACK, fixed_weight

BINS = tl.constexpr(2048)


class HistogramView(NamedTuple):
    """The range of scores in a histogram, and their monotone linear map to bins.

    Scores outside the bins are counted in the first or last one.
    """

    lowest: Any  #: float32: the lowest score of the histogram
    highest: Any  #: float32: the highest score
    origin: Any  #: float64: the score at the start of the first bin
    scale: Any  #: float64: bins per unit


class Histogram(NamedTuple):
    """The sums per bin; higher scores are in higher bins."""

    counts: Any  #: int64 [BINS]
    weights: Any  #: int64 [BINS]: of ``fixed_weight``


class BinChoice(NamedTuple):
    """The bins that contain the thresholds."""

    k_bin: Any  #: the bin of the k-th token; -1 if top-k removes nothing
    p_first: Any  #: the last token of top-p is between this bin
    p_last: Any  #: and this lower one; higher than ``p_first`` without top-p
    n: Any  #: int64: the number of tokens in these bins


@jit
def bin_of(x, view):
    index = (x.to(tl.float64) - view.origin) * view.scale
    return tl.minimum(tl.maximum(index, 0.0), BINS - 1).to(tl.int32)


@jit
def in_view(x, view):
    return (x >= view.lowest) & (x <= view.highest)


@jit
def make_view(lowest, highest, origin, end):
    """A view with bins of equal width between two scores."""
    origin, end = origin.to(tl.float64), end.to(tl.float64)
    return HistogramView(lowest, highest, origin, (origin * 0.0 + BINS) / tl.maximum(end - origin, 1e-300))


@jit
def add(counts, weights, x, is_chosen, view, top, t, unit):
    """Add tokens to a histogram in memory. Integer sums do not depend on the order."""
    index = bin_of(x, view)
    tl.atomic_add(counts + index, 1, mask=is_chosen, sem="relaxed")
    tl.atomic_add(weights + index, fixed_weight(x, top, t, unit), mask=is_chosen, sem="relaxed")


@jit
def clear(counts, weights):
    bin_B = tl.arange(0, BINS)
    tl.store(counts + bin_B, tl.zeros((BINS,), tl.int32))
    tl.store(weights + bin_B, tl.zeros((BINS,), tl.int64))


@jit
def load(counts, weights):
    bin_B = tl.arange(0, BINS)
    return Histogram(tl.load(counts + bin_B).to(tl.int64), tl.load(weights + bin_B))


@jit
def sum_above(sums_B, index):
    """The sum of all higher bins."""
    return tl.sum(tl.where(tl.arange(0, BINS) > index, sums_B, 0), 0)


@jit
def bin_value(sums_B, index):
    return tl.sum(tl.where(tl.arange(0, BINS) == index, sums_B, 0), 0)


@jit
def bin_reaching(sums_B, target):
    """The highest bin at which the sum over it and all higher bins reaches a target."""
    through_B = tl.sum(sums_B, 0) - tl.cumsum(sums_B, 0) + sums_B
    return tl.max(tl.where(through_B >= target, tl.arange(0, BINS), 0), 0)


@jit
def top_p_target(p, weight):
    """The target of top-p for this total weight: a positive integer."""
    return tl.maximum(tl.ceil(p * weight.to(tl.float64) * (1.0 - SLACK)), 1.0).to(tl.int64)


@jit
def choose_bins(sums, params):
    """Locate the thresholds. The tokens kept by top-k are known up to a bin, so the bin of top-p has bounds only."""
    has_top_k = (params.k > 0.0) & (params.k < tl.sum(sums.counts, 0))
    k_bin = tl.where(has_top_k, bin_reaching(sums.counts, params.k.to(tl.int64)), -1)
    low = sum_above(sums.weights, k_bin)
    high = low + bin_value(sums.weights, k_bin)
    has_top_p = params.p < 1.0
    p_last = tl.where(has_top_p, tl.maximum(bin_reaching(sums.weights, top_p_target(params.p, high)), k_bin), BINS)
    p_first = tl.where(has_top_p, tl.maximum(bin_reaching(sums.weights, top_p_target(params.p, low)), k_bin), -1)
    n = tl.sum(tl.where(is_chosen(tl.arange(0, BINS), BinChoice(k_bin, p_first, p_last, low)), sums.counts, 0), 0)
    return BinChoice(k_bin, p_first, p_last, n)


@jit
def is_chosen(index, choice):
    """Whether bins contain thresholds."""
    return (index == choice.k_bin) | ((index >= choice.p_last) & (index <= choice.p_first))
