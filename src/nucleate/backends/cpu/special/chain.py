"""Rows through the chain that nearly every request has: edits, temperature, the cuts, and the draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit, kernel
from nucleate.backends.cpu.load import (
    FLOAT32,
    copy,
    doubles_at,
    longs_at,
    lying,
    next_of,
    unsigned_at,
    with_tail,
    words_at,
)
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.cuts import MANY, Chain, exponent_of, first, narrow, read
from nucleate.backends.cpu.special.edits import edit, forbid
from nucleate.backends.cpu.special.races import race_few, race_groups, race_in
from nucleate.backends.cpu.special.select import next_up
from nucleate.backends.cpu.special.table import NOT_DRAWN, NUMBERS, PLACES, PROGRAMS, SEEDS, SLOTS, STEPS, TOKENS
from nucleate.backends.cpu.special.work import carve, room_for


@jit
def draw(row: Any, chain: Any, seed: Any, step: Any, work: Any) -> Any:
    """The token drawn from a row, a ``simd.Scores``. NOT_DRAWN for one with NaN, +inf or no finite score."""
    top = read(row, work.tops)
    if not -np.inf < top < np.inf:
        return NOT_DRAWN
    if chain.t == 0.0 or chain.k == 1:
        return first(row, work.tops, top)
    kept = narrow(row, top, chain, work)
    if kept.n >= 0:
        return race_few(work.ids, work.weights, kept.n, seed, step)
    t = chain.t * chain.late_t
    if kept.n == MANY:
        weigh_kept(row, kept, top, t, work)
    winner = race_groups(work.masses, seed, step, work.race)
    return race_in(row.x, winner * GROUP, kept.cut, kept.last, np.float64(top), t, seed, step)


@jit
def weigh_kept(row: Any, kept: Any, top: Any, t: Any, work: Any) -> None:
    """The weight of what is left of each group."""
    exponent, over = exponent_of(top, t), next_up(kept.cut)
    for group in range(work.tops.size):
        start = group * GROUP
        if work.tops[group] < kept.cut:
            mass = np.float32(0.0)
        elif start <= kept.last < start + GROUP:
            total = 0.0
            for token in range(start, min(start + GROUP, row.x.size)):
                if inside(row.x, token, kept):
                    total += math.exp((np.float64(row.x[token]) - np.float64(top)) / t)
            mass = np.float32(total)
        else:
            least = over if start > kept.last else kept.cut
            mass = simd.mass_above(row, start, exponent.top, exponent.high, exponent.low, exponent.least, least)
        work.masses[group] = mass


@jit
def inside(x: Any, token: Any, kept: Any) -> Any:
    """Whether a token is left."""
    return x[token] > kept.cut or (x[token] == kept.cut and token <= kept.last)


@jit
def prepared(address: Any, kind: Any, program: Any, orders: Any, mask: Any, size: Any, work: Any) -> Any:
    """A row, edited; (it, whether that went well). See ``draw_rows``."""
    if kind == FLOAT32 and orders == 0 and mask == 0:
        return lying(address, size, work.tail), True
    x = work.x[:size]
    copy(address, kind, x)
    well = edit(x, program, orders) if orders else True
    if mask:
        forbid(x, carray(words_at(mask), (size + 31) // 32))
    return with_tail(x, work.tail), well


@jit
def chain_of(numbers: Any) -> Any:
    """The parameters of a row, see ``plan.Numbers``."""
    return Chain(numbers[0], numbers[1], int(numbers[2]), numbers[3], numbers[4], numbers[5], numbers[6])


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
    arrays = carray(longs_at(control), 7)
    places, slots = carray(longs_at(arrays[PLACES]), count), carray(longs_at(arrays[SLOTS]), count)
    tokens, drawn, i = carray(longs_at(arrays[TOKENS]), count), 0, next_of(begun)
    while i < count:
        place, slot = places[i], slots[i]
        numbers = carray(doubles_at(arrays[NUMBERS] + slot * 56), 7)
        program = carray(longs_at(arrays[PROGRAMS] + slot * 16), 2)
        seed, step = carray(unsigned_at(arrays[SEEDS] + slot * 8), 1), carray(unsigned_at(arrays[STEPS] + slot * 8), 1)
        allowed = mask + place * words if mask else mask
        row, well = prepared(start + place * between, kind, program[0], program[1], allowed, size, work)
        token = draw(row, chain_of(numbers), seed[0], step[0], work) if well else NOT_DRAWN
        tokens[i] = token
        if token != NOT_DRAWN:
            step[0] += np.uint64(1)
        drawn, i = drawn + 1, next_of(begun)
    return drawn


@kernel("int64(float32[::1], float64[::1], int64[::1], float64[::1])")
def survivors(x: Any, numbers: Any, ids: Any, room: Any) -> Any:
    """Fill in the ids of the tokens that are left, ascending; returns how many. Of an odd row, none.

    x: float32 [V]. numbers: float64 [7]. ids: int64 [V]. room: float64.
    """
    work, chain = carve(room, x.size), chain_of(numbers)
    row = with_tail(x, work.tail)
    top = read(row, work.tops)
    if not -np.inf < top < np.inf:
        return 0
    if chain.t == 0.0 or chain.k == 1:
        ids[0] = first(row, work.tops, top)
        return 1
    kept = narrow(row, top, chain, work)
    if kept.n >= 0:
        ids[: kept.n] = work.ids[: kept.n]
        return kept.n
    found = 0
    for token in range(x.size):
        ids[found] = token
        found += inside(x, token, kept)
    return found
