"""The kernels that let rows go on with a token: ring, step and entries; and what of earlier text it repeats.

They carry no meaning of their own: their twin is ``past.Past.push``. What a row is read for is read before any of it is
written, as the threads of a program do not wait for each other but where they are told to.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda import slots as lines_of
from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.edits import COLUMNS, ID, OUTPUT, STEP, WIDTH

OFFSET, WINDOW, GROWS = tl.constexpr(lines_of.OFFSET), tl.constexpr(lines_of.WINDOW), tl.constexpr(lines_of.GROWS)
UNBROKEN, BREAKERS = tl.constexpr(lines_of.UNBROKEN), tl.constexpr(lines_of.BREAKERS)
ALLOWED, NGRAM = tl.constexpr(lines_of.ALLOWED), tl.constexpr(lines_of.NGRAM)
NO_TOKEN = tl.constexpr(lines_of.NO_TOKEN)


@jit
def go_on(
    slots: tl.tensor, tokens: tl.tensor, lines: tl.tensor, ring: tl.tensor, ring_size: tl.tensor, state: tl.tensor,
    room: tl.tensor, size: tl.tensor, lists: tl.tensor, list_size: tl.tensor, length: tl.tensor, block: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows. Those with a token below 0 stay as they are.

    slots, tokens: int64 [R]. lines: int64 [S, COLUMNS]. ring: int32 [S, ring_size]. state: int64 [S, room, WIDTH], or
    None where no row's entries grow. lists: int32 [F, list_size, length], see ``lists.Lists``; or None.
    """
    row = tl.program_id(0).to(tl.int64)
    slot, token = tl.load(slots + row), tl.load(tokens + row)
    if token >= 0:
        line, ring = lines + slot * COLUMNS, ring + slot * ring_size
        step = tl.load(line + STEP)
        end, unbroken = step + tl.load(line + OFFSET), tl.load(line + UNBROKEN)
        unbroken += (tl.load(line + ALLOWED) > 0).to(tl.int64)
        if lists is not None:
            number = tl.load(line + BREAKERS)
            if number >= 0:
                at = lists + number * list_size * length
                unbroken = tl.where(ends(at, list_size, length, ring, ring_size, end, token, block), 0, unbroken)
        if state is not None:  # noqa: SIM102  # what is not there is not compiled
            if tl.load(line + GROWS) > 0:
                window = tl.load(line + WINDOW)
                left = end - window
                old = tl.load(ring + left % ring_size, mask=(window > 0) & (left >= 0), other=NO_TOKEN)
                leaving = tl.where(window == 0, token, old.to(tl.int64))
                count(state + slot * room * WIDTH, room, size, token, leaving, block)
        tl.debug_barrier()
        tl.store(ring + end % ring_size, token.to(tl.int32))
        tl.store(line + STEP, step + 1)
        tl.store(line + UNBROKEN, unbroken)


@jit
def ends(
    words: tl.tensor, list_size: tl.tensor, length: tl.tensor, ring: tl.tensor, ring_size: tl.tensor, end: tl.tensor,
    token: tl.tensor, block: tl.constexpr,
) -> Any:  # fmt: skip
    """Whether a sequence of a list ends with this token, after the ``end`` tokens before it."""
    found = tl.full((), 0, tl.int32)
    for i in range(0, list_size, block):
        place = i + tl.arange(0, block)
        last = ready(words, place, list_size, length, ring, ring_size, end, end)
        found = tl.maximum(found, tl.max((last == token).to(tl.int32), 0))
    return found > 0


@jit
def ready(
    words: tl.tensor, place: tl.tensor, list_size: tl.tensor, length: tl.tensor, ring: tl.tensor, ring_size: tl.tensor,
    end: tl.tensor, said: tl.tensor,
) -> Any:  # fmt: skip
    """The last tokens of sequences whose earlier ones are the last of ``said`` tokens that end here; or -1."""
    there = place < list_size
    at, matches = words + place * length, there
    for back in range(1, length):
        before = tl.load(at + length - 1 - back, mask=matches, other=-1)
        earlier = tl.load(ring + (end - back + ring_size) % ring_size, mask=back <= said, other=-1)
        matches = matches & ((before < 0) | (before == earlier))
    return tl.load(at + length - 1, mask=matches, other=-1).to(tl.int64)


