"""The tokens of a row that are in question, a tile of 2048 at a time, and what is counted and weighed of them.

They are those of some groups, listed; where they are few they are gathered, with exact weights, so that looking at all
of them once more costs next to nothing. Knows no stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY, exact, floating, ordered, weights
from nucleate.backends.cuda.special.scores import scores
from nucleate.backends.cuda.special.stats import GROUP_SIZE

TILE = tl.constexpr(2048)
GROUPS = tl.constexpr(8)
"""A tile is so many groups."""
LAST = tl.constexpr(0x7FFFFFFF)
"""No id is above it, and none is it."""


class Room(NamedTuple):
    """Where kernels keep what they find of a row: addresses."""

    groups: Any  #: int32 [width]: those in question
    x: Any  #: float32 [TILE], as the next two: the tokens gathered, in ascending ids
    ids: Any  #: int32
    weights: Any  #: float64


class Pool(NamedTuple):
    """What is in question."""

    top: Any  #: float32: the highest score
    t: Any  #: float64
    exponent: Any
    groups: Any  #: how many are listed
    few: Any  #: whether the tokens are gathered
    n: Any  #: how many


class Kept(NamedTuple):
    """The tokens that are left: those above a score, and those at it with an id up to ``last``."""

    cut: Any  #: float32
    last: Any  #: int32


@jit
def inside(x: tl.tensor, ids: tl.tensor, kept: tl.tensor) -> Any:
    return (x > kept.cut) | ((x == kept.cut) & (ids <= kept.last))


@jit
def everything_from(cut: tl.tensor) -> Any:
    """What is at or above a score."""
    return Kept(cut, tl.full((), LAST, tl.int32))


@jit
def listed(tops_G: tl.tensor, cut: tl.tensor, room: tl.tensor, width: tl.constexpr) -> Any:
    """List the groups that reach a cut; returns how many there are."""
    chosen_G = (tops_G >= cut).to(tl.int32)
    place_G = tl.cumsum(chosen_G, 0) - 1
    tl.debug_barrier()  # others may still read the last list
    tl.store(room.groups + place_G, tl.arange(0, width), mask=chosen_G != 0)
    tl.debug_barrier()
    return tl.sum(chosen_G, 0)


@jit
def ids_of(room: tl.tensor, groups: tl.tensor, i: tl.tensor) -> Any:
    """The token ids of a tile of the groups listed; what is behind them gets one that no row has."""
    place = i * TILE + tl.arange(0, TILE)
    slot = place // GROUP_SIZE
    group = tl.load(room.groups + slot, mask=slot < groups, other=0)
    return tl.where(slot < groups, group * GROUP_SIZE + place % GROUP_SIZE, LAST)


@jit
def gather(
    source: tl.tensor, room: tl.tensor, groups: tl.tensor, cut: tl.tensor, top: tl.tensor, t: tl.tensor,
    weighed: tl.tensor,
) -> Any:  # fmt: skip
    """Gather the tokens at or above a cut, if they are at most a tile; returns how many there are."""
    n = tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(groups, GROUPS)):
        ids = ids_of(room, groups, i)
        x = scores(source, ids)
        found = (x >= cut).to(tl.int32)
        place = n + tl.cumsum(found, 0) - 1
        here = (found != 0) & (place < TILE)
        tl.store(room.x + place, x, mask=here)
        tl.store(room.ids + place, ids, mask=here)
        n += tl.sum(found, 0)
    tl.debug_barrier()
    if weighed & (n <= TILE):
        place = tl.arange(0, TILE)
        x = tl.load(room.x + place, mask=place < n, other=-INFINITY)
        tl.store(room.weights + place, exact(x, top, t), mask=place < n)
        tl.debug_barrier()
    return n


@jit
def tile(source: tl.tensor, room: tl.tensor, pool: tl.tensor, i: tl.tensor, weighed: tl.constexpr) -> Any:
    """(scores, ids, weights) of a tile; with ``weighed`` off, each token weighs 1."""
    if pool.few:
        place = tl.arange(0, TILE)
        x = tl.load(room.x + place, mask=place < pool.n, other=-INFINITY)
        ids = tl.load(room.ids + place, mask=place < pool.n, other=LAST)
        weight = tl.load(room.weights + place, mask=(place < pool.n) & weighed, other=1.0)
    else:
        ids = ids_of(room, pool.groups, i)
        x = scores(source, ids)
        weight = tl.full((TILE,), 1.0, tl.float64)
        if weighed:
            weight = weights(x - pool.top, pool.exponent).to(tl.float64)
    return x, ids, weight


@jit
def tiles(pool: tl.tensor) -> Any:
    return tl.where(pool.few, 1, tl.cdiv(pool.groups, GROUPS))


@jit
def reach(
    source: tl.tensor, room: tl.tensor, pool: tl.tensor, kept: tl.tensor, level: tl.tensor, weighed: tl.constexpr,
) -> Any:  # fmt: skip
    """What the tokens that are left weigh, or how many there are, at or above a score: float64."""
    total = tl.full((), 0.0, tl.float64)
    for i in range(tiles(pool)):
        x, ids, weight = tile(source, room, pool, i, weighed)
        total += tl.sum(tl.where(inside(x, ids, kept) & (x >= level), weight, 0.0), 0)
    return total


@jit
def equals(
    source: tl.tensor, room: tl.tensor, pool: tl.tensor, kept: tl.tensor, level: tl.tensor, upto: tl.tensor,
) -> Any:  # fmt: skip
    """How many of the tokens that are left have a score, and an id up to one."""
    count = tl.full((), 0, tl.int32)
    for i in range(tiles(pool)):
        x, ids, _ = tile(source, room, pool, i, False)
        count += tl.sum((inside(x, ids, kept) & (x == level) & (ids <= upto)).to(tl.int32), 0)
    return count


@jit
def first(
    source: tl.tensor, room: tl.tensor, pool: tl.tensor, kept: tl.tensor, goal: tl.tensor, weighed: tl.constexpr,
) -> Any:  # fmt: skip
    """The fewest first tokens whose weights (or number) reach a goal: halving finds a score, then an id."""
    cut, last = kept.cut, kept.last
    reached, above = reach(source, room, pool, kept, cut, weighed), tl.full((), 0.0, tl.float64)
    if reached > goal:
        low, high = ordered(cut), ordered(pool.top) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            weight = reach(source, room, pool, kept, floating(middle), weighed)
            enough = weight >= goal
            reached, above = tl.where(enough, weight, reached), tl.where(enough, above, weight)
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        cut = floating(low)
        last = nth(source, room, pool, kept, cut, goal - above, reached - above)
    return Kept(cut, last)


@jit
def nth(
    source: tl.tensor, room: tl.tensor, pool: tl.tensor, kept: tl.tensor, level: tl.tensor, rest: tl.tensor,
    whole: tl.tensor,
) -> Any:  # fmt: skip
    """The id up to which tokens of one score reach the rest of a goal; all of them together weigh ``whole``."""
    high = tl.minimum(tl.where(level == kept.cut, kept.last, LAST), source.size)
    count = equals(source, room, pool, kept, level, high)
    each = whole / count
    most = count.to(tl.float64)
    need = tl.where(each > 0.0, tl.minimum(tl.ceil(rest / tl.where(each > 0.0, each, 1.0)), most), most)
    need = tl.maximum(need, 1.0).to(tl.int32)
    if need < count:
        low = tl.full((), 0, tl.int32)
        while low < high:
            middle = (low + high) >> 1
            enough = equals(source, room, pool, kept, level, middle) >= need
            low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return high
