"""The paged KV cache of a layer as arrays, and the attention settings of a layer.

Keys are [blocks, kv heads, head size, block size], values [blocks, kv heads, block size, head size]: what a head reads
of a block is contiguous, in the order in which the attention kernel reads it. The block size and the allocated head
size of values are multiples of ``VECTOR_SIZE``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
KVCache = tuple[Floats, Floats]
"""Keys and values of a layer."""
NO_SINKS = np.empty(0, np.float32)
VECTOR_SIZE = 16
"""Float32 numbers per vector instruction of the kernels."""


def allocate_kv_cache(blocks: int, block_size: int, kv_heads: int, key_size: int, value_size: int) -> KVCache:
    """An empty cache. The system assigns memory when a block is first written."""
    if block_size % VECTOR_SIZE:
        raise ValueError(f"block_size must be a multiple of {VECTOR_SIZE}, got {block_size}")
    keys = np.empty((blocks, kv_heads, key_size, block_size), np.float32)
    return keys, np.empty((blocks, kv_heads, block_size, -(-value_size // VECTOR_SIZE) * VECTOR_SIZE), np.float32)


def copy_blocks(cache: KVCache, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks: pairs of source and target. No target is a source."""
    for source, target in pairs:
        for array in cache:
            array[target] = array[source]


def copy_slots(cache: KVCache, sources_N: NDArray[np.int64], targets_N: NDArray[np.int64]) -> None:
    """Copy slots (block * block size + offset). All sources are read before any target is written."""
    size = cache[0].shape[3]
    (from_N, from_offset_N), (to_N, to_offset_N) = np.divmod(sources_N, size), np.divmod(targets_N, size)
    for array in token_major(cache, cache[1].shape[3]):
        array[to_N, :, to_offset_N] = array[from_N, :, from_offset_N]


class AttentionRule(NamedTuple):
    """The attention settings of a layer."""

    scaling: float  #: factor of the scores
    window: int = 0  #: size of the sliding window in tokens, the token itself included; 0: none
    softcap: float = 0.0  #: c in c * tanh(score / c); 0: none
    sinks: Floats = NO_SINKS  #: attention sinks: one extra score per head, without a value


def token_major(cache: KVCache, value_size: int) -> KVCache:
    """Views of keys and values as [blocks, kv heads, block size, head size]."""
    return cache[0].swapaxes(2, 3), cache[1][..., :value_size]
