"""Rows as they lie in memory: read in place where they are float32, else turned into it, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import intrinsic, jit
from nucleate.backends.cpu.simd import GROUP, LANES, Scores
from nucleate.backends.cpu.special.table import BFLOAT16, FLOAT16, FLOAT32


def _pointer(kind: Any, bits: ir.Type) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
            return b.inttoptr(given[0], bits.as_pointer())

        return types.CPointer(kind)(types.int64), make

    return pointer


floats_at = _pointer(types.float32, ir.FloatType())
doubles_at = _pointer(types.float64, ir.DoubleType())
longs_at = _pointer(types.int64, ir.IntType(64))
unsigned_at = _pointer(types.uint64, ir.IntType(64))
words_at = _pointer(types.int32, ir.IntType(32))
halves_at = _pointer(types.uint16, ir.IntType(16))


@intrinsic
def next_of(typing: Any, address: Any) -> Any:
    """Add 1 to the integer at an address, which others may do at the same time; returns what was there before."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        place = b.inttoptr(given[0], ir.IntType(64).as_pointer())
        return b.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), make


@intrinsic
def move(typing: Any, address: Any, x: Any) -> Any:
    """Copy what lies at an address into a float32 array."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        target = context.make_array(signature.args[1])(context, b, given[1])
        source = b.inttoptr(given[0], ir.FloatType().as_pointer())
        cgutils.raw_memcpy(b, target.data, source, target.nitems, 4)
        return context.get_dummy_value()

    return types.void(types.int64, x), make


@intrinsic
def widened(typing: Any, half: Any) -> Any:
    """The bits of one float16 as float32."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        return b.fpext(b.bitcast(given[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), make


@jit
def lying(address: Any, size: Any, tail: Any) -> Any:
    """A float32 row at an address."""
    return with_tail(carray(floats_at(address), size), tail)


@jit
def with_tail(x: Any, tail: Any) -> Any:
    """A row, with its last scores padded."""
    whole = x.size - x.size % GROUP
    for i in range(GROUP):
        tail[i] = x[whole + i] if whole + i < x.size else np.float32(-np.inf)
    return Scores(x, tail)


@jit
def copy(address: Any, kind: Any, x: Any) -> None:
    """The scores at an address as float32, of which ``x`` has as many as there are."""
    if kind == FLOAT32:
        move(address, x)
    elif kind == FLOAT16:
        widen(carray(halves_at(address), x.size), x)
    elif kind == BFLOAT16:
        source = carray(halves_at(address), x.size)
        for i in range(x.size):
            x[i] = simd.score(np.int32(np.uint32(source[i]) << np.uint32(16)))
    else:
        wide = carray(doubles_at(address), x.size)
        for i in range(x.size):
            x[i] = np.float32(wide[i])


@jit
def widen(source: Any, x: Any) -> None:
    """The bits of float16 as float32."""
    whole = source.size - source.size % LANES
    for i in range(0, whole, LANES):
        simd.widen(source, i, x, i)
    for i in range(whole, source.size):
        x[i] = widened(source[i])
