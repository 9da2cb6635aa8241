"""Histograms of the scores of a row, counted and weighed in integers, and the bins in which cuts fall."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.float_bits import SLACK, fixed

BINS = tl.constexpr(2048)


class HistogramView(NamedTuple):
    """Which scores are in a histogram, and how they become bins: linear, and rounded so that no order is lost.

    Scores beyond the ends of the scale are in the first or the last bin.
    """

    least: Any  #: float32: the lowest score that is in
    most: Any  #: float32: the highest
    origin: Any  #: float64: the score at which the first bin begins
    scale: Any  #: float64: bins per unit


class Histogram(NamedTuple):
    """The sums of a row by bin, higher scores in higher bins."""

    counts: Any  #: int64 [BINS]
    amounts: Any  #: int64 [BINS]: of ``float_bits.fixed``


class BinChoice(NamedTuple):
    """The bins in which cuts fall."""

    k_bin: Any  #: where the k-th token is; -1 where top-k does not cut
    p_first: Any  #: top-p's last token is between this bin
    p_last: Any  #: and this one; above ``p_first`` without top-p
    n: Any  #: int64: how many tokens these bins hold


@jit
def bin_of(x, view):
    place = (x.to(tl.float64) - view.origin) * view.scale
    return tl.minimum(tl.maximum(place, 0.0), BINS - 1).to(tl.int32)


@jit
def within(x, view):
    return (x >= view.least) & (x <= view.most)


@jit
def scaled(least, most, origin, end):
    """A view whose bins divide what is between two scores."""
    origin, end = origin.to(tl.float64), end.to(tl.float64)
    return HistogramView(least, most, origin, (origin * 0.0 + BINS) / tl.maximum(end - origin, 1e-300))


@jit
def count(counts, amounts, x, chosen, view, top, t, unit):
    """Add tokens to a histogram in memory. Integers, so that their order does not matter."""
    place = bin_of(x, view)
    tl.atomic_add(counts + place, 1, mask=chosen, sem="relaxed")
    tl.atomic_add(amounts + place, fixed(x, top, t, unit), mask=chosen, sem="relaxed")


@jit
def clear(counts, amounts):
    bin_B = tl.arange(0, BINS)
    tl.store(counts + bin_B, tl.zeros((BINS,), tl.int32))
    tl.store(amounts + bin_B, tl.zeros((BINS,), tl.int64))


@jit
def loaded(counts, amounts):
    bin_B = tl.arange(0, BINS)
    return Histogram(tl.load(counts + bin_B).to(tl.int64), tl.load(amounts + bin_B))


@jit
def above(sums_B, place):
    """The sum of all higher bins."""
    return tl.sum(tl.where(tl.arange(0, BINS) > place, sums_B, 0), 0)


@jit
def at(sums_B, place):
    return tl.sum(tl.where(tl.arange(0, BINS) == place, sums_B, 0), 0)


@jit
def reaching(sums_B, goal):
    """The highest bin which together with all higher ones reaches a goal."""
    through_B = tl.sum(sums_B, 0) - tl.cumsum(sums_B, 0) + sums_B
    return tl.max(tl.where(through_B >= goal, tl.arange(0, BINS), 0), 0)


@jit
def part(p, amount):
    """What top-p must reach of an amount: an integer above 0."""
    return tl.maximum(tl.ceil(p * amount.to(tl.float64) * (1.0 - SLACK)), 1.0).to(tl.int64)


@jit
def choose(sums, numbers):
    """The bins in which the cuts fall. What top-k leaves is known up to a bin, and so is what top-p takes of it."""
    counted = (numbers.k > 0.0) & (numbers.k < tl.sum(sums.counts, 0))
    k_bin = tl.where(counted, reaching(sums.counts, numbers.k.to(tl.int64)), -1)
    low = above(sums.amounts, k_bin)
    high = low + at(sums.amounts, k_bin)
    cuts = numbers.p < 1.0
    p_last = tl.where(cuts, tl.maximum(reaching(sums.amounts, part(numbers.p, high)), k_bin), BINS)
    p_first = tl.where(cuts, tl.maximum(reaching(sums.amounts, part(numbers.p, low)), k_bin), -1)
    n = tl.sum(tl.where(chosen(tl.arange(0, BINS), BinChoice(k_bin, p_first, p_last, low)), sums.counts, 0), 0)
    return BinChoice(k_bin, p_first, p_last, n)


@jit
def chosen(place, choice):
    """Whether bins are among those in which cuts fall."""
    return (place == choice.k_bin) | ((place >= choice.p_last) & (place <= choice.p_first))
