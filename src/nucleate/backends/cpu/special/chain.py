"""Rows through the chain that nearly every request has: edits, temperature, the cuts, and the draw."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, from_dtype, types
from numba.np.unsafe.ndarray import to_fixed_tuple

from nucleate.backends.chain import Numbers
from nucleate.backends.cpu.compile import intrinsic, jit, kernel
from nucleate.backends.cpu.load import doubles_at, longs_at, next_of
from nucleate.backends.cpu.special.cuts import first, narrow
from nucleate.backends.cpu.special.edits import read, take
from nucleate.backends.cpu.special.races import FAST, race_few, race_many
from nucleate.backends.cpu.special.select import gather
from nucleate.backends.cpu.special.table import ENTRIES, ENTRY, NOT_DRAWN, PLACES, SLOTS, TOKENS
from nucleate.backends.cpu.special.weights import LOWEST, MANY, exponent_of, rounding
from nucleate.backends.cpu.special.work import DOUBTED, carve, lay, room_for, score

COUNT = len(Numbers._fields)


@intrinsic
def entries_at(typing: Any, address: Any) -> Any:
    """The entries of a ``table.Table``."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        return b.inttoptr(given[0], context.get_value_type(signature.return_type))

    return types.CPointer(from_dtype(ENTRY))(types.int64), make


@jit
def draw(top: Any, chain: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from a row that was taken; NOT_DRAWN where it has NaN, +inf or no finite score, or is tied."""
    token: Any = np.int64(NOT_DRAWN)
    if not -np.inf < top < np.inf:
        return token
    if chain.t == 0.0 or chain.k == 1.0:
        return np.int64(first(top, work))
    for turn in range(2):
        work.state[DOUBTED] = 0
        kept = narrow(top, chain, turn == 1, work)
        if kept.tied:
            token = NOT_DRAWN
        elif kept.n >= 0:
            token = race_few(work.ids, work.weights, kept.n, seed, step)
        else:
            t = chain.t * chain.late_t
            token = race_many(kept, exponent_of(top, t), t, FAST + rounding(top, t, work), seed, step, work)
        if token != NOT_DRAWN or chain.p >= 1.0:  # only a part of a sum can be had more exactly
            break
    return token


@kernel("int64(float32[:, ::1], int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def draw_rows(
    x: Any, start: Any, between: Any, kind: Any, size: Any, mask: Any, words: Any, count: Any, begun: Any,
    control: Any, room: Any,
) -> Any:  # fmt: skip
    """Draw from rows, and move their steps on; returns how many. All but the first are integers.

    x, start, between: where the first row of a batch is in memory, in an array or, if not 0, at an address, and how
    many bytes further the next. kind: of its ``size`` floats (see ``load``). mask, words: the same of bitmasks; 0 for
    none. count: of the rows. begun: the address of how many of them somebody has begun with; each call that is given it
    takes the next one, until there is none. control: the address of that of a ``table.Part``. room: that of as many
    float64 as ``room_for(size)`` says.
    """
    start = start or np.int64(x.ctypes.data)
    work = carve(carray(doubles_at(room), room_for(size)), size)
    arrays = carray(longs_at(control), 4)
    places, slots = carray(longs_at(arrays[PLACES]), count), carray(longs_at(arrays[SLOTS]), count)
    tokens, drawn, i = carray(longs_at(arrays[TOKENS]), count), 0, next_of(begun)
    while i < count:
        place, slot = places[i], slots[i]
        entry = carray(entries_at(arrays[ENTRIES]), slot + 1)[slot]
        allowed = mask + place * words if mask else mask
        top = take(start + place * between, kind, size, entry.program, entry.orders, allowed, work)
        token = draw(top, Numbers(*to_fixed_tuple(entry.numbers, COUNT)), entry.seed, entry.step, work)
        tokens[i] = token
        if token != NOT_DRAWN:
            entry.step += np.uint64(1)
        drawn, i = drawn + 1, next_of(begun)
    return drawn


@kernel("int64(float32[::1], float64[::1], int64[::1], float64[::1])")
def survivors(x: Any, numbers: Any, ids: Any, room: Any) -> Any:
    """Fill in the ids of the tokens that are left, ascending; returns how many. Of an odd row, none.

    x: float32 [V]. numbers: float64 [7]. ids: int64 [V]. room: float64.
    """
    work, chain = carve(room, x.size), Numbers(*to_fixed_tuple(numbers, COUNT))
    lay(x, work)
    top = read(work)
    if not -np.inf < top < np.inf:
        return 0
    if chain.t == 0.0 or chain.k == 1.0:
        ids[0] = first(top, work)
        return 1
    kept, found = narrow(top, chain, True, work), 0
    if kept.n != MANY:
        for i in range(kept.n):
            ids[i] = work.ids[i]
        return kept.n
    found = gather(max(kept.cut, LOWEST), work)
    left = 0
    for i in range(found):
        ids[left] = work.ids[i]
        left += score(work, work.ids[i]) > kept.cut or work.ids[i] <= kept.last
    return left
