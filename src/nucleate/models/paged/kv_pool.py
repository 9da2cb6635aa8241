"""Keys and values in blocks, as arrays, and how a layer attends to them. Knows no kernel and no model.

A pool is an array of keys [blocks, kv heads, head size, block size] and one of values [blocks, kv heads, block size,
head size]: what a head reads of a block lies together, in the order of the sums. The block size, and the head size of
values, are multiples of 16; see ``new_pool``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Pool = tuple[Floats, Floats]
NO_SINKS = np.empty(0, np.float32)
LANES = 16
"""Numbers that a kernel takes at a time."""


def new_pool(blocks: int, block_size: int, kv_heads: int, key_size: int, value_size: int) -> Pool:
    """Keys and values for the kernel; memory is taken when it is first written."""
    if block_size % LANES:
        raise ValueError(f"the kernel needs blocks of a multiple of {LANES} tokens, got {block_size}")
    keys = np.empty((blocks, kv_heads, key_size, block_size), np.float32)
    return keys, np.empty((blocks, kv_heads, block_size, -(-value_size // LANES) * LANES), np.float32)


def copy_blocks(pool: Pool, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy blocks to others, as whole ones; none of the targets is a source."""
    for source, target in pairs:
        for array in pool:
            array[target] = array[source]


def copy_places(pool: Pool, sources_N: NDArray[np.int64], targets_N: NDArray[np.int64]) -> None:
    """Copy what lies at some slots (block * block size + place) to others: all are read before any is written."""
    size = pool[0].shape[3]
    (from_N, place_N), (to_N, goal_N) = np.divmod(sources_N, size), np.divmod(targets_N, size)
    for array in by_token(pool, pool[1].shape[3]):
        array[to_N, :, goal_N] = array[from_N, :, place_N]


class AttentionRule(NamedTuple):
    """How a layer attends."""

    scaling: float  #: of the products
    window: int = 0  #: a token sees itself and what is less than so many tokens before it; 0: everything before it
    softcap: float = 0.0  #: c in c * tanh(score / c); 0: none
    sinks: Floats = NO_SINKS  #: a score per head that takes its part of the weight and adds nothing


def by_token(pool: Pool, value_size: int) -> Pool:
    """The same memory, seen as [blocks, kv heads, block size, head size] twice."""
    return pool[0].swapaxes(2, 3), pool[1][..., :value_size]
