"""The kernels that end a row: one program cuts, draws, and reports the token's log-probability and rank.

``finish`` ends all rows but those with too many candidates, which wait for ``select``; ``resume`` ends these.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.cuts import Groups, late
from nucleate.backends.cuda.special.floats import INFINITY, LOWEST, exact
from nucleate.backends.cuda.special.histogram import BINS
from nucleate.backends.cuda.special.narrow import narrow
from nucleate.backends.cuda.special.numbers import COLUMNS, read, weighing
from nucleate.backends.cuda.special.pool import GROUPS, LAST, TILE, Kept, Room, ids_of, listed
from nucleate.backends.cuda.special.race import race, token_of
from nucleate.backends.cuda.special.scores import raw, scores, source_of
from nucleate.backends.cuda.special.select import FLAGS, PENDING, UNIT, VIEW, settle, view_of
from nucleate.backends.cuda.special.stats import GROUP_SIZE

DRAWN, ODD, EMPTY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The state of a row: it has a token; it holds NaN or +inf; it has no finite score."""


@jit
def finish(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, seeds: tl.tensor, steps: tl.tensor, tops: tl.tensor, masses: tl.tensor, moments: tl.tensor,
    raw_tops: tl.tensor, raw_masses: tl.tensor, flags: tl.tensor, views: tl.tensor, counts: tl.tensor,
    amounts: tl.tensor, groups: tl.tensor, some: tl.tensor, some_ids: tl.tensor, tokens: tl.tensor, states: tl.tensor,
    cuts: tl.tensor, lasts: tl.tensor, logprobs: tl.tensor, ranks: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. The first arguments are as of ``stats``.

    seeds, steps: int64 [R]; the steps of rows that were drawn move on. flags, views, counts, amounts: see ``select``.
    groups: int32 [R, width]; some, some_ids: float32, int32 [R, TILE]: see ``pool.Room``. tokens: int64 [R], -1 where
    none is drawn; states: int32 [R]. cuts, lasts: float32, int32 [R], see ``pool.Kept``. logprobs, ranks: float64,
    int32 [R], of the logits as given; or None.
    """
    row = tl.program_id(0).to(tl.int64)
    flags = flags + row * FLAGS
    source = source_of(
        row, logits, row_stride, stride, size, mask, mask_stride, words, words_stride, entries, entries_stride
    )
    room = Room(groups + row * width, some + row * TILE, some_ids + row * TILE)
    group_G = tl.arange(0, width)
    tops_G = tl.load(tops + row * width + group_G, mask=group_G < tl.cdiv(size, GROUP_SIZE), other=-INFINITY)
    top = tl.max(tops_G, 0)
    top = tl.where(top == 0.0, 0.0, top)  # of -0.0 it makes 0.0: they are equal
    state = tl.where(top == INFINITY, ODD, tl.where(top == -INFINITY, EMPTY, DRAWN))
    waits = tl.full((), 0, tl.int32)
    if state == DRAWN:
        given, token = read(numbers + row * COLUMNS), tl.full((), LAST, tl.int32)
        known = known_of(tops_G, top, given, masses + row * width, moments + 3 * row * width, width)
        kept = Kept(top * 0.0 + LOWEST, token)
        if given.k == 1.0:
            ids = tl.argmax(tops_G, 0) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
            token = tl.min(tl.where(scores(source, ids) == top, ids, LAST), 0)
            kept = Kept(top, token)
        else:
            kept, waits = narrow(
                source, room, known, top, given, flags, views + row * VIEW, counts + row * 2 * BINS,
                amounts + row * 2 * BINS, width,
            )  # fmt: skip
        if waits == 0:
            end(
                source, room, known, kept, top, given, token, seeds, steps, raw_tops, raw_masses, tokens, cuts, lasts,
                logprobs, ranks, row, width,
            )  # fmt: skip
    else:
        tl.store(tokens + row, tl.full((), -1, tl.int64))
    tl.store(flags + PENDING, waits)
    tl.store(states + row, state)


@jit
def resume(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, seeds: tl.tensor, steps: tl.tensor, tops: tl.tensor, masses: tl.tensor, moments: tl.tensor,
    raw_tops: tl.tensor, raw_masses: tl.tensor, flags: tl.tensor, views: tl.tensor, counts: tl.tensor,
    amounts: tl.tensor, groups: tl.tensor, some: tl.tensor, some_ids: tl.tensor, tokens: tl.tensor, states: tl.tensor,
    cuts: tl.tensor, lasts: tl.tensor, logprobs: tl.tensor, ranks: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """The same for rows that waited."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flags + row * FLAGS + PENDING) != 0:
        source = source_of(
            row, logits, row_stride, stride, size, mask, mask_stride, words, words_stride, entries, entries_stride
        )
        room = Room(groups + row * width, some + row * TILE, some_ids + row * TILE)
        given, view = read(numbers + row * COLUMNS), view_of(views + row * VIEW)
        kept = settle(
            source, room, flags + row * FLAGS, counts + row * 2 * BINS, amounts + row * 2 * BINS, view, given,
            tl.load(views + row * VIEW + UNIT), width,
        )  # fmt: skip
        group_G, top = tl.arange(0, width), view.most
        tops_G = tl.load(tops + row * width + group_G, mask=group_G < tl.cdiv(size, GROUP_SIZE), other=-INFINITY)
        known = known_of(tops_G, top, given, masses + row * width, moments + 3 * row * width, width)
        end(
            source, room, known, kept, top, given, kept.last, seeds, steps, raw_tops, raw_masses, tokens, cuts, lasts,
            logprobs, ranks, row, width,
        )  # fmt: skip


@jit
def known_of(
    tops_G: tl.tensor, top: tl.tensor, numbers: tl.tensor, masses: tl.tensor, moments: tl.tensor, width: tl.constexpr
) -> Any:
    own_G = tl.load(masses + tl.arange(0, width), mask=tops_G > -INFINITY, other=0.0).to(tl.float64)
    return Groups(tops_G, own_G, own_G * relative(tops_G, top, weighing(numbers)), moments)


@jit
def end(
    source: tl.tensor, room: tl.tensor, known: tl.tensor, kept: tl.tensor, top: tl.tensor, numbers: tl.tensor,
    token: tl.tensor, seeds: tl.tensor, steps: tl.tensor, raw_tops: tl.tensor, raw_masses: tl.tensor,
    tokens: tl.tensor, cuts: tl.tensor, lasts: tl.tensor, logprobs: tl.tensor, ranks: tl.tensor, row: tl.tensor,
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Draw from what the cuts left, or take the token of a greedy row, and store the results."""
    step = tl.load(steps + row)
    if numbers.k != 1.0:
        seed, kept = tl.load(seeds + row), late(kept, top, numbers)
        group = race(source, room, known, kept, top, numbers, seed, step, width)
        token = token_of(source, group, kept, top, numbers, seed, step)
    tl.debug_barrier()  # all have read the step
    tl.store(steps + row, step + 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(cuts + row, kept.cut)
    tl.store(lasts + row, kept.last)
    if logprobs is not None:
        group_G = tl.arange(0, width)
        there_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
        raw_G = tl.load(raw_tops + row * width + group_G, mask=there_G, other=-INFINITY)
        mass_G = tl.load(raw_masses + row * width + group_G, mask=there_G, other=0.0)
        logprob, rank = report(source, room, raw_G, mass_G, token, width)
        tl.store(logprobs + row, logprob)
        tl.store(ranks + row, rank)


@jit
def relative(tops_G: tl.tensor, top: tl.tensor, t: tl.tensor) -> Any:
    """What the mass of a group is multiplied by, so that it counts from the top of the row."""
    return exact(tl.where(tops_G > -INFINITY, tops_G, top), top, t)


@jit
def report(
    source: tl.tensor, room: tl.tensor, tops_G: tl.tensor, masses_G: tl.tensor, token: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """The log-probability of a token by the logits as given, and 1 + how many tokens come before it."""
    top, x = tl.max(tops_G, 0), raw(source, token)
    one = tl.full((), 1.0, tl.float64)
    mass = tl.sum(masses_G.to(tl.float64) * relative(tops_G, top, one), 0)
    rank, found = tl.full((), 1, tl.int32), listed(tops_G >= x, room, width)
    for i in range(tl.cdiv(found, GROUPS)):
        ids = ids_of(room, found, i)
        other = raw(source, ids)
        rank += tl.sum(((other > x) | ((other == x) & (ids < token))).to(tl.int32), 0)
    return x.to(tl.float64) - top.to(tl.float64) - tl.log(mass), rank