@jit
def count(
    state: tl.tensor, room: tl.tensor, size: tl.tensor, token: tl.tensor, leaving: tl.tensor, block: tl.constexpr,
) -> None:  # fmt: skip
    """An entry more for a token, or one that counts it once more; the one of ``leaving`` counts once less."""
    which = tl.arange(0, 4)
    key = tl.where(which == 0, token, tl.where(which == 1, leaving, size))
    place_4 = lower_bound(state, room, key)
    known_4 = tl.load(state + place_4 * WIDTH + ID, mask=place_4 < room, other=-1) == key
    had_4 = tl.load(state + place_4 * WIDTH + OUTPUT, mask=known_4 & (key < size), other=0)
    place, known, had = one_of(place_4, 0), one_of(known_4.to(tl.int64), 0) > 0, one_of(had_4, 0)
    gone, goes, left = one_of(place_4, 1), one_of(known_4.to(tl.int64), 1) > 0, one_of(had_4, 1)
    high = one_of(place_4, 2)  # the first place without an entry
    tl.debug_barrier()
    if not known:
        while high > place:  # from behind, so that nothing is written over before it has moved
            low = tl.maximum(high - block, place)
            at = low + tl.arange(0, block)
            move(state + at * WIDTH, at < high)
            high = low
        gone += (gone >= place).to(tl.int64)
        for column in tl.static_range(WIDTH):
            tl.store(state + place * WIDTH + column, tl.where(column == ID, token, 0))
    tl.debug_barrier()
    tl.store(state + place * WIDTH + OUTPUT, had + 1 - (leaving == token).to(tl.int64))
    tl.store(state + gone * WIDTH + OUTPUT, left - 1, mask=goes & (leaving != token))


@jit
def move(entry: tl.tensor, there: tl.tensor) -> None:
    """Some entries go one place on."""
    a, b = tl.load(entry, mask=there), tl.load(entry + 1, mask=there)
    c, d = tl.load(entry + 2, mask=there), tl.load(entry + 3, mask=there)
    e, f = tl.load(entry + 4, mask=there), tl.load(entry + 5, mask=there)
    tl.debug_barrier()
    tl.store(entry + 6, a, mask=there)
    tl.store(entry + 7, b, mask=there)
    tl.store(entry + 8, c, mask=there)
    tl.store(entry + 9, d, mask=there)
    tl.store(entry + 10, e, mask=there)
    tl.store(entry + 11, f, mask=there)


@jit
def one_of(block: tl.tensor, place: tl.constexpr) -> Any:
    return tl.sum(tl.where(tl.arange(0, 4) == place, block, 0), 0)


@jit
def lower_bound(state: tl.tensor, room: tl.tensor, key: tl.tensor) -> Any:
    """For each key the first entry that is not below it, by halving."""
    low, high = key * 0, key * 0 + room
    while tl.max(high - low, 0) > 0:
        middle = (low + high) >> 1
        below = tl.load(state + middle * WIDTH + ID, mask=low < high, other=0) < key
        high = tl.where((low < high) & (below == 0), middle, high)
        low = tl.where((low < high) & below, middle + 1, low)
    return low


@jit
def match(
    slots: tl.tensor, tokens: tl.tensor, lines: tl.tensor, ring: tl.tensor, ring_size: tl.tensor, lengths: tl.tensor,
    block: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: parts of ``block`` distances; rows. Before ``go_on``, of whose arguments these are.

    lengths: int32 [S, ring_size], see ``matches.Matches``.
    """
    row = tl.program_id(1).to(tl.int64)
    slot, token = tl.load(slots + row), tl.load(tokens + row)
    line = lines + slot * COLUMNS
    if (token >= 0) & ((tl.load(line + ALLOWED) > 0) | (tl.load(line + NGRAM) > 0)):
        end = tl.load(line + STEP) + tl.load(line + OFFSET)
        back = (tl.program_id(0) * block + tl.arange(0, block) + 1).to(tl.int64)
        there = (back <= end) & (back <= ring_size)
        earlier = tl.load(ring + slot * ring_size + (end - back + ring_size) % ring_size, mask=there, other=-1)
        at = lengths + slot * ring_size + back - 1
        had = tl.load(at, mask=there, other=0)
        tl.debug_barrier()
        tl.store(at, tl.where(earlier == token, had + 1, 0), mask=there)
