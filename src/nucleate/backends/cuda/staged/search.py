"""The first tokens of an order whose weights reach a goal, found by halving. Knows no stage.

The order is that of up to four integers per token: a key of the stage's own, the score, the score as of the last time
that the order was made anew, the place. One level after the other is halved, among the tokens equal so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.staged.tiles import TILE

HIGHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
OWN, SCORE, BASE, PLACE = (tl.constexpr(level) for level in range(4))


class Cut(NamedTuple):
    """A token, by what orders it: int64 each. Levels that the order does not have are 0."""

    own: Any
    score: Any
    base: Any
    place: Any


class Found(NamedTuple):
    """Where a goal is reached."""

    cut: Any  #: the token that reaches it
    reached: Any  #: whether one does; if none, the cut is the last token


@jit
def ordered(x: tl.tensor) -> Any:
    """Float64 as int64 that are ordered as they are, NaN last."""
    bits = (x + 0.0).to(tl.int64, bitcast=True)
    bits = bits ^ ((bits >> 63) & HIGHEST)
    return tl.where(x != x, HIGHEST, bits)  # noqa: PLR0124  # NaN


@jit
def key(
    work: tl.tensor, place: tl.tensor, n: tl.tensor, level: tl.tensor, own: tl.constexpr, based: tl.constexpr,
) -> Any:  # fmt: skip
    """What orders tokens on a level, ascending. Only what the level needs is read."""
    found = place.to(tl.int64)
    if own:
        said = tl.load(work.keys + place, mask=place < tl.where(level == OWN, n, 0), other=0.0)
        found = tl.where(level == OWN, ordered(said), found)
    if based:
        base = tl.load(work.base + place, mask=place < tl.where(level == BASE, n, 0), other=0.0)
        found = tl.where(level == BASE, ordered(-base), found)
    x = tl.load(work.x + place, mask=place < tl.where(level == SCORE, n, 0), other=0.0)
    return tl.where(level == SCORE, ordered(-x), found)


@jit
def equal(
    work: tl.tensor, place: tl.tensor, n: tl.tensor, cut: tl.tensor, level: tl.tensor, own: tl.constexpr,
    based: tl.constexpr,
) -> Any:  # fmt: skip
    """Which tokens are as the cut on all levels before one."""
    same = place < n
    if own:
        there = place < tl.where(level > OWN, n, 0)
        said = ordered(tl.load(work.keys + place, mask=there, other=0.0))
        same = same & tl.where(there, said == cut.own, True)
    there = place < tl.where(level > SCORE, n, 0)
    x = ordered(-tl.load(work.x + place, mask=there, other=0.0))
    same = same & tl.where(there, x == cut.score, True)
    if based:
        there = place < tl.where(level > BASE, n, 0)
        base = ordered(-tl.load(work.base + place, mask=there, other=0.0))
        same = same & tl.where(there, base == cut.base, True)
    return same


@jit
def enough(weight: tl.tensor, goal: tl.tensor, strict: tl.tensor) -> Any:
    return tl.where(strict, weight > goal, weight >= goal)


@jit
def halved(
    work: tl.tensor, n: tl.tensor, cut: tl.tensor, before: tl.tensor, goal: tl.tensor, strict: tl.tensor,
    level: tl.tensor, own: tl.constexpr, based: tl.constexpr,
) -> Any:  # fmt: skip
    """(the key on a level of the first token to reach the goal, or of the last one; what all before it weigh).

    low and high are always keys of tokens, so that few passes are left when few tokens are; these are gathered.
    """
    low, high, count = tl.full((), HIGHEST, tl.int64), tl.full((), -HIGHEST, tl.int64), tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(n, TILE)):
        place = i * TILE + tl.arange(0, TILE)
        inside, found = equal(work, place, n, cut, level, own, based), key(work, place, n, level, own, based)
        low = tl.minimum(low, tl.min(tl.where(inside, found, HIGHEST), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, found, -HIGHEST), 0))
        count += tl.sum(inside.to(tl.int32), 0)
    while (low < high) & (count > TILE):
        middle = (low & high) + ((low ^ high) >> 1)  # their sum may be too large
        weight, under, over, lower = before, low, high, tl.full((), 0, tl.int32)
        for i in range(tl.cdiv(n, TILE)):
            place = i * TILE + tl.arange(0, TILE)
            inside, found = equal(work, place, n, cut, level, own, based), key(work, place, n, level, own, based)
            below = inside & (found >= low) & (found <= middle)
            weight += tl.sum(tl.load(work.weights + place, mask=below, other=0.0), 0)
            lower += tl.sum(below.to(tl.int32), 0)
            under = tl.maximum(under, tl.max(tl.where(below, found, -HIGHEST), 0))
            over = tl.minimum(over, tl.min(tl.where(inside & (found > middle), found, HIGHEST), 0))
        there = enough(weight, goal, strict)
        before, count = tl.where(there, before, weight), tl.where(there, lower, count - lower)
        low, high = tl.where(there, low, over), tl.where(there, under, high)
    if low < high:
        m = tl.full((), 0, tl.int32)
        for i in range(tl.cdiv(n, TILE)):
            place = i * TILE + tl.arange(0, TILE)
            inside, found = equal(work, place, n, cut, level, own, based), key(work, place, n, level, own, based)
            inside = inside & (found >= low) & (found <= high)
            at = m + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(work.few + at, found, mask=inside)
            tl.store(work.few_weights + at, tl.load(work.weights + place, mask=inside, other=0.0), mask=inside)
            m += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()
        some = tl.arange(0, TILE)
        found = tl.load(work.few + some, mask=some < m, other=HIGHEST)
        weights = tl.load(work.few_weights + some, mask=some < m, other=0.0)
        tl.debug_barrier()  # all have been read: the next level may write there
        while low < high:
            middle = (low & high) + ((low ^ high) >> 1)
            below = (some < m) & (found >= low) & (found <= middle)
            weight = before + tl.sum(tl.where(below, weights, 0.0), 0)
            under = tl.max(tl.where(below, found, low), 0)
            over = tl.min(tl.where((some < m) & (found > middle), found, high), 0)
            there = enough(weight, goal, strict)
            before = tl.where(there, before, weight)
            low, high = tl.where(there, low, over), tl.where(there, under, high)
    return low, before


@jit
def search(
    work: tl.tensor, n: tl.tensor, goal: tl.tensor, strict: tl.tensor, own: tl.constexpr, based: tl.constexpr,
) -> Any:  # fmt: skip
    """The first token up to which the weights reach a goal, or exceed it if strict."""
    total = tl.full((), 0.0, tl.float64)
    for i in range(tl.cdiv(n, TILE)):
        place = i * TILE + tl.arange(0, TILE)
        total += tl.sum(tl.load(work.weights + place, mask=place < n, other=0.0), 0)
    before, zero = total * 0.0, tl.full((), 0, tl.int64)
    first, second, third, last = zero, zero, zero, zero
    for level in range(OWN, PLACE + 1):  # one copy of the code for all levels
        there = (level == SCORE) | (level == PLACE)
        if own:
            there = there | (level == OWN)
        if based:
            there = there | (level == BASE)
        if there:
            cut = Cut(first, second, third, last)
            found, before = halved(work, n, cut, before, goal, strict, level, own, based)
            first, second = tl.where(level == OWN, found, first), tl.where(level == SCORE, found, second)
            third, last = tl.where(level == BASE, found, third), tl.where(level == PLACE, found, last)
    return Found(Cut(first, second, third, last), enough(total, goal, strict))


@jit
def until(
    work: tl.tensor, place: tl.tensor, there: tl.tensor, cut: tl.tensor, own: tl.constexpr, based: tl.constexpr,
) -> Any:  # fmt: skip
    """(which tokens come before one, which one it is)."""
    is_it = there & (place.to(tl.int64) == cut.place)
    before = place.to(tl.int64) < cut.place
    if based:
        third = ordered(-tl.load(work.base + place, mask=there, other=0.0))
        before = (third < cut.base) | ((third == cut.base) & before)
    second = ordered(-tl.load(work.x + place, mask=there, other=0.0))
    before = (second < cut.score) | ((second == cut.score) & before)
    if own:
        first = ordered(tl.load(work.keys + place, mask=there, other=0.0))
        before = (first < cut.own) | ((first == cut.own) & before)
    return there & before, is_it
