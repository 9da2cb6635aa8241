"""Two kernels for rows of which too many tokens are candidates: a histogram by several programs, then the pool.

``tally`` reads the row once, and its histogram says in which bin each cut falls. ``collect`` reads it once more: it
pools the tokens of these bins, or, if they are too many, counts them by group and finds the lowest and the highest, as
many candidates in one bin are nearly always equal. Rows that do not wait for this cost nothing but the launches.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton import histogram
from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_pool import GROUPS, LAST, TILE, KeptRange, add, first, inside, room_of
from nucleate.sampling.backends.triton.candidate_pool import loaded as pooled
from nucleate.sampling.backends.triton.device_memory import PendingRows, line_of, read, scores, source_of
from nucleate.sampling.backends.triton.float_bits import INFINITY, fixed, floating, ordered
from nucleate.sampling.backends.triton.histogram import (
    BINS,
    HistogramView,
    above,
    at,
    bin_of,
    choose,
    chosen,
    count,
    within,
)

PENDING, PLACED, LOW, HIGH, FLAGS = (tl.constexpr(place) for place in range(5))
"""int32 of a row: whether it waits; tokens pooled; the lowest and the highest candidate, as ``float_bits.ordered``."""
ORIGIN, SCALE, UNIT, LEAST, TOP, VIEW = (tl.constexpr(place) for place in range(6))
"""float64 of a row: see ``histogram.HistogramView``, whose ``most`` is TOP; UNIT is what a weight of 1 becomes."""

STEP = tl.constexpr(1024)
"""Tokens that ``settle`` reads at a time, whose program has registers for no more."""


@jit
def tally(source, state, sums, waiting, tiles, width: tl.constexpr):
    """Grid: parts of ``tiles`` tiles of 2048 tokens; rows. The first counts and amounts of rows that wait are zero."""
    row = tl.program_id(1).to(tl.int64)
    source, waiting = source_of(source, row), waiting_of(waiting, row)
    if tl.load(waiting.flags + PENDING) != 0:
        t = read(line_of(state, row)).t
        view, unit = view_of(waiting.views), tl.load(waiting.views + UNIT)
        for i in range(tiles):
            place = tl.program_id(0) * tiles + i
            if reached(sums.tops + row * width, place, view.least, source.size):
                ids = place * TILE + tl.arange(0, TILE)
                x = scores(source, ids)
                count(waiting.counts, waiting.amounts, x, within(x, view), view, view.most, t, unit)


@jit
def collect(source, state, sums, waiting, room, tiles, width: tl.constexpr):
    """Grid and arguments are those of ``tally``; room: see ``pool.Room``."""
    row = tl.program_id(1).to(tl.int64)
    source, waiting, room = source_of(source, row), waiting_of(waiting, row), room_of(room, row, width)
    flags = waiting.flags
    if tl.load(flags + PENDING) != 0:
        view = view_of(waiting.views)
        choice = choose(histogram.loaded(waiting.counts, waiting.amounts), read(line_of(state, row)))
        crowded = tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin)
        for i in range(tiles):
            place = tl.program_id(0) * tiles + i
            if reached(sums.tops + row * width, place, view.least, source.size):
                ids = place * TILE + tl.arange(0, TILE)
                x = scores(source, ids)
                bins = tl.where(within(x, view), bin_of(x, view), -1)
                if choice.n <= TILE:
                    here = (bins >= 0) & chosen(bins, choice)
                    base = tl.atomic_add(flags + PLACED, tl.sum(here.to(tl.int32), 0), sem="relaxed")
                    add(room, base, x, ids, here)
                else:
                    low, high = crowd_of(room, place, x, bins == crowded, width)
                    tl.atomic_min(flags + LOW, low, sem="relaxed")
                    tl.atomic_max(flags + HIGH, high, sem="relaxed")


@jit
def waiting_of(waiting, row):
    """The same with the addresses of a row."""
    bins = 2 * row * BINS
    flags, views = waiting.flags + row * FLAGS, waiting.views + row * VIEW
    return PendingRows(flags, views, waiting.counts + bins, waiting.amounts + bins)


@jit
def view_of(view):
    least, top = tl.load(view + LEAST).to(tl.float32), tl.load(view + TOP).to(tl.float32)
    return HistogramView(least, top, tl.load(view + ORIGIN), tl.load(view + SCALE))


@jit
def reached(tops, place, least, size):
    """Whether a group of a tile has tokens that are in."""
    group_G = place * GROUPS + tl.arange(0, GROUPS)
    there_G = group_G < tl.cdiv(size, GROUP_SIZE)
    return tl.max(tl.load(tops + group_G, mask=there_G, other=-INFINITY), 0) >= least


@jit
def crowd_of(room, place, x, here, width: tl.constexpr):
    """Count the chosen tokens of a tile by group; returns the lowest and highest score, see ``float_bits.ordered``."""
    groups: tl.constexpr = x.shape[0] // GROUP_SIZE
    n_G = tl.sum(tl.reshape(here.to(tl.int32), (groups, GROUP_SIZE)), 1)
    group_G = place * groups + tl.arange(0, groups)
    tl.store(room.groups + group_G, n_G, mask=group_G < width)
    key = ordered(tl.where(x == 0.0, 0.0, x)).to(tl.int32)
    return tl.min(tl.where(here, key, LAST), 0), tl.max(tl.where(here, key, -LAST), 0)


@jit
def settle(source, room, waiting, view, numbers, unit, width: tl.constexpr):
    """What top-k and top-p leave of a row after both kernels."""
    counts, amounts = waiting.counts, waiting.amounts
    sums = histogram.loaded(counts, amounts)
    kept, total = KeptRange(view.least, tl.full((), LAST, tl.int32)), tl.sum(sums.amounts, 0)
    choice = choose(sums, numbers)
    crowd = at(sums.counts, tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin))  # what ``collect`` counted
    for weighed in range(2):  # top-k counts tokens, top-p weighs them
        if tl.where(weighed == 0, choice.k_bin >= 0, numbers.p < 1.0):
            sums = histogram.loaded(counts, amounts)
            sums_B = tl.where(weighed == 0, sums.counts, sums.amounts)
            goal = tl.where(weighed == 0, numbers.k.to(tl.int64), histogram.part(numbers.p, total))
            place = tl.maximum(histogram.reaching(sums_B, goal), choice.k_bin)
            total, goal = above(sums.amounts, place), goal - above(sums_B, place)
            pools, crowds = choice.n <= TILE, crowd > TILE
            kept, weight = cut_in(
                source, room, waiting, pools, crowds, view, place, goal, kept, numbers.t, unit, weighed, width
            )
            total, crowd = total + weight, crowd * 0
    return kept


@jit
def cut_in(source, room, waiting, pools, crowds, view, place, goal, kept, t, unit, weighed, width: tl.constexpr):
    """The cut at which the tokens of a bin that are left reach a goal, and the weight of those up to it.

    pools, crowds: whether ``collect`` pooled the tokens of the bin, or counted them by group. As long as a bin holds
    more than fit the pool, which are not all equal, it is divided once more: two reads each time, hardly ever.
    The second counts and amounts are scratch for this.
    """
    flags, counts, amounts = waiting.flags, waiting.counts + BINS, waiting.amounts + BINS
    top, weight = view.most, goal * 0
    least, most, origin, scale = view.least, view.most, view.origin, view.scale
    n, low, high = tl.load(flags + PLACED), tl.load(flags + LOW), tl.load(flags + HIGH)
    if pools == 0:
        n = tl.full((), TILE + 1, tl.int32)
    if (pools | crowds) == 0:
        low, high = ordered(least).to(tl.int32), tl.full((), LAST, tl.int32)  # not known
    while (n > TILE) & (low < high):
        if high < LAST:
            least, most = floating(low), floating(high)
            finer = histogram.scaled(least, most, least, most)
            origin, scale = finer.origin, finer.scale
            tl.debug_barrier()
            histogram.clear(counts, amounts)
            tl.debug_barrier()
            for i in range(tl.cdiv(source.size, STEP)):
                ids = i * STEP + tl.arange(0, STEP)
                x = scores(source, ids)
                count(counts, amounts, x, within(x, finer) & inside(x, ids, kept), finer, top, t, unit)
            tl.debug_barrier()
            sums = histogram.loaded(counts, amounts)
            sums_B = tl.where(weighed == 0, sums.counts, sums.amounts)
            place = histogram.reaching(sums_B, goal)
            goal -= above(sums_B, place)
            weight += above(sums.amounts, place)
        n, low, high = gathered(source, room, HistogramView(least, most, origin, scale), place, kept, width)
    if n <= TILE:
        pool = pooled(room, n)
        here = (bin_of(pool.x, HistogramView(least, most, origin, scale)) == place) & inside(pool.x, pool.ids, kept)
        amount = tl.where(here & (pool.x > -INFINITY), fixed(pool.x, top, t, unit), 0)
        kept = first(pool, tl.where(weighed == 0, here.to(tl.int64), amount), goal, top).kept
        weight += tl.sum(tl.where(inside(pool.x, pool.ids, kept), amount, 0), 0)
    else:
        cut = floating(low)
        each = fixed(cut, top, t, unit)
        need = tl.where(weighed == 0, goal, tl.where(each > 0, (goal + each - 1) // tl.maximum(each, 1), LAST))
        kept = KeptRange(cut, nth(source, room, cut, kept, need, width))
        weight += need * each
    return kept, weight


@jit
def gathered(source, room, view, place, kept, width: tl.constexpr):
    """The tokens of a bin that are left, as ``collect`` finds them: pooled, and counted by group."""
    n = tl.full((), 0, tl.int32)
    low, high = tl.full((), LAST, tl.int32), tl.full((), -LAST, tl.int32)
    tl.debug_barrier()  # others may still read the pool of the last cut
    for i in range(tl.cdiv(source.size, STEP)):
        ids = i * STEP + tl.arange(0, STEP)
        x = scores(source, ids)
        here = within(x, view) & (bin_of(x, view) == place) & inside(x, ids, kept)
        own_low, own_high = crowd_of(room, i, x, here, width)
        low, high = tl.minimum(low, own_low), tl.maximum(high, own_high)
        n += add(room, n, x, ids, here)
    tl.debug_barrier()
    return n, low, high


@jit
def nth(source, room, cut, kept, need, width: tl.constexpr):
    """The id of the n-th of equal tokens, which were counted by group; the last one if there are fewer."""
    group_G = tl.arange(0, width)
    there_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
    n_G = tl.load(room.groups + group_G, mask=there_G, other=0)
    need = tl.minimum(need, tl.sum(n_G, 0)).to(tl.int32)
    through_G = tl.cumsum(n_G, 0)
    group = tl.min(tl.where(through_G >= need, group_G, width), 0)
    need -= tl.sum(tl.where(group_G < group, n_G, 0), 0)
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    here = (scores(source, ids) == cut) & (ids <= kept.last)
    return tl.min(tl.where(tl.cumsum(here.to(tl.int32), 0) >= need, ids, LAST), 0)
