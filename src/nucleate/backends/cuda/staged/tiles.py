"""The tokens of a row that are still in, for kernels: lists in memory, a tile at a time. Knows no stage.

They lie in ascending ids, so that a place in the list is an id as far as the order goes. Scores are float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY
from nucleate.backends.cuda.special.scores import ones, raw
from nucleate.core.stage import Row

TILE = tl.constexpr(1024)
LAST = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-1.7976931348623157e308)
FINE, ODD, EMPTY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What became of a row: it is to be drawn from; it holds NaN or +inf; it has no finite score."""

MASS, CROSS, SQUARE, SUM, VAR, WHOLE = (tl.constexpr(1 << bit) for bit in range(6))
"""What is to be summed."""


class Work(NamedTuple):
    """Where a row is: addresses. Those that its structure does not need are None."""

    ids: Any  #: int32, of the tokens that are in
    x: Any  #: float64, as are all the next: their scores,
    base: Any  #: and as of the last time that the order was made anew
    weights: Any
    few: Any  #: int64 [TILE], as the next: keys and weights of what a search has come down to
    few_weights: Any
    keys: Any  #: of an order of a stage's own
    dense: Any  #: by id, at first -inf
    told: Any  #: the same, for a Tap
    saved: Any  #: by id, see ``shapes.mark``, as the next
    marks: Any
    width: Any  #: from one row by id to the next
    late: Any  #: a bitmask for after a Tap that is the first step
    numbers: Any  #: of all steps
    spared: Any  #: int64: ids that a Ceiling does not drop, one list after the other,
    spared_width: Any  #: of so many ids each
    coin: Any  #: the uniform number of the step's Ceilings


class Kept(NamedTuple):
    """The tokens that are in."""

    n: Any  #: int32
    top: Any  #: float64, as the next: their highest score
    whole_top: Any  #: of all before the first cut since the last scale,
    whole_mass: Any  #: and the sum of exp(x - top) of these; 0 where nobody asks
    state: Any  #: int32


@jit
def exact(source: tl.tensor, ids: tl.tensor) -> Any:
    """Scores after the edits and the mask, not rounded; -inf stays, and what is odd stays odd."""
    x = raw(source, ids).to(tl.float64)
    if source.words is not None:
        at = source.words + ids // 32 * 2
        words = tl.load(at, mask=ids < source.size, other=0).to(tl.uint32, bitcast=True)
        place = (ids % 32).to(tl.uint32)
        has = (((words >> place) & 1) != 0) & (x > -INFINITY)
        lower = words & ((place * 0 + 1 << place) - 1)
        entry = source.entries + 3 * (tl.load(at + 1, mask=has, other=0) + ones(lower))
        y = x + tl.load(entry, mask=has, other=0.0)
        scale = tl.load(entry + 1, mask=has, other=1.0)
        y = tl.where(y > 0.0, y / scale, y * scale) - tl.load(entry + 2, mask=has, other=0.0)
        x = tl.where(has, y, x)
    if source.mask is not None:
        words = tl.load(source.mask + ids // 32, mask=ids < source.size, other=-1)
        x = tl.where((words >> (ids % 32)) & 1 == 0, x - INFINITY, x)
    return x


@jit
def start(source: tl.tensor, work: tl.tensor, based: tl.constexpr, whole: tl.constexpr) -> Any:
    """List the tokens of a row."""
    n, top = tl.full((), 0, tl.int32), tl.full((), -INFINITY, tl.float64)
    odd = tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(source.size, TILE)):
        ids = i * TILE + tl.arange(0, TILE)
        x = exact(source, ids)
        odd = tl.maximum(odd, tl.max(((x == INFINITY) | (x != x)).to(tl.int32), 0))  # noqa: PLR0124  # NaN
        x = tl.where(x == 0.0, 0.0, x)  # of -0.0 it makes 0.0: they are equal
        keep = x > -INFINITY
        top = tl.maximum(top, tl.max(tl.where(keep, x, -INFINITY), 0))
        n = put(work, n, keep, ids, x, x, based)
    tl.debug_barrier()
    state = tl.where(odd > 0, ODD, tl.where(n == 0, EMPTY, FINE))
    return uncut(work, tl.where(odd > 0, 0, n), top, state, whole)


@jit
def put(
    work: tl.tensor, n: tl.tensor, keep: tl.tensor, ids: tl.tensor, x: tl.tensor, base: tl.tensor, based: tl.constexpr,
) -> Any:  # fmt: skip
    """List those of a tile that stay, behind n others; returns how many there are now.

    A list may be written over by itself: it never gets ahead of what is read.
    """
    place = n + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all of the tile has been read
    tl.store(work.ids + place, ids, mask=keep)
    tl.store(work.x + place, x, mask=keep)
    if based:
        tl.store(work.base + place, base, mask=keep)
    return n + tl.sum(keep.to(tl.int32), 0)


@jit
def uncut(work: tl.tensor, n: tl.tensor, top: tl.tensor, state: tl.tensor, whole: tl.constexpr) -> Any:
    """Tokens of which none has been cut."""
    mass = tl.full((), 0.0, tl.float64)
    if whole:
        for i in range(tl.cdiv(n, TILE)):
            _, there, x = tile(work, n, i)
            mass += tl.sum(tl.where(there, tl.exp(x - top), 0.0), 0)
    return Kept(n, top, top, mass, state)


@jit
def tile(work: tl.tensor, n: tl.tensor, i: tl.tensor) -> Any:
    """(places, which of them there are, scores)."""
    place = i * TILE + tl.arange(0, TILE)
    return place, place < n, tl.load(work.x + place, mask=place < n, other=-INFINITY)


@jit
def base_of(work: tl.tensor, place: tl.tensor, there: tl.tensor, x: tl.tensor, based: tl.constexpr) -> Any:
    if based:
        x = tl.load(work.base + place, mask=there, other=0.0)
    return x


@jit
def statistics(work: tl.tensor, kept: tl.tensor, wants: tl.constexpr) -> Any:
    """What rules see of the tokens, their scores from the top; what is not wanted may be anything."""
    n = kept.n.to(tl.float64)
    mass, cross, square = n * 0.0, n * 0.0, n * 0.0
    total, away = n * 0.0, n * 0.0
    if wants & (MASS | CROSS | SQUARE | SUM | VAR | WHOLE):
        for i in range(tl.cdiv(kept.n, TILE)):
            _, there, x = tile(work, kept.n, i)
            below = tl.where(there, tl.maximum(x - kept.top, LEAST), 0.0)
            if wants & (MASS | CROSS | SQUARE | WHOLE):
                e = tl.where(there, tl.exp(below), 0.0)
                mass += tl.sum(e, 0)
                if wants & CROSS:
                    cross += tl.sum(e * below, 0)
                if wants & SQUARE:
                    square += tl.sum(e * e, 0)
            if wants & (SUM | VAR):
                total += tl.sum(below, 0)
    if wants & VAR:
        for i in range(tl.cdiv(kept.n, TILE)):
            _, there, x = tile(work, kept.n, i)
            far = tl.where(there, tl.maximum(x - kept.top, LEAST) - total / n, 0.0)
            away += tl.sum(far * far, 0)
    whole = tl.maximum(kept.whole_mass * tl.exp(kept.whole_top - kept.top), mass)
    return Row(n, n * 0.0, mass, square, tl.log(mass) - cross / mass, total / n, away / n, whole)
