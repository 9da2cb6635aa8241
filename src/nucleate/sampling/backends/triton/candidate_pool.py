"""A pool of at most 2048 candidate tokens per row, and exact selection in it.

Amounts of tokens are integers (1 to count, a fixed-point weight for a mass), so that sums do not depend on any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.device_memory import scores
from nucleate.sampling.backends.triton.float_bits import INFINITY, floating, ordered

TILE = tl.constexpr(2048)
"""Tokens of a pool at most; also how many a program reads at a time."""
GROUPS = tl.constexpr(8)
"""Groups of a tile."""
LAST = tl.constexpr(0x7FFFFFFF)
"""Above every token id."""


class PoolScratch(NamedTuple):
    """Scratch memory of rows: addresses."""

    groups: Any  #: int32 [width]: a list of groups, or the ties of each group
    x: Any  #: float32 [TILE]: the scores of the pool
    ids: Any  #: int32 [TILE]: its token ids


@jit
def room_of(room, row, width: tl.constexpr):
    """The same with the addresses of a row."""
    return PoolScratch(room.groups + row * width, room.x + row * TILE, room.ids + row * TILE)


class KeptRange(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    cut: Any  #: float32
    last: Any  #: int32


class CandidatePool(NamedTuple):
    """Candidate tokens in registers, in any order; behind the last one scores are -inf."""

    x: Any
    ids: Any


class PrefixFound(NamedTuple):
    """A prefix of the order whose amounts reach a goal."""

    kept: Any
    before: Any  #: int64: what all but its last token amount to
    through: Any  #: int64: what all of them do


@jit
def inside(x, ids, kept):
    return (x > kept.cut) | ((x == kept.cut) & (ids <= kept.last))


@jit
def listed(chosen_G, room, width: tl.constexpr):
    """List the chosen groups in ascending order; returns how many there are."""
    place_G = tl.cumsum(chosen_G.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads may still read the last list
    tl.store(room.groups + place_G, tl.arange(0, width), mask=chosen_G)
    tl.debug_barrier()
    return tl.sum(chosen_G.to(tl.int32), 0)


@jit
def ids_of(room, groups, i):
    """The token ids of a tile of the listed groups; behind the last group ``LAST``."""
    place = i * TILE + tl.arange(0, TILE)
    slot = place // GROUP_SIZE
    group = tl.load(room.groups + slot, mask=slot < groups, other=0)
    return tl.where(slot < groups, group * GROUP_SIZE + place % GROUP_SIZE, LAST)


@jit
def add(room, base, x, ids, chosen):
    """Put the chosen tokens of a tile into the pool, from a place on; returns how many there are."""
    place = base + tl.cumsum(chosen.to(tl.int32), 0) - 1
    here = chosen & (place < TILE)
    tl.store(room.x + place, x, mask=here)
    tl.store(room.ids + place, ids, mask=here)
    return tl.sum(chosen.to(tl.int32), 0)


@jit
def gather(source, room, groups, cut):
    """Pool the tokens at or above a score, of the listed groups; returns how many there are, if not too many."""
    n, i = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (i * GROUPS < groups) & (n <= TILE):
        ids = ids_of(room, groups, i)
        x = scores(source, ids)
        n += add(room, n, x, ids, x >= cut)
        i += 1
    tl.debug_barrier()
    return n


@jit
def loaded(room, n):
    place = tl.arange(0, TILE)
    x = tl.load(room.x + place, mask=place < n, other=-INFINITY)
    return CandidatePool(x, tl.load(room.ids + place, mask=place < n, other=LAST))


@jit
def first(pool, amounts, goal, top):
    """The fewest first tokens whose amounts reach a goal above 0: bisects the scores, then the ids of equal ones.

    amounts: int64, 0 for tokens not in question; all together reach the goal. top: at or above every score.
    """
    above = tl.full((), 0, tl.int64)
    low, high = ordered(tl.min(tl.where(amounts > 0, pool.x, top), 0)), ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        amount = tl.sum(tl.where(pool.x >= floating(middle), amounts, 0), 0)
        enough = amount >= goal
        above = tl.where(enough, above, amount)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    cut = floating(low)
    equal = (pool.x == cut) & (amounts > 0)
    ties = tl.where(equal, amounts, 0)
    low_id = tl.min(tl.where(equal, pool.ids, LAST), 0)
    last = tl.max(tl.where(equal, pool.ids, 0), 0)
    while low_id < last:
        middle_id = (low_id + last) >> 1
        enough = above + tl.sum(tl.where(pool.ids <= middle_id, ties, 0), 0) >= goal
        low_id, last = tl.where(enough, low_id, middle_id + 1), tl.where(enough, middle_id, last)
    through = above + tl.sum(tl.where(pool.ids <= last, ties, 0), 0)
    return PrefixFound(KeptRange(cut, last), through - tl.max(ties, 0), through)
