"""Reads rows in kernels: float32 in place, other types converted one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils

from nucleate.jit.compiler import inline, intrinsic, jit, kernel
from nucleate.sampling.cpu.block_ops import FLOAT, GROUP_SIZE, LONG, float16_to_float32, vector_function

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = range(4)
"""The data types of logits, in the order of ``inputs.LOGITS_DTYPES``."""


def pointer(dtype: Any) -> Any:
    """A kernel function that turns an address into a pointer to numbers of a type."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            return b.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), emit

    return pointer


floats_at, doubles_at, longs_at = pointer(types.float32), pointer(types.float64), pointer(types.int64)
words_at, halves_at = pointer(types.int32), pointer(types.uint16)


@vector_function(types.int64, types.int64)
def fetch_add_one(b: Any, address: Any) -> Any:
    """Atomically add 1 to the integer at an address. Returns the value before."""
    return b.atomic_rmw("add", b.inttoptr(address, LONG.as_pointer()), LONG(1), "monotonic")


@vector_function(types.void, types.int64, types.int64, types.int64)
def copy_floats(b: Any, source: Any, target: Any, count: Any) -> None:
    """Copy ``count`` float32 between addresses."""
    source, target = (b.inttoptr(address, FLOAT.as_pointer()) for address in (source, target))
    cgutils.raw_memcpy(b, target, source, count, 4)


@jit
def pad_tail(x: Any, tail: Any) -> Any:
    """Copy the scores after the last full group to ``tail``, padded with -inf. Returns its address."""
    whole = x.size - x.size % GROUP_SIZE
    for i in range(GROUP_SIZE):
        tail[i] = x[whole + i] if whole + i < x.size else np.float32(-np.inf)
    return np.int64(tail.ctypes.data)


@inline
def group_address(x: Any, tail: Any, group: Any) -> Any:
    """The address of a group's scores: in x, or in the tail."""
    in_row, in_tail = np.int64(x.ctypes.data) + 4 * GROUP_SIZE * group, np.int64(tail.ctypes.data)
    return in_row if (group + 1) * GROUP_SIZE <= x.size else in_tail


@jit
def convert_row(address: Any, dtype: Any, x: Any) -> None:
    """Read ``x.size`` scores at an address into x, as float32."""
    halves, doubles = carray(halves_at(address), x.size), carray(doubles_at(address), x.size)
    if dtype == FLOAT32:
        copy_floats(address, np.int64(x.ctypes.data), x.size)
    elif dtype == FLOAT16:
        for i in range(x.size):
            x[i] = float16_to_float32(halves[i])
    elif dtype == BFLOAT16:
        for i in range(x.size):
            x[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    else:
        for i in range(x.size):
            x[i] = np.float32(doubles[i])


@kernel("void(float32[::1], int32[::1])")
def apply_token_bitmask(x: Any, words: Any) -> None:
    """Set the scores of tokens whose bit is 0 to -inf. words: int32 [at least V / 32]."""
    for word in range((x.size + 31) // 32):
        bits, start = words[word], word * 32
        if bits != -1:
            for bit in range(min(32, x.size - start)):
                x[start + bit] -= np.float32(0.0 if (bits >> np.int32(bit)) & 1 else np.inf)
