"""The kernels that end a row: one program cuts, draws, and reports the token's log-probability and rank.

``finish`` ends all rows but those with too many candidates, which wait for ``select``; ``resume`` ends these.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_cuts import GroupStats, late, narrow
from nucleate.sampling.backends.triton.candidate_pool import GROUPS, LAST, KeptRange, ids_of, listed, room_of
from nucleate.sampling.backends.triton.device_memory import (
    SEED,
    STEP,
    line_of,
    push,
    raw,
    read,
    scores,
    source_of,
    weighing,
)
from nucleate.sampling.backends.triton.float_bits import INFINITY, LOWEST, exact
from nucleate.sampling.backends.triton.gumbel_race import race, token_of
from nucleate.sampling.backends.triton.histogram_selection import PENDING, UNIT, settle, view_of, waiting_of

DRAWN, ODD, EMPTY, INACTIVE = (tl.constexpr(kind) for kind in range(4))
"""What became of a row: it has a token; it holds NaN or +inf; it has no finite score; it was not to be drawn."""


@jit
def finish(source, state, sums, waiting, room, out, width: tl.constexpr):
    """Grid: rows. See ``memory`` for the arguments; room: see ``candidate_pool.Room``."""
    row = tl.program_id(0).to(tl.int64)
    source, waiting, room = source_of(source, row), waiting_of(waiting, row), room_of(room, row, width)
    group_G = tl.arange(0, width)
    tops_G = tl.load(
        sums.tops + row * width + group_G, mask=group_G < tl.cdiv(source.size, GROUP_SIZE), other=-INFINITY
    )
    top = tl.max(tops_G, 0)
    top = tl.where(top == 0.0, 0.0, top)  # of -0.0 it makes 0.0: they are equal
    kind = tl.where(top == INFINITY, ODD, tl.where(top == -INFINITY, EMPTY, DRAWN))
    if state.active is not None:
        kind = tl.where(tl.load(state.active + row), kind, INACTIVE)
    waits = tl.full((), 0, tl.int32)
    if kind == DRAWN:
        given, token = read(line_of(state, row)), tl.full((), LAST, tl.int32)
        known = known_of(sums, tops_G, top, given, row, width)
        kept = KeptRange(top * 0.0 + LOWEST, token)
        if given.k == 1.0:
            ids = tl.argmax(tops_G, 0) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
            token = tl.min(tl.where(scores(source, ids) == top, ids, LAST), 0)
            kept = KeptRange(top, token)
        else:
            kept, waits = narrow(source, room, known, top, given, waiting, width)
        if waits == 0:
            end(source, state, room, sums, known, kept, top, given, token, out, row, width)
    else:
        tl.store(out.tokens + row, tl.full((), -1, tl.int64))
    tl.store(waiting.flags + PENDING, waits)
    tl.store(out.states + row, kind)


@jit
def resume(source, state, sums, waiting, room, out, width: tl.constexpr):
    """The same for rows that waited."""
    row = tl.program_id(0).to(tl.int64)
    source, waiting, room = source_of(source, row), waiting_of(waiting, row), room_of(room, row, width)
    if tl.load(waiting.flags + PENDING) != 0:
        given, view = read(line_of(state, row)), view_of(waiting.views)
        kept = settle(source, room, waiting, view, given, tl.load(waiting.views + UNIT), width)
        group_G, top = tl.arange(0, width), view.most
        there_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
        tops_G = tl.load(sums.tops + row * width + group_G, mask=there_G, other=-INFINITY)
        known = known_of(sums, tops_G, top, given, row, width)
        end(source, state, room, sums, known, kept, top, given, kept.last, out, row, width)


@jit
def known_of(sums, tops_G, top, numbers, row, width: tl.constexpr):
    own_G = tl.load(sums.masses + row * width + tl.arange(0, width), mask=tops_G > -INFINITY, other=0.0).to(tl.float64)
    moments = sums.moments + 3 * row * width
    return GroupStats(tops_G, own_G, own_G * relative(tops_G, top, weighing(numbers)), moments)


@jit
def end(source, state, room, sums, known, kept, top, numbers, token, out, row, width: tl.constexpr):
    """Draw from what the cuts left, or take the token of a greedy row, and store the results."""
    line = line_of(state, row)
    if numbers.k != 1.0:
        seed, step, kept = tl.load(line + SEED), tl.load(line + STEP), late(kept, top, numbers)
        group = race(source, room, known, kept, top, numbers, seed, step, width)
        token = token_of(source, group, kept, top, numbers, seed, step)
    push(state, row, token)
    tl.store(out.tokens + row, token.to(tl.int64))
    tl.store(out.cuts + row, kept.cut)
    tl.store(out.lasts + row, kept.last)
    if out.logprobs is not None:
        group_G = tl.arange(0, width)
        there_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
        raw_G = tl.load(sums.raw_tops + row * width + group_G, mask=there_G, other=-INFINITY)
        mass_G = tl.load(sums.raw_masses + row * width + group_G, mask=there_G, other=0.0)
        logprob, rank = report(source, room, raw_G, mass_G, token, width)
        tl.store(out.logprobs + row, logprob)
        tl.store(out.ranks + row, rank)


@jit
def relative(tops_G, top, t):
    """What the mass of a group is multiplied by, so that it counts from the top of the row."""
    return exact(tl.where(tops_G > -INFINITY, tops_G, top), top, t)


@jit
def report(source, room, tops_G, masses_G, token, width: tl.constexpr):
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
