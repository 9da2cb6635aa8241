"""Histograms of scores, and two kernels for pending rows: those with too many candidates for a pool.

``tally`` builds a histogram of the row, with integer counts and weights, which locates the bin of each threshold.
``collect`` pools the tokens of these bins. If they do not fit, it counts them per group and finds their lowest and
highest score: so many tokens in one bin are nearly always equal. Several programs process one row. For other rows both
kernels return at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.gpu.triton import device_memory as memory
from nucleate.sampling.gpu.triton.device_memory import (
    GROUP_SIZE,
    MAX_ID,
    TILE,
    TILE_GROUPS,
    KeptRange,
    append_to_pool,
    is_kept,
    load_pool,
    row_scratch,
    select_prefix,
)
from nucleate.sampling.gpu.triton.triton_numbers import INFINITY, SLACK, fixed_weight, from_ordered, to_ordered

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
def add_to_bins(counts, weights, x, is_chosen, view, top, t, unit):
    """Add tokens to a histogram in memory. Integer sums do not depend on the order."""
    index = bin_of(x, view)
    tl.atomic_add(counts + index, 1, mask=is_chosen, sem="relaxed")
    tl.atomic_add(weights + index, fixed_weight(x, top, t, unit), mask=is_chosen, sem="relaxed")


@jit
def clear_bins(counts, weights):
    bin_B = tl.arange(0, BINS)
    tl.store(counts + bin_B, tl.zeros((BINS,), tl.int32))
    tl.store(weights + bin_B, tl.zeros((BINS,), tl.int64))


@jit
def load_bins(counts, weights):
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


PENDING, POOLED, LOW, HIGH, NUM_FLAGS = map(tl.constexpr, range(5))
"""int32 flags of a row: whether it is pending; number of pooled tokens; lowest, highest candidate (``to_ordered``)."""
VIEW_ORIGIN, VIEW_SCALE, WEIGHT_UNIT, VIEW_LOWEST, VIEW_HIGHEST, NUM_VIEW_VALUES = map(tl.constexpr, range(6))
"""float64 values of a row: the fields of its ``HistogramView``, and the fixed-point value of the weight 1."""

CHUNK = tl.constexpr(1024)
"""The number of tokens that ``select_pending`` reads at a time. More would spill registers."""


@jit
def tally(source, state, sums, pending, tiles, width: tl.constexpr):
    """Grid: rows; parts of ``tiles`` tiles of 2048 tokens. The first histogram of a pending row must be zero."""
    row = memory.program_row()
    pending = row_pending(pending, row)
    if tl.load(pending.flags + PENDING) != 0:
        t = memory.load_params(memory.state_address(state, row)).t
        view, unit = load_view(pending.views), tl.load(pending.views + WEIGHT_UNIT)
        for i in range(tiles):
            tile = tl.program_id(1) * tiles + i
            if tile_has_candidates(sums.tops + row * width, tile, view.lowest, source.size):
                ids = tile * TILE + tl.arange(0, TILE)
                x = memory.load_scores(source, ids)
                chosen = in_view(x, view)
                add_to_bins(pending.counts, pending.weights, x, chosen, view, view.highest, t, unit)


@jit
def collect(source, state, sums, pending, scratch, tiles, width: tl.constexpr):
    """Grid and arguments as in ``tally``; scratch: see ``PoolScratch``."""
    row = memory.program_row()
    pending = row_pending(pending, row)
    scratch, flags = row_scratch(scratch, row, width), pending.flags
    if tl.load(flags + PENDING) != 0:
        view = load_view(pending.views)
        params = memory.load_params(memory.state_address(state, row))
        choice = choose_bins(load_bins(pending.counts, pending.weights), params)
        counted_bin = tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin)
        for i in range(tiles):
            tile = tl.program_id(1) * tiles + i
            if tile_has_candidates(sums.tops + row * width, tile, view.lowest, source.size):
                ids = tile * TILE + tl.arange(0, TILE)
                x = memory.load_scores(source, ids)
                bins = tl.where(in_view(x, view), bin_of(x, view), -1)
                if choice.n <= TILE:
                    here = (bins >= 0) & is_chosen(bins, choice)
                    base = tl.atomic_add(flags + POOLED, tl.sum(here.to(tl.int32), 0), sem="relaxed")
                    append_to_pool(scratch, base, x, ids, here)
                else:
                    low, high = count_by_group(scratch, tile, x, bins == counted_bin, width)
                    tl.atomic_min(flags + LOW, low, sem="relaxed")
                    tl.atomic_max(flags + HIGH, high, sem="relaxed")


@jit
def row_pending(pending, row):
    """The addresses of one row."""
    bins = 2 * row * BINS
    flags, views = pending.flags + row * NUM_FLAGS, pending.views + row * NUM_VIEW_VALUES
    return memory.PendingRows(flags, views, pending.counts + bins, pending.weights + bins)


@jit
def load_view(view):
    lowest, top = tl.load(view + VIEW_LOWEST).to(tl.float32), tl.load(view + VIEW_HIGHEST).to(tl.float32)
    return HistogramView(lowest, top, tl.load(view + VIEW_ORIGIN), tl.load(view + VIEW_SCALE))


@jit
def tile_has_candidates(tops, tile, lowest, size):
    """Whether any group of a tile reaches the lowest score."""
    group_G = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    valid_G = group_G < tl.cdiv(size, GROUP_SIZE)
    return tl.max(tl.load(tops + group_G, mask=valid_G, other=-INFINITY), 0) >= lowest


@jit
def count_by_group(scratch, tile, x, here, width: tl.constexpr):
    """Count the selected tokens of a tile by group. Returns their lowest and highest score, see ``to_ordered``."""
    groups: tl.constexpr = x.shape[0] // GROUP_SIZE
    n_G = tl.sum(tl.reshape(here.to(tl.int32), (groups, GROUP_SIZE)), 1)
    group_G = tile * groups + tl.arange(0, groups)
    tl.store(scratch.groups + group_G, n_G, mask=group_G < width)
    key = to_ordered(tl.where(x == 0.0, 0.0, x)).to(tl.int32)
    return tl.min(tl.where(here, key, MAX_ID), 0), tl.max(tl.where(here, key, -MAX_ID), 0)


@jit
def select_pending(source, scratch, pending, view, params, unit, width: tl.constexpr):
    """Apply top-k and top-p to a row after both kernels. Returns the kept tokens."""
    counts, weights = pending.counts, pending.weights
    sums = load_bins(counts, weights)
    kept, total = KeptRange(view.lowest, tl.full((), MAX_ID, tl.int32)), tl.sum(sums.weights, 0)
    choice = choose_bins(sums, params)
    counted_bin = tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin)  # as in ``collect``
    num_counted = bin_value(sums.counts, counted_bin)
    for by_weight in range(2):  # top-k counts tokens, top-p weighs them
        if tl.where(by_weight == 0, choice.k_bin >= 0, params.p < 1.0):
            sums = load_bins(counts, weights)
            sums_B = tl.where(by_weight == 0, sums.counts, sums.weights)
            target = tl.where(by_weight == 0, params.k.to(tl.int64), top_p_target(params.p, total))
            bin_index = tl.maximum(bin_reaching(sums_B, target), choice.k_bin)
            total = sum_above(sums.weights, bin_index)
            target -= sum_above(sums_B, bin_index)
            is_pooled, is_counted = choice.n <= TILE, num_counted > TILE
            kept, weight = select_in_bin(
                source, scratch, pending, is_pooled, is_counted, view, bin_index, target, kept, params.t, unit,
                by_weight, width,
            )  # fmt: skip
            total, num_counted = total + weight, num_counted * 0
    return kept


@jit
def select_in_bin(
    source, scratch, pending, is_pooled, is_counted, view, bin_index, target, kept, t, unit, by_weight,
    width: tl.constexpr,
):  # fmt: skip
    """Keep the first tokens of a bin that reach a target. Returns the kept tokens, and the weight of those in the bin.

    is_pooled, is_counted: whether ``collect`` pooled the tokens of the bin, or counted them by group. A bin with more
    tokens than fit the pool, not all equal, is subdivided with the second histogram. That is rare and costs two reads.
    """
    flags, counts, weights = pending.flags, pending.counts + BINS, pending.weights + BINS
    top, weight = view.highest, target * 0
    lowest, highest, origin, scale = view.lowest, view.highest, view.origin, view.scale
    n, low, high = tl.load(flags + POOLED), tl.load(flags + LOW), tl.load(flags + HIGH)
    if is_pooled == 0:
        n = tl.full((), TILE + 1, tl.int32)
    if (is_pooled | is_counted) == 0:
        low, high = to_ordered(lowest).to(tl.int32), tl.full((), MAX_ID, tl.int32)  # unknown
    while (n > TILE) & (low < high):
        if high < MAX_ID:
            lowest, highest = from_ordered(low), from_ordered(high)
            finer = make_view(lowest, highest, lowest, highest)
            origin, scale = finer.origin, finer.scale
            tl.debug_barrier()
            clear_bins(counts, weights)
            tl.debug_barrier()
            for i in range(tl.cdiv(source.size, CHUNK)):
                ids = i * CHUNK + tl.arange(0, CHUNK)
                x = memory.load_scores(source, ids)
                chosen = in_view(x, finer) & is_kept(x, ids, kept)
                add_to_bins(counts, weights, x, chosen, finer, top, t, unit)
            tl.debug_barrier()
            sums = load_bins(counts, weights)
            sums_B = tl.where(by_weight == 0, sums.counts, sums.weights)
            bin_index = bin_reaching(sums_B, target)
            target -= sum_above(sums_B, bin_index)
            weight += sum_above(sums.weights, bin_index)
        current = HistogramView(lowest, highest, origin, scale)
        n, low, high = gather_bin(source, scratch, current, bin_index, kept, width)
    if n <= TILE:
        pool = load_pool(scratch, n)
        bins = bin_of(pool.x, HistogramView(lowest, highest, origin, scale))
        here = (bins == bin_index) & is_kept(pool.x, pool.ids, kept)
        amount = tl.where(here & (pool.x > -INFINITY), fixed_weight(pool.x, top, t, unit), 0)
        kept = select_prefix(pool, tl.where(by_weight == 0, here.to(tl.int64), amount), target, top).kept
        weight += tl.sum(tl.where(is_kept(pool.x, pool.ids, kept), amount, 0), 0)
    else:
        threshold = from_ordered(low)
        each = fixed_weight(threshold, top, t, unit)
        need = tl.where(by_weight == 0, target, tl.where(each > 0, (target + each - 1) // tl.maximum(each, 1), MAX_ID))
        kept = KeptRange(threshold, nth_equal_id(source, scratch, threshold, kept, need, width))
        weight += need * each
    return kept, weight


@jit
def gather_bin(source, scratch, view, bin_index, kept, width: tl.constexpr):
    """Pool the kept tokens of a bin and count them by group, like ``collect``. Returns number, lowest, highest."""
    n = tl.full((), 0, tl.int32)
    low, high = tl.full((), MAX_ID, tl.int32), tl.full((), -MAX_ID, tl.int32)
    tl.debug_barrier()  # other threads may still read the previous pool
    for i in range(tl.cdiv(source.size, CHUNK)):
        ids = i * CHUNK + tl.arange(0, CHUNK)
        x = memory.load_scores(source, ids)
        here = in_view(x, view) & (bin_of(x, view) == bin_index) & is_kept(x, ids, kept)
        own_low, own_high = count_by_group(scratch, i, x, here, width)
        low, high = tl.minimum(low, own_low), tl.maximum(high, own_high)
        n += append_to_pool(scratch, n, x, ids, here)
    tl.debug_barrier()
    return n, low, high


@jit
def nth_equal_id(source, scratch, threshold, kept, need, width: tl.constexpr):
    """The id of the n-th token with this score, of those counted by group; the last one if there are fewer."""
    group_G = tl.arange(0, width)
    valid_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
    n_G = tl.load(scratch.groups + group_G, mask=valid_G, other=0)
    need = tl.minimum(need, tl.sum(n_G, 0)).to(tl.int32)
    through_G = tl.cumsum(n_G, 0)
    group = tl.min(tl.where(through_G >= need, group_G, width), 0)
    need -= tl.sum(tl.where(group_G < group, n_G, 0), 0)
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    here = (memory.load_scores(source, ids) == threshold) & (ids <= kept.last_id)
    return tl.min(tl.where(tl.cumsum(here.to(tl.int32), 0) >= need, ids, MAX_ID), 0)
