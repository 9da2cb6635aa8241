"""A template per kind of Draw for kernels: which of the tokens that are left is taken. ``fuse`` fills them."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY
from nucleate.backends.cuda.special.noise import GROUP, TOKEN, uniform
from nucleate.backends.cuda.special.stats import GROUP_SIZE
from nucleate.backends.cuda.staged.search import search, until
from nucleate.backends.cuda.staged.tiles import LAST, TILE, Kept, statistics, tile

GROUPS = tl.constexpr(4)

mine: Any = None
score = weight = target = BASED = WANTS = AT = mine


@jit
def leader(said: tl.tensor, inside: tl.tensor, index: tl.tensor) -> Any:
    """(the highest of some scores, the lowest index that has it, or LAST; whether one is NaN)."""
    best = tl.max(tl.where(inside, said, -INFINITY), 0)
    at = tl.min(tl.where(inside & (said == best), index, LAST), 0)
    return best, at, tl.max((inside & (said != said)).to(tl.int32), 0)  # noqa: PLR0124  # NaN


@jit
def ahead(best: tl.tensor, at: tl.tensor, odd: tl.tensor, found: tl.tensor, place: tl.tensor, wrong: tl.tensor) -> Any:
    """The leader so far, and another one, whose indices are higher."""
    better = (place < LAST) & ((at == LAST) | (found > best))
    return tl.where(better, found, best), tl.where(better, place, at), tl.maximum(odd, wrong)


def each(work: tl.tensor, kept: tl.tensor, size: tl.tensor, seed: tl.tensor, step: tl.tensor) -> Any:
    """In two levels: the groups by their mass, then the tokens of the winner."""
    me = mine(work.numbers + AT)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        tl.store(work.dense + tl.load(work.ids + place, mask=there, other=0), x - kept.top, mask=there)
    tl.debug_barrier()
    best, at, odd = kept.top * 0.0 - INFINITY, tl.full((), LAST, tl.int32), tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(size, GROUPS * GROUP_SIZE)):
        group = i * GROUPS + tl.arange(0, GROUPS)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        below = tl.load(work.dense + ids, mask=ids < size, other=-INFINITY)
        top = tl.max(below, 1)
        there = top > -INFINITY
        e = tl.exp(below - tl.where(there, top, 0.0)[:, None])
        mass = tl.where(there, top, 0.0) + tl.log(tl.where(there, tl.sum(e, 1), 1.0))
        found, place, wrong = leader(score(me, mass, uniform(seed, step, GROUP, group)), there, group)
        best, at, odd = ahead(best, at, odd, found, place, wrong)
    ids = tl.where(at < LAST, at, 0) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    below = tl.load(work.dense + ids, mask=ids < size, other=-INFINITY)
    _, token, wrong = leader(score(me, below, uniform(seed, step, TOKEN, ids)), below > -INFINITY, ids)
    return tl.where((odd + wrong > 0) | (token == LAST), -1, token)


def none(work: tl.tensor, kept: tl.tensor, size: tl.tensor, seed: tl.tensor, step: tl.tensor) -> Any:
    """The highest score, without noise."""
    me = mine(work.numbers + AT)
    best, at, odd = kept.top * 0.0 - INFINITY, tl.full((), LAST, tl.int32), tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        ids, below = tl.load(work.ids + place, mask=there, other=0), tl.where(there, x - kept.top, 0.0)
        found, first, wrong = leader(score(me, below, below * 0.0), there, ids)
        best, at, odd = ahead(best, at, odd, found, first, wrong)
    return tl.where((odd > 0) | (at == LAST), -1, at)


def one(work: tl.tensor, kept: tl.tensor, size: tl.tensor, seed: tl.tensor, step: tl.tensor) -> Any:
    """Down the order, to the last token before which the weights have not reached the target."""
    alone = Kept(kept.n, kept.top, kept.top, kept.top * 0.0, kept.state)
    me, row = mine(work.numbers + AT), statistics(work, alone, WANTS)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        said = weight(me, tl.where(there, x - kept.top, 0.0), row)
        tl.store(work.weights + place, said, mask=there)
    tl.debug_barrier()
    u = tl.max(uniform(seed, step, TOKEN, tl.arange(0, 2) * 0), 0)
    goal = target(me, row, u) + row.top
    found = search(work, kept.n, goal, goal < 0.0, False, BASED)
    token = tl.full((), -1, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, _ = tile(work, kept.n, i)
        _, is_it = until(work, place, there, found.cut, False, BASED)
        token = tl.maximum(token, tl.max(tl.where(is_it, tl.load(work.ids + place, mask=there, other=-1), -1), 0))
    return tl.where(goal > 0.0, token, -1)
