"""Reads rows in kernels: float32 in place, other types converted one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils

from nucleate.jit.compiler import inline, intrinsic, jit, kernel
from nucleate.sampling.backends.numba.block_ops import half
from nucleate.sampling.backends.numba.fused.row_table import BFLOAT16, FLOAT16, FLOAT32
from nucleate.sampling.backends.numba.vector_lanes import FLOAT, GROUP, LONG, vectors


def pointer(kind: Any) -> Any:
    """A function that takes an address, and returns a pointer to numbers of a type there."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
            return b.inttoptr(given[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), make

    return pointer


floats_at, doubles_at, longs_at = pointer(types.float32), pointer(types.float64), pointer(types.int64)
words_at, halves_at = pointer(types.int32), pointer(types.uint16)


@vectors(types.int64, types.int64)
def next_of(b: Any, address: Any) -> Any:
    """Add 1 to the integer at an address, which others may do at the same time; returns what was there before."""
    return b.atomic_rmw("add", b.inttoptr(address, LONG.as_pointer()), LONG(1), "monotonic")


@vectors(types.void, types.int64, types.int64, types.int64)
def move(b: Any, source: Any, target: Any, count: Any) -> None:
    """Copy so many float32 from one address to another."""
    source, target = (b.inttoptr(address, FLOAT.as_pointer()) for address in (source, target))
    cgutils.raw_memcpy(b, target, source, count, 4)


@jit
def fill_tail(x: Any, tail: Any) -> Any:
    """Copy what is left after the last whole group, padded with -inf; returns its address."""
    whole = x.size - x.size % GROUP
    for i in range(GROUP):
        tail[i] = x[whole + i] if whole + i < x.size else np.float32(-np.inf)
    return np.int64(tail.ctypes.data)


@inline
def group_at(x: Any, tail: Any, group: Any) -> Any:
    """Where the scores of a group are."""
    return np.int64(x.ctypes.data) + 4 * GROUP * group if (group + 1) * GROUP <= x.size else np.int64(tail.ctypes.data)


@jit
def copy(address: Any, kind: Any, x: Any) -> None:
    """The scores at an address as float32, of which ``x`` has as many as there are."""
    halves, wide = carray(halves_at(address), x.size), carray(doubles_at(address), x.size)
    if kind == FLOAT32:
        move(address, np.int64(x.ctypes.data), x.size)
    elif kind == FLOAT16:
        for i in range(x.size):
            x[i] = half(halves[i])
    elif kind == BFLOAT16:
        for i in range(x.size):
            x[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    else:
        for i in range(x.size):
            x[i] = np.float32(wide[i])


@kernel("void(float32[::1], int32[::1])")
def forbid(x: Any, words: Any) -> None:
    """Take out the tokens whose bit is 0. words: int32 [V / 32 or more]."""
    for word in range((x.size + 31) // 32):
        bits, start = words[word], word * 32
        if bits != -1:
            for bit in range(min(32, x.size - start)):
                x[start + bit] -= np.float32(0.0 if (bits >> np.int32(bit)) & 1 else np.inf)
