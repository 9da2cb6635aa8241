"""The kernel that looks back: which repeats, n-grams and words the next token of a row would go on or end.

Carries no meaning of its own: it finds what ``past.Past`` finds as tensors.
"""

from __future__ import annotations

import triton.language as tl

from nucleate.backends.cuda import slots as lines_of
from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.edits import COLUMNS, FOUND, ID, STEP, WIDTH
from nucleate.backends.cuda.special.push import ALLOWED, BREAKERS, NGRAM, OFFSET, UNBROKEN, lower_bound, ready

LAST, WORDS = tl.constexpr(lines_of.LAST), tl.constexpr(lines_of.WORDS)
NEVER = tl.constexpr(1 << 62)
"""No repeat is as long."""


@jit
def look(
    slots: tl.tensor, lines: tl.tensor, ring: tl.tensor, ring_size: tl.tensor, state: tl.tensor, room: tl.tensor,
    lengths: tl.tensor, lists: tl.tensor, list_size: tl.tensor, length: tl.tensor, found: tl.tensor,
    block: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: parts of ``block`` distances, or sequences of a list; rows. Arguments are as of ``push.go_on``.

    lengths: int32 [S, ring_size], or None. found: int32 [R, room, 3], zeros; see ``entries.Found``.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    line, ring, state = lines + slot * COLUMNS, ring + slot * ring_size, state + slot * room * WIDTH
    found += row * room * FOUND
    step = tl.load(line + STEP)
    end = step + tl.load(line + OFFSET)
    place = tl.program_id(0) * block + tl.arange(0, block)
    if lengths is not None:
        allowed, ngram = tl.load(line + ALLOWED), tl.load(line + NGRAM)
        if (allowed > 0) | (ngram > 0):
            back = (place + 1).to(tl.int64)
            there = (back <= end) & (back <= ring_size)
            repeat = tl.load(lengths + slot * ring_size + place, mask=there, other=0).to(tl.int64)
            last, unbroken = tl.load(line + LAST), tl.load(line + UNBROKEN)
            reach = tl.minimum(repeat, tl.minimum(tl.where(last < 0, end, last) - back, unbroken))
            counts = there & (reach >= tl.where(allowed > 0, allowed, NEVER))
            again = there & (repeat >= tl.where(ngram > 0, ngram - 1, NEVER))
            if tl.max((counts | again).to(tl.int32), 0) > 0:
                token = tl.load(ring + (end - back + ring_size) % ring_size, mask=counts | again, other=-1).to(tl.int64)
                entry, known = entry_of(state, room, token)
                at = found + entry * FOUND
                tl.atomic_max(at, reach.to(tl.int32), mask=counts & known, sem="relaxed")
                tl.store(at + 1, 1, mask=again & known)
    if lists is not None:
        breakers, words = tl.load(line + BREAKERS), tl.load(line + WORDS)
        if (breakers >= 0) & (tl.program_id(0) * block < list_size):
            at = lists + breakers * list_size * length
            last = ready(at, place, list_size, length, ring, ring_size, end, end)
            entry, known = entry_of(state, room, last)
            tl.store(found + entry * FOUND + 2, 1, mask=known)
        if (words >= 0) & (tl.program_id(0) * block < list_size):
            at = lists + words * list_size * length
            last = ready(at, place, list_size, length, ring, ring_size, end, step)
            entry, known = entry_of(state, room, last)
            tl.store(found + entry * FOUND + 1, 1, mask=known)


@jit
def entry_of(state: tl.tensor, room: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The entries of tokens, and which have one; below 0 there is no token."""
    entry = lower_bound(state, room, token)
    known = tl.load(state + entry * WIDTH + ID, mask=entry < room, other=-2) == token
    return entry, known & (token >= 0)
