"""A template per shape for kernels: what a stage leaves of the tokens of a row. ``fuse`` fills them with its rules.

What is in capitals, and what is called ``mine`` or after a rule, is bound there, stage by stage.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda.special.floats import INFINITY
from nucleate.backends.cuda.staged.search import search, until
from nucleate.backends.cuda.staged.tiles import (
    EMPTY,
    FINE,
    LAST,
    MASS,
    ODD,
    TILE,
    Kept,
    base_of,
    put,
    statistics,
    tile,
    uncut,
)

mine: Any = None
apply = floor = weight = target = order = ceiling = before = stage = first_only = mine
BASED = WHOLE = WANTS = OWN = TIES = REACHES = MONOTONE = LATE = AT = SLOT = mine


def nothing(work: tl.tensor, kept: tl.tensor) -> Any:
    """Before the first stage."""
    return kept


def then(work: tl.tensor, kept: tl.tensor) -> Any:
    """All stages up to one."""
    return stage(work, before(work, kept))


def greedy(work: tl.tensor, kept: tl.tensor) -> Any:
    """The first token only: of the highest scores that with the highest base, of these the lowest id."""
    best, place_of = kept.top * 0.0 - INFINITY, tl.full((), LAST, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        here = there & (x == kept.top)
        base = tl.where(here, base_of(work, place, there, x, BASED), -INFINITY)
        highest = tl.max(base, 0)
        first = tl.min(tl.where(here & (base == highest), place, LAST), 0)
        place_of = tl.where((first < LAST) & ((place_of == LAST) | (highest > best)), first, place_of)
        best = tl.maximum(best, highest)
    if kept.n > 1:
        token = tl.load(work.ids + place_of)
        tl.debug_barrier()  # all have read it
        tl.store(work.ids, token)
        tl.store(work.x, kept.top)
        if BASED:
            tl.store(work.base, best)
        tl.debug_barrier()
    return Kept(tl.minimum(kept.n, 1), kept.top, kept.whole_top, kept.whole_mass, kept.state)


def scale(work: tl.tensor, kept: tl.tensor) -> Any:
    """New scores for all tokens."""
    me, row = mine(work.numbers + AT), statistics(work, kept, WANTS)
    n, top, odd = tl.full((), 0, tl.int32), kept.top * 0.0 - INFINITY, tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        said = apply(me, tl.where(there, x - kept.top, 0.0), row)
        said = tl.where(there, said, -INFINITY)
        odd = tl.maximum(odd, tl.max(((said == INFINITY) | (said != said)).to(tl.int32), 0))  # noqa: PLR0124  # NaN
        keep = said > -INFINITY
        top = tl.maximum(top, tl.max(tl.where(keep, said, -INFINITY), 0))
        ids, base = tl.load(work.ids + place, mask=there, other=0), said
        if MONOTONE:
            base = base_of(work, place, there, x, BASED)
        n = put(work, n, keep, ids, said, base, BASED)
    tl.debug_barrier()
    state = tl.where(kept.state != FINE, kept.state, tl.where(odd > 0, ODD, tl.where(n == 0, EMPTY, FINE)))
    return uncut(work, tl.where(odd > 0, 0, n), top, state, WHOLE)


def cut_below(work: tl.tensor, kept: tl.tensor) -> Any:
    """A Floor. What is not below the top keeps at least that; else it keeps the first token."""
    me, row = mine(work.numbers + AT), statistics(work, kept, WANTS)
    cut = floor(me, row)
    if cut <= 0.0:
        n = tl.full((), 0, tl.int32)
        for i in range(tl.cdiv(kept.n, TILE)):
            place, there, x = tile(work, kept.n, i)
            ids, base = tl.load(work.ids + place, mask=there, other=0), base_of(work, place, there, x, BASED)
            n = put(work, n, there & (x - kept.top >= cut), ids, x, base, BASED)
        tl.debug_barrier()
        kept = Kept(n, kept.top, kept.whole_top, kept.whole_mass, kept.state)
    else:
        kept = first_only(work, kept)
    return kept


def prefix(work: tl.tensor, kept: tl.tensor) -> Any:
    """The first tokens up to the one that reaches the target, or without it; and what equals the last of them."""
    me, row = mine(work.numbers + AT), statistics(work, kept, WANTS)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        below = tl.where(there, x - kept.top, 0.0)
        tl.store(work.weights + place, weight(me, below, row), mask=there)
        if OWN:
            tl.store(work.keys + place, order(me, below, row), mask=there)
    tl.debug_barrier()
    goal = target(me, row) + row.top  # of the type of a number, whatever it says
    strict = (goal >= 0.0) & (not REACHES)
    goal = tl.where(strict | (goal > 0.0), goal, -INFINITY)
    found = search(work, kept.n, goal, strict, OWN, BASED)
    least, its_own, count = kept.top, kept.top, tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        early, is_it = until(work, place, there, found.cut, OWN, BASED)
        stays = there & (early | (is_it & (not strict)) | (not found.reached))
        count += tl.sum(stays.to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(stays, x, INFINITY), 0))
        its_own = tl.minimum(its_own, tl.min(tl.where(is_it, x, INFINITY), 0))
    strict, least = strict & (count > 0), tl.where(count > 0, least, its_own)
    n, top = tl.full((), 0, tl.int32), kept.top * 0.0 - INFINITY
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        ids, base = tl.load(work.ids + place, mask=there, other=0), base_of(work, place, there, x, BASED)
        early, is_it = until(work, place, there, found.cut, OWN, BASED)
        stays = there & (early | (is_it & (not strict)) | (not found.reached))
        if TIES:
            stays = stays | (there & (x >= least))
        top = tl.maximum(top, tl.max(tl.where(stays, x, -INFINITY), 0))
        n = put(work, n, stays, ids, x, base, BASED)
    tl.debug_barrier()
    return Kept(n, top, kept.whole_top, kept.whole_mass, kept.state)


def beheaded(work: tl.tensor, kept: tl.tensor) -> Any:
    """A Ceiling: of what is at or above it the last stays, and what is spared, in steps where the coin says so."""
    me, row = mine(work.numbers + AT), statistics(work, kept, WANTS)
    cut = tl.where(work.coin < me.chance, ceiling(me, row), INFINITY)
    lowest, base_at, last = kept.top * 0.0 + INFINITY, kept.top * 0.0, tl.full((), -1, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        above = there & (x - kept.top >= cut)
        least = tl.min(tl.where(above, x, INFINITY), 0)
        base = base_of(work, place, there, x, BASED)
        least_base = tl.min(tl.where(above & (x == least), base, INFINITY), 0)
        at = tl.max(tl.where(above & (x == least) & (base == least_base), place, -1), 0)
        later = (at >= 0) & ((last < 0) | (least < lowest) | ((least == lowest) & (least_base <= base_at)))
        last = tl.where(later, at, last)
        lowest, base_at = tl.where(later, least, lowest), tl.where(later, least_base, base_at)
    n, top = tl.full((), 0, tl.int32), kept.top * 0.0 - INFINITY
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        ids, base = tl.load(work.ids + place, mask=there, other=0), base_of(work, place, there, x, BASED)
        stays = there & ~((x - kept.top >= cut) & (place != last))
        for j in range(work.spared_width):
            stays = stays | (there & (ids == tl.load(work.spared + SLOT * work.spared_width + j)))
        top = tl.maximum(top, tl.max(tl.where(stays, x, -INFINITY), 0))
        n = put(work, n, stays, ids, x, base, BASED)
    tl.debug_barrier()
    return Kept(n, top, kept.whole_top, kept.whole_mass, kept.state)


def tap(work: tl.tensor, kept: tl.tensor) -> Any:
    """Tell the scores as they are here; after that, if this is the first step, comes the bitmask of the call."""
    n = tl.full((), 0, tl.int32)
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        ids = tl.load(work.ids + place, mask=there, other=0)
        tl.store(work.told + ids, x, mask=there)
        if LATE and work.late is not None:
            words = tl.load(work.late + ids // 32, mask=there, other=0)
            n = put(work, n, there & ((words >> (ids % 32)) & 1 != 0), ids, x, x, BASED)
    tl.debug_barrier()
    if LATE and work.late is not None:
        top = kept.top * 0.0 - INFINITY
        for i in range(tl.cdiv(n, TILE)):
            _, _, x = tile(work, n, i)
            top = tl.maximum(top, tl.max(x, 0))
        state = tl.where((kept.state == FINE) & (n == 0), EMPTY, kept.state)
        kept = uncut(work, n, top, state, WHOLE)
    return kept


def mark(work: tl.tensor, kept: tl.tensor) -> Any:
    """Keep what tells how likely the token drawn was here: the top, the logarithm of the mass, all scores."""
    mass = statistics(work, kept, MASS).mass
    tl.store(work.marks + 2 * SLOT, kept.top)
    tl.store(work.marks + 2 * SLOT + 1, tl.log(mass))
    for i in range(tl.cdiv(kept.n, TILE)):
        place, there, x = tile(work, kept.n, i)
        ids = tl.load(work.ids + place, mask=there, other=0)
        tl.store(work.saved + SLOT * work.width + ids, x, mask=there)
    return kept
