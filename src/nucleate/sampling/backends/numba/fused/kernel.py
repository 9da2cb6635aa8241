"""The fused kernel: edits, temperature, truncation and draw of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, from_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from nucleate.jit.compiler import jit, kernel
from nucleate.sampling.backends.numba.fused.cutoffs import TIED, first, narrow
from nucleate.sampling.backends.numba.fused.gumbel_draw import race_few, race_many
from nucleate.sampling.backends.numba.fused.logit_edits import take
from nucleate.sampling.backends.numba.fused.row_table import ENTRIES, ENTRY, NOT_DRAWN, PLACES, SLOTS, TOKENS, room_for
from nucleate.sampling.backends.numba.fused.workspace import carve
from nucleate.sampling.backends.numba.row_loading import doubles_at, longs_at, next_of, pointer
from nucleate.sampling.dispatch.fused_pipeline import FusedParams

COUNT = len(FusedParams._fields)

entries_at, room = pointer(from_dtype(ENTRY)), jit(room_for)


@jit
def draw(top: Any, chain: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from a row that was taken; NOT_DRAWN where it has NaN, +inf or no finite score, or is tied."""
    if not -np.inf < top < np.inf:
        return np.int64(NOT_DRAWN)
    token, best = first(top, work)
    if chain.t == 0.0 or chain.k == 1.0:
        return token
    kept = narrow(top, best, chain, work)
    if kept.n == TIED:
        return np.int64(NOT_DRAWN)
    if kept.n >= 0:
        return race_few(kept.n, seed, step, work)
    return race_many(kept, top, best, chain.t * chain.late_t, seed, step, work)


@kernel("int64(float32[:, ::1], int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def draw_rows(
    x: Any, start: Any, between: Any, kind: Any, size: Any, mask: Any, words: Any, count: Any, begun: Any,
    control: Any, space: Any,
) -> Any:  # fmt: skip
    """Draw from rows, and move their steps on; returns how many. All but the first are integers.

    x, start, between: where the first row of a batch is in memory, in an array or, if not 0, at an address, and how
    many bytes further the next. kind: of its ``size`` floats (see ``load``). mask, words: the same of bitmasks; 0 for
    none. count: of the rows. begun: the address of how many of them somebody has begun with; each call that is given it
    takes the next one, until there is none. control: the address of that of a ``row_table.Part``. space: that of as
    many float64 as ``row_table.room_for`` says."""
    start = start or np.int64(x.ctypes.data)
    work = carve(carray(doubles_at(space), room(size)), size)
    arrays = carray(longs_at(control), 4)
    places, slots = carray(longs_at(arrays[PLACES]), count), carray(longs_at(arrays[SLOTS]), count)
    tokens, drawn, i = carray(longs_at(arrays[TOKENS]), count), 0, next_of(begun)
    while i < count:
        place, slot = places[i], slots[i]
        entry = carray(entries_at(arrays[ENTRIES]), slot + 1)[slot]
        allowed = mask + place * words if mask else mask
        top = take(start + place * between, kind, size, entry.program, entry.orders, allowed, work)
        token = draw(top, FusedParams(*to_fixed_tuple(entry.numbers, COUNT)), entry.seed, entry.step, work)
        tokens[i] = token
        if token != NOT_DRAWN:
            entry.step += np.uint64(1)
        drawn, i = drawn + 1, next_of(begun)
    return drawn
