"""Two kernels for rows of which too many tokens are candidates: a histogram by several programs, then the pool.

``tally`` reads the row once, and its histogram says in which bin each cut falls. ``collect`` reads it once more: it
pools the tokens of these bins, or, if they are too many, counts them by group and finds the lowest and the highest, as
many candidates in one bin are nearly always equal. Rows that do not wait for this cost nothing but the launches.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special import histogram
from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY, fixed, floating, ordered
from nucleate.backends.cuda.special.histogram import BINS, View, above, at, bin_of, choose, chosen, count, within
from nucleate.backends.cuda.special.numbers import COLUMNS, read
from nucleate.backends.cuda.special.pool import GROUPS, LAST, TILE, Kept, Room, add, first, inside
from nucleate.backends.cuda.special.pool import loaded as pooled
from nucleate.backends.cuda.special.scores import scores, source_of
from nucleate.backends.cuda.special.stats import GROUP_SIZE

PENDING, PLACED, LOW, HIGH, FLAGS = (tl.constexpr(place) for place in range(5))
"""int32 of a row: whether it waits; tokens pooled; the lowest and the highest candidate, as ``floats.ordered``."""
ORIGIN, SCALE, UNIT, LEAST, TOP, VIEW = (tl.constexpr(place) for place in range(6))
"""float64 of a row: see ``histogram.View``, whose ``most`` is TOP; UNIT is what a weight of 1 becomes."""

STEP = tl.constexpr(1024)
"""Tokens that ``settle`` reads at a time, whose program has registers for no more."""


@jit
def tally(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, tops: tl.tensor, flags: tl.tensor, views: tl.tensor, counts: tl.tensor, amounts: tl.tensor,
    tiles: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: parts of ``tiles`` tiles of 2048 tokens; rows. The first arguments are as of ``stats``.

    flags: int32 [R, FLAGS]. views: float64 [R, VIEW]. counts, amounts: int32, int64 [R, 2, BINS], the first ones zero
    where a row waits.
    """
    row = tl.program_id(1).to(tl.int64)
    if tl.load(flags + row * FLAGS + PENDING) != 0:
        source = source_of(
            row, logits, row_stride, stride, size, mask, mask_stride, words, words_stride, entries, entries_stride
        )
        view, unit, t = view_of(views + row * VIEW), tl.load(views + row * VIEW + UNIT), read(numbers + row * COLUMNS).t
        for i in range(tiles):
            place = tl.program_id(0) * tiles + i
            if reached(tops + row * width, place, view.least, size):
                ids = place * TILE + tl.arange(0, TILE)
                x = scores(source, ids)
                count(counts + row * 2 * BINS, amounts + row * 2 * BINS, x, within(x, view), view, view.most, t, unit)


