"""The second kernel: one program per row cuts, draws, and tells the log-probability and rank of the token drawn."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.cuts import Groups, narrow, read
from nucleate.backends.cuda.special.floats import INFINITY, LOWEST, exact, exponent_of, weights
from nucleate.backends.cuda.special.noise import GROUP, TOKEN, times
from nucleate.backends.cuda.special.pool import GROUPS, LAST, TILE, Kept, Room, everything_from, ids_of, inside, listed
from nucleate.backends.cuda.special.scores import Source, raw, scores
from nucleate.backends.cuda.special.stats import COLUMNS, GROUP_SIZE

DRAWN, ODD, EMPTY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What became of a row: it has a token; it holds NaN or +inf; it has no finite score."""


@jit
def finish(
    logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
    numbers: tl.tensor, seeds: tl.tensor, steps: tl.tensor, tops: tl.tensor, masses: tl.tensor, moments: tl.tensor,
    raw_tops: tl.tensor, raw_masses: tl.tensor, groups: tl.tensor, some: tl.tensor, some_ids: tl.tensor,
    some_weights: tl.tensor, tokens: tl.tensor, states: tl.tensor, cuts: tl.tensor, lasts: tl.tensor,
    logprobs: tl.tensor, ranks: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. The first arguments are as of ``stats``.

    seeds, steps: int64 [R]; the steps of rows that were drawn move on. masses is written to. groups: int32 [R, width];
    some, some_ids, some_weights: float32, int32, float64 [R, 2048]: room. tokens: int64 [R], -1 where none is drawn;
    states: int32 [R]. cuts, lasts: float32, int32 [R], see ``pool.Kept``. logprobs, ranks: float64, int32 [R], of the
    logits as given; or None.
    """
    row = tl.program_id(0).to(tl.int64)
    if mask is not None:
        mask += row * mask_stride
    if words is not None:
        words += row * words_stride
        entries += row * entries_stride
    source = Source(logits + row * row_stride, stride, size, mask, words, entries)
    room = Room(groups + row * width, some + row * TILE, some_ids + row * TILE, some_weights + row * TILE)
    group_G = tl.arange(0, width)
    there_G = group_G < tl.cdiv(size, GROUP_SIZE)
    tops_G = tl.load(tops + row * width + group_G, mask=there_G, other=-INFINITY)
    top, token = tl.max(tops_G, 0), tl.full((), -1, tl.int32)
    top = tl.where(top == 0.0, 0.0, top)  # of -0.0 it makes 0.0: they are equal
    state = tl.where(top == INFINITY, ODD, tl.where(top == -INFINITY, EMPTY, DRAWN))
    if state == DRAWN:
        masses += row * width
        masses_G = tl.load(masses + group_G, mask=there_G, other=0.0)
        seed, step = tl.load(seeds + row), tl.load(steps + row)
        told = Groups(tops_G, masses_G, moments + 3 * row * width)
        token, kept = draw(source, room, told, masses, top, numbers + row * COLUMNS, seed, step, width)
        tl.debug_barrier()  # all have read the step
        tl.store(steps + row, step + 1)
        tl.store(cuts + row, kept.cut)
        tl.store(lasts + row, kept.last)
        if logprobs is not None:
            raw_G = tl.load(raw_tops + row * width + group_G, mask=there_G, other=-INFINITY)
            mass_G = tl.load(raw_masses + row * width + group_G, mask=there_G, other=0.0)
            logprob, rank = report(source, room, raw_G, mass_G, token, width)
            tl.store(logprobs + row, logprob)
            tl.store(ranks + row, rank)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(states + row, state)


@jit
def draw(
    source: tl.tensor, room: tl.tensor, told: tl.tensor, masses: tl.tensor, top: tl.tensor, at: tl.tensor,
    seed: tl.tensor, step: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """The token drawn, int32, and what was left.

    masses: the address of those of the row, which is written to. at: that of its numbers.
    """
    numbers = read(at)
    t = numbers.t * numbers.late_t
    kept = everything_from(top * 0.0 + LOWEST)
    if numbers.k == 1.0:
        group = tl.argmax(told.tops, 0)
        kept = Kept(top, first_at(source, group, top))
        t = numbers.t
    else:
        cuts = (numbers.sigmas > 0.0) | (numbers.k > 0.0) | (numbers.m > 0.0) | (numbers.p < 1.0)
        weight_G = told.masses.to(tl.float64) * scaled(told.tops, top, tl.where(numbers.p < 1.0, numbers.t, t))
        if cuts | (numbers.late_m > 0.0):
            kept = narrow(source, room, Groups(told.tops, weight_G, told.moments), top, numbers, width)
            weight_G = weighed(source, room, told.tops, masses, kept, top, t, width).to(tl.float64)
        time_G = times(seed, step, GROUP, tl.arange(0, width)) / tl.where(weight_G > 0.0, weight_G, 1.0)
        group = tl.argmin(tl.where(weight_G > 0.0, time_G, INFINITY), 0)
    return winner(source, group, kept, top, t, seed, step), kept


@jit
def scaled(tops_G: tl.tensor, top: tl.tensor, t: tl.tensor) -> Any:
    """What the mass of a group is multiplied by, so that it is told from the top of the row."""
    return exact(tl.where(tops_G > -INFINITY, tops_G, top), top, t)


@jit
def first_at(source: tl.tensor, group: tl.tensor, top: tl.tensor) -> Any:
    """The lowest id of a group that has a score."""
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    return tl.min(tl.where(scores(source, ids) == top, ids, LAST), 0)


@jit
def weighed(
    source: tl.tensor, room: tl.tensor, tops_G: tl.tensor, masses: tl.tensor, kept: tl.tensor, top: tl.tensor,
    t: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """The mass of what is left of each group: float32 [width]. masses: where it is told on the way."""
    exponent, found = exponent_of(t), listed(tops_G, kept.cut, room, width)
    tl.store(masses + tl.arange(0, width), tl.zeros((width,), tl.float32))
    tl.debug_barrier()
    for i in range(tl.cdiv(found, GROUPS)):
        ids = ids_of(room, found, i)
        x = scores(source, ids)
        weight = tl.where(inside(x, ids, kept), weights(x - top, exponent), 0.0)
        mass = tl.sum(tl.reshape(weight, (GROUPS, GROUP_SIZE)), 1)
        slot = i * GROUPS + tl.arange(0, GROUPS)
        group = tl.load(room.groups + slot, mask=slot < found, other=0)
        tl.store(masses + group, mass, mask=slot < found)
    tl.debug_barrier()
    return tl.load(masses + tl.arange(0, width))


@jit
def winner(
    source: tl.tensor, group: tl.tensor, kept: tl.tensor, top: tl.tensor, t: tl.tensor, seed: tl.tensor,
    step: tl.tensor,
) -> Any:  # fmt: skip
    """The token that wins, of those of a group that are left."""
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    x = scores(source, ids)
    weight = tl.where(inside(x, ids, kept), exact(x, top, t), 0.0)
    time = times(seed, step, TOKEN, ids) / tl.where(weight > 0.0, weight, 1.0)
    return group * GROUP_SIZE + tl.argmin(tl.where(weight > 0.0, time, INFINITY), 0)


@jit
def report(
    source: tl.tensor, room: tl.tensor, tops_G: tl.tensor, masses_G: tl.tensor, token: tl.tensor, width: tl.constexpr,
) -> Any:  # fmt: skip
    """The log-probability of a token by the logits as given, and 1 + how many tokens come before it."""
    top, x = tl.max(tops_G, 0), raw(source, token)
    one = tl.full((), 1.0, tl.float64)
    mass = tl.sum(masses_G.to(tl.float64) * scaled(tops_G, top, one), 0)
    rank, found = tl.full((), 1, tl.int32), listed(tops_G, x, room, width)
    for i in range(tl.cdiv(found, GROUPS)):
        ids = ids_of(room, found, i)
        other = raw(source, ids)
        rank += tl.sum(((other > x) | ((other == x) & (ids < token))).to(tl.int32), 0)
    return x.to(tl.float64) - top.to(tl.float64) - tl.log(mass), rank
