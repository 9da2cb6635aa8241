"""Attention over the paged KV cache, in float32.

Few new tokens of a sequence are left to a kernel, if there is one; the rest, as parts of prompts are, is done in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nucleate.models.paged.batch_layout import BatchLayout
from nucleate.models.paged.kv_pool import AttentionRule, Floats, Pool, by_token

Decode = Callable[..., None]
"""``nucleate.models.kernels.paged_attention.decode``."""


def attend(
    query_THD: Floats, key_TKD: Floats, value_TKD: Floats, pool: Pool, packing: BatchLayout, rule: AttentionRule,
    decode: Decode | None = None,
) -> Floats:  # fmt: skip
    """Attention [T, heads, size] of every token over its sequence or branch; new keys and values are stored first.

    decode: the kernel; without it, all attend as long parts do. Heads of queries that share keys lie together.
    """
    out_THD = np.empty(query_THD.shape, np.float32)
    alone = packing.parts if decode is None else packing.long
    if len(alone):
        store(pool, packing, key_TKD, value_TKD)
    if decode is not None and len(packing.short):
        decode(query_THD, key_TKD, value_TKD, pool, packing, rule, out_THD)
    for first, start, stop, table in alone.tolist():
        blocks = packing.blocks[table : table + -(-stop // packing.block_size)]
        tokens = slice(first, first + stop - start)
        if first in packing.trees:
            hidden = ~packing.trees[first].seen(start)
        else:
            hidden = np.arange(stop) > np.arange(start, stop)[:, None]
        out_THD[tokens] = mix(query_THD[tokens], pool, blocks, stop, rule.scaling, hidden)
    return out_THD


def store(pool: Pool, packing: BatchLayout, key_TKD: Floats, value_TKD: Floats) -> None:
    """Write keys and values to the slots of their tokens."""
    blocks_T, places_T = np.divmod(packing.slots, packing.block_size)
    for kept, new in zip(by_token(pool, value_TKD.shape[2]), (key_TKD, value_TKD), strict=True):
        kept[blocks_T, :, places_T] = new


def mix(
    query_THD: Floats, pool: Pool, blocks: NDArray[np.int32], length: int, scaling: float,
    hidden_TL: NDArray[np.bool_] | None = None,
) -> Floats:  # fmt: skip
    """Attention [T, heads, size] of some tokens over the first ``length`` tokens of a sequence, without masked ones."""
    count, heads, size = query_THD.shape
    kv_heads = pool[0].shape[1]
    keys, values = (x[blocks].swapaxes(0, 1).reshape(kv_heads, -1, size)[:, :length] for x in by_token(pool, size))
    grouped = query_THD.swapaxes(0, 1).reshape(kv_heads, -1, size) * np.float32(scaling)
    scores = (grouped @ keys.swapaxes(1, 2)).reshape(heads, count, length)
    if hidden_TL is not None:
        scores += np.where(hidden_TL, np.float32(-np.inf), np.float32(0))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed = scores.reshape(kv_heads, -1, length) @ values
    mixed = mixed.reshape(heads, count, size) / scores.sum(axis=-1, keepdims=True)
    out: Floats = mixed.swapaxes(0, 1)
    return out
