"""The kernel of a step's edits: entries, numbers and step become what ``scores`` looks up.

It carries no meaning of its own: its twin is ``entries.Entries.edits``, which it equals bit by bit.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nucleate.backends.cuda import entries as twin
from nucleate.backends.cuda import slots as lines_of
from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY

COLUMNS, WIDTH = tl.constexpr(lines_of.COLUMNS), tl.constexpr(twin.WIDTH)
ID, BEFORE, UNTIL = tl.constexpr(twin.ID), tl.constexpr(twin.BEFORE), tl.constexpr(twin.UNTIL)
OUTPUT, PROMPT, LATE = tl.constexpr(twin.OUTPUT), tl.constexpr(twin.PROMPT), tl.constexpr(twin.LATE)
STEP, SCALE, EACH = tl.constexpr(lines_of.STEP), tl.constexpr(lines_of.SCALE), tl.constexpr(lines_of.EACH)
ONCE, FACTOR, BASE = tl.constexpr(lines_of.ONCE), tl.constexpr(lines_of.FACTOR), tl.constexpr(lines_of.BASE)
MOST, ROOM, ALLOWED = tl.constexpr(lines_of.MOST), tl.constexpr(lines_of.ROOM), tl.constexpr(lines_of.ALLOWED)
EXPONENT = tl.constexpr(twin.EXPONENT)
FOUND = tl.constexpr(len(twin.Found._fields))


@jit
def fill(
    slots: tl.tensor, lines: tl.tensor, state: tl.tensor, room: tl.tensor, size: tl.tensor, found: tl.tensor,
    words: tl.tensor, words_row: tl.tensor, entries: tl.tensor, block: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: parts of ``block`` entries; rows.

    slots: int64 [R]. lines: int64 [S, COLUMNS]. state: int64 [S, room, WIDTH], of rows of ``size`` tokens. found: int32
    [R, room, 3], see ``entries.Found``; or None. words: int32 [R, words_row / 2, 2], zeros, and entries: float64
    [R, room, 3], see ``index.Index``; where no token has an entry, its words stay as they are.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    line, state = lines + slot * COLUMNS, state + slot * room * WIDTH
    place = tl.program_id(0) * block + tl.arange(0, block)
    there, entry = place < room, state + place.to(tl.int64) * WIDTH
    token = tl.load(entry + ID, mask=there, other=size)
    there = token < size
    if tl.max(there.to(tl.int32), 0) > 0:
        before = floating(tl.load(entry + BEFORE, mask=there, other=0))
        banned = tl.load(line + STEP) < tl.load(entry + UNTIL, mask=there, other=0)
        output = tl.load(entry + OUTPUT, mask=there, other=0)
        scaled = output + tl.load(entry + PROMPT, mask=there, other=0) > 0
        counted = floating(tl.load(line + EACH)) * output.to(tl.float64) + floating(tl.load(line + ONCE))
        after = tl.where(output > 0, counted, 0.0) - floating(tl.load(entry + LATE, mask=there, other=0))
        if found is not None:
            at = found + (row * room + place) * FOUND
            banned = banned | (tl.load(at + 1, mask=there, other=0) > 0)
            spared = tl.load(at + 2, mask=there, other=0) > 0
            after += tl.where(spared, 0.0, repeated(line, tl.load(at, mask=there, other=0)))
        at = entries + (row * room + place) * 3
        tl.store(at, tl.where(banned, -INFINITY, before), mask=there)
        tl.store(at + 1, tl.where(scaled, floating(tl.load(line + SCALE)), 1.0), mask=there)
        tl.store(at + 2, after, mask=there)
        mark(words + row * words_row, entry, token, place, there, room, size)


@jit
def floating(bits: tl.tensor) -> Any:
    return bits.to(tl.float64, bitcast=True)


@jit
def repeated(line: tl.tensor, reach: tl.tensor) -> Any:
    """``entries.repeated``."""
    over, most = reach.to(tl.int64) - tl.load(line + ALLOWED), floating(tl.load(line + MOST))
    square, factor = floating(tl.load(line + BASE)), floating(tl.load(line + FACTOR))
    power = reach.to(tl.float64) * 0.0 + 1.0
    for bit in tl.static_range(EXPONENT):
        power = tl.where((over >> bit) & 1 == 1, power * square, power)
        square = square * square
    penalty = tl.where(over < tl.load(line + ROOM), tl.minimum(factor * power, most), most)
    return tl.where(reach > 0, penalty, 0.0)


@jit
def mark(
    words: tl.tensor, entry: tl.tensor, token: tl.tensor, place: tl.tensor, there: tl.tensor, room: tl.tensor,
    size: tl.tensor,
) -> None:  # fmt: skip
    """The bits of each 32 tokens, and how many entries come before: told by the first entry of these."""
    word = token // 32
    had = tl.load(entry - WIDTH + ID, mask=there & (place > 0), other=-1)
    first = there & ((place == 0) | (had // 32 != word))
    bits, same, ahead = bit_of(token), first, 1
    while tl.max(same.to(tl.int32), 0) > 0:
        other = tl.load(entry + ahead * WIDTH + ID, mask=same & (place + ahead < room), other=size)
        same = same & (other < size) & (other // 32 == word)
        bits = bits | tl.where(same, bit_of(other), 0)
        ahead += 1
    tl.store(words + word * 2, bits, mask=first)
    tl.store(words + word * 2 + 1, place, mask=first)


@jit
def bit_of(token: tl.tensor) -> Any:
    return (tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)).to(tl.int32)
