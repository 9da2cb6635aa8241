"""Keeping some of the tokens that are in: above a cut, below one, or up to a token. Knows no stage.

The tokens that are in are the first m of three arrays: ``ids`` (int64, ascending), ``x`` (float64, their scores) and,
by id, ``base``: the scores as of the last time that the order was made anew. The order is score descending, then base
descending, as a monotone scale keeps the order also of tokens that its rounding makes equal, then id ascending.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.doubles import BLOCK, bits_of, inside
from nucleate.backends.cpu.squeeze import take
from nucleate.backends.cpu.staged.old import kernel


@kernel
def first(x: Any, ids: Any, base: Any, m: Any, top: Any) -> Any:
    """The place of the first token of the order."""
    best = -1
    for start in range(0, m, BLOCK):
        found = bits_of(x, start, m, 1.0, top, 0.0, np.nan)
        while found != 0:
            i = start + simd.lowest_bit(found)
            found &= found - 1
            if best < 0 or base[ids[i]] > base[ids[best]]:
                best = i
    return best


@kernel
def keep_above(x: Any, ids: Any, m: Any, top: Any, cut: Any, x_out: Any, ids_out: Any) -> Any:
    """Keep the scores that are at or above a cut, from the top; returns how many."""
    n = 0
    for start in range(0, m, BLOCK):
        n = take(bits_of(x, start, m, 1.0, top, cut, np.nan), start, x, ids, x_out, ids_out, n)
    return n


@kernel
def drop_above(x: Any, ids: Any, base: Any, m: Any, top: Any, cut: Any, spared: Any, x_out: Any, ids_out: Any) -> Any:
    """Drop the tokens at or above a cut but the last of them, and those that are spared; returns how many stay."""
    last = -1
    for start in range(0, m, BLOCK):
        found = bits_of(x, start, m, 1.0, top, cut, np.nan)
        while found != 0:
            i = start + simd.lowest_bit(found)
            found &= found - 1
            if last < 0 or x[i] < x[last] or (x[i] == x[last] and base[ids[i]] <= base[ids[last]]):
                last = i
    n = 0
    for start in range(0, m, BLOCK):
        dropped = bits_of(x, start, m, 1.0, top, cut, np.nan)
        left = dropped
        while left != 0:
            bit = simd.lowest_bit(left)
            left &= left - 1
            stays = start + bit == last
            for token in spared:
                stays |= token == ids[start + bit]
            if stays:
                dropped ^= np.int32(1) << bit
        there = np.int32((1 << min(BLOCK, m - start)) - 1)
        n = take(there & ~dropped, start, x, ids, x_out, ids_out, n)
    return n


@kernel
def keep_until(
    order: Any, sign: Any, x: Any, ids: Any, base: Any, m: Any, place: Any, strict: Any, ties: Any,
    x_out: Any, ids_out: Any,
) -> Any:  # fmt: skip
    """Keep what is not after a place in the order, nor at it if strict; and ties, what equals the last of it."""
    k, score, under, token = sign * order[place], x[place], base[ids[place]], ids[place]
    most, kept = np.inf, 0
    if strict or ties:
        for i in range(m):
            if not after(sign * order[i], x, ids, base, i, k, score, under, token, strict):
                kept += 1
                most = min(most, x[i])
        if kept == 0:
            strict, most = False, score
    n, full = 0, m // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        found = inside(order, start, sign, 0.0, 1.0, -np.inf, k)
        equal = inside(order, start, -sign, 0.0, 1.0, -k, np.nan) & ~found
        if ties:
            found |= inside(x, start, 1.0, 0.0, 1.0, most, np.nan)
        while equal != 0:
            bit = simd.lowest_bit(equal)
            equal &= equal - 1
            if not after(k, x, ids, base, start + bit, k, score, under, token, strict):
                found |= np.int32(1) << bit
        n = take(found, start, x, ids, x_out, ids_out, n)
    for i in range(full, m):
        stays = not after(sign * order[i], x, ids, base, i, k, score, under, token, strict) or (ties and x[i] >= most)
        x_out[n], ids_out[n] = x[i], ids[i]
        n += stays
    return n


@jit
def after(
    key: Any, x: Any, ids: Any, base: Any, i: Any, k: Any, score: Any, under: Any, token: Any, strict: Any
) -> Any:
    """Whether the token at a place comes after another one; if strict, or is that one."""
    if key != k:
        return key > k
    if x[i] != score:
        return x[i] < score
    mine = ids[i]
    if base[mine] != under:
        return base[mine] < under
    return mine >= token if strict else mine > token