@jit
def collect(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, tops: tl.tensor, flags: tl.tensor, views: tl.tensor, counts: tl.tensor, amounts: tl.tensor,
    groups: tl.tensor, some: tl.tensor, some_ids: tl.tensor, tiles: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid and arguments are those of ``tally``; groups, some, some_ids: see ``pool.Room``."""
    row = tl.program_id(1).to(tl.int64)
    flags += row * FLAGS
    if tl.load(flags + PENDING) != 0:
        source = source_of(
            row, logits, row_stride, stride, size, mask, mask_stride, words, words_stride, entries, entries_stride
        )
        room = Room(groups + row * width, some + row * TILE, some_ids + row * TILE)
        view = view_of(views + row * VIEW)
        sums = histogram.loaded(counts + row * 2 * BINS, amounts + row * 2 * BINS)
        choice = choose(sums, read(numbers + row * COLUMNS))
        crowded = tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin)
        for i in range(tiles):
            place = tl.program_id(0) * tiles + i
            if reached(tops + row * width, place, view.least, size):
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
def view_of(view: tl.tensor) -> Any:
    least, top = tl.load(view + LEAST).to(tl.float32), tl.load(view + TOP).to(tl.float32)
    return View(least, top, tl.load(view + ORIGIN), tl.load(view + SCALE))


@jit
def reached(tops: tl.tensor, place: tl.tensor, least: tl.tensor, size: tl.tensor) -> Any:
    """Whether a group of a tile has tokens that are in."""
    group_G = place * GROUPS + tl.arange(0, GROUPS)
    there_G = group_G < tl.cdiv(size, GROUP_SIZE)
    return tl.max(tl.load(tops + group_G, mask=there_G, other=-INFINITY), 0) >= least


@jit
def crowd_of(room: tl.tensor, place: tl.tensor, x: tl.tensor, here: tl.tensor, width: tl.constexpr) -> Any:
    """Count the chosen tokens of a tile by group; returns the lowest and the highest score, as ``floats.ordered``."""
    groups: tl.constexpr = x.shape[0] // GROUP_SIZE
    n_G = tl.sum(tl.reshape(here.to(tl.int32), (groups, GROUP_SIZE)), 1)
    group_G = place * groups + tl.arange(0, groups)
    tl.store(room.groups + group_G, n_G, mask=group_G < width)
    key = ordered(tl.where(x == 0.0, 0.0, x)).to(tl.int32)
    return tl.min(tl.where(here, key, LAST), 0), tl.max(tl.where(here, key, -LAST), 0)


@jit
def settle(
    source: tl.tensor, room: tl.tensor, flags: tl.tensor, counts: tl.tensor, amounts: tl.tensor, view: tl.tensor,
    numbers: tl.tensor, unit: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """What top-k and top-p leave of a row after both kernels."""
    sums = histogram.loaded(counts, amounts)
    kept, total = Kept(view.least, tl.full((), LAST, tl.int32)), tl.sum(sums.amounts, 0)
    choice = choose(sums, numbers)
    crowd = at(sums.counts, tl.where(choice.k_bin < 0, choice.p_first, choice.k_bin))  # what ``collect`` counted
    for weighed in range(2):  # top-k counts tokens, top-p weighs them
        if tl.where(weighed == 0, choice.k_bin >= 0, numbers.p < 1.0):
            sums = histogram.loaded(counts, amounts)
            sums_B = tl.where(weighed == 0, sums.counts, sums.amounts)
            goal = tl.where(weighed == 0, numbers.k.to(tl.int64), histogram.part(numbers.p, total))
            place = tl.maximum(histogram.reaching(sums_B, goal), choice.k_bin)
            total, goal = above(sums.amounts, place), goal - above(sums_B, place)
            kept, weight = cut_in(
                source, room, flags, counts + BINS, amounts + BINS, choice.n <= TILE, crowd > TILE, view, place, goal,
                kept, numbers.t, unit, weighed, width,
            )  # fmt: skip
            total, crowd = total + weight, crowd * 0
    return kept


@jit
def cut_in(
    source: tl.tensor, room: tl.tensor, flags: tl.tensor, counts: tl.tensor, amounts: tl.tensor, pools: tl.tensor,
    crowds: tl.tensor, view: tl.tensor, place: tl.tensor, goal: tl.tensor, kept: tl.tensor, t: tl.tensor,
    unit: tl.tensor, weighed: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """The cut at which the tokens of a bin that are left reach a goal, and the weight of those up to it.

    pools, crowds: whether ``collect`` pooled the tokens of the bin, or counted them by group. As long as a bin holds
    more than fit the pool, which are not all equal, it is divided once more: two reads each time, hardly ever.
    counts, amounts: scratch for this.
    """
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
        n, low, high = gathered(source, room, View(least, most, origin, scale), place, kept, width)
    if n <= TILE:
        pool = pooled(room, n)
        here = (bin_of(pool.x, View(least, most, origin, scale)) == place) & inside(pool.x, pool.ids, kept)
        amount = tl.where(here & (pool.x > -INFINITY), fixed(pool.x, top, t, unit), 0)
        kept = first(pool, tl.where(weighed == 0, here.to(tl.int64), amount), goal, top).kept
        weight += tl.sum(tl.where(inside(pool.x, pool.ids, kept), amount, 0), 0)
    else:
        cut = floating(low)
        each = fixed(cut, top, t, unit)
        need = tl.where(weighed == 0, goal, tl.where(each > 0, (goal + each - 1) // tl.maximum(each, 1), LAST))
        kept = Kept(cut, nth(source, room, cut, kept, need, width))
        weight += need * each
    return kept, weight


@jit
def gathered(
    source: tl.tensor, room: tl.tensor, view: tl.tensor, place: tl.tensor, kept: tl.tensor, width: tl.constexpr
) -> Any:
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
def nth(
    source: tl.tensor, room: tl.tensor, cut: tl.tensor, kept: tl.tensor, need: tl.tensor, width: tl.constexpr
) -> Any:
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
