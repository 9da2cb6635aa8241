"""Attention of few new tokens over the paged KV cache, compiled by Numba. See ``attend``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import kernel, loose
from nucleate.models.kernels.elementwise import bits_of, exp, float_of
from nucleate.models.kernels.vector_ops import weighted_sum
from nucleate.models.paged.kv_cache import VECTOR_SIZE

MIN_EXPONENT = np.float32(-44)
"""Weights below e ** this are 0: relative to the largest, 1, they add nothing, and subnormal products are slow."""


@loose
def _softmax_weights(scores_L: Any, length: Any, softcap: Any, sink: Any) -> Any:
    """Replace scores by exp(score - maximum), and return their sum, with the sink's. NaN if a score is NaN."""
    if softcap > 0:
        for i in range(length):
            scores_L[i] = np.float32(softcap * math.tanh(scores_L[i] / softcap))
    top, invalid = bits_of(np.float32(sink)), np.int32(0)
    top ^= (top >> np.int32(31)) & np.int32(0x7FFFFFFF)
    for i in range(length):
        bits = bits_of(scores_L[i])
        top = max(top, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))  # integers ordered as floats
        invalid |= np.int32(scores_L[i] != scores_L[i])  # a negative NaN is the least in that order
    if invalid:
        return np.float32(np.nan)
    maximum = float_of(np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    total = np.float32(0)
    for i in range(length):
        exponent = scores_L[i] - maximum
        weight = exp(exponent) if exponent > MIN_EXPONENT else np.float32(0)
        scores_L[i] = weight
        total += weight
    return total + np.float32(math.exp(np.float32(sink) - maximum))


@loose
def _store(
    t: Any, index: Any, keys_TKD: Any, values_TKE: Any, k: Any, cache_BKDS: Any, cache_BKSE: Any, block_table: Any
) -> None:
    """Store the key and value of a token, for one head, at an index of its sequence."""
    block, offset = block_table[index // cache_BKDS.shape[3]], index % cache_BKDS.shape[3]
    for i in range(keys_TKD.shape[2]):
        cache_BKDS[block, k, i, offset] = keys_TKD[t, k, i]
    for i in range(values_TKE.shape[2]):
        cache_BKSE[block, k, offset, i] = values_TKE[t, k, i]


@loose
def _store_path(
    t: Any, first: Any, start: Any, tree_links_T2: Any, stored: Any, keys_TKD: Any, values_TKE: Any, k: Any,
    cache_BKDS: Any, cache_BKSE: Any, block_table: Any,
) -> None:  # fmt: skip
    """Store a token of a tree and its ancestors at their positions. stored: the token at each index from start on."""
    index = tree_links_T2[t, 0]
    while t >= first:
        if stored[index - start] != t:
            stored[index - start] = t
            _store(t, index, keys_TKD, values_TKE, k, cache_BKDS, cache_BKSE, block_table)
        t = tree_links_T2[t, 1]
        index -= 1


@loose
def _store_in_order(
    first: Any, start: Any, stop: Any, stored: Any, keys_TKD: Any, values_TKE: Any, k: Any, cache_BKDS: Any,
    cache_BKSE: Any, block_table: Any,
) -> None:  # fmt: skip
    """Store all tokens of a tree in the order of the batch."""
    for index in range(start, stop):
        if stored[index - start] != first + index - start:
            _store(first + index - start, index, keys_TKD, values_TKE, k, cache_BKDS, cache_BKSE, block_table)


@loose
def _scale(queries_THD: Any, t: Any, h: Any, scaling: Any, query_GD: Any) -> None:
    """The scaled queries of a token, for the heads from h on that share a key head."""
    for g in range(query_GD.shape[0]):
        for d in range(query_GD.shape[1]):
            query_GD[g, d] = queries_THD[t, h + g, d] * np.float32(scaling)


@loose
def _scores(query_GD: Any, cache_BKDS: Any, k: Any, blocks: Any, low: Any, high: Any, scores_GL: Any) -> None:
    """The scores of all slots of blocks low to high, including slots that have never been written."""
    group, size_d = query_GD.shape
    kv_heads, size = cache_BKDS.shape[1], cache_BKDS.shape[3]
    for n in range(low, high):
        keys = (blocks[n] * kv_heads + k) * size_d * size
        for g in range(group):
            for s in range(0, size, VECTOR_SIZE):
                target = g * scores_GL.shape[1] + (n - low) * size + s
                weighted_sum(query_GD, g * size_d, size_d, cache_BKDS, keys + s, size, scores_GL, target, True)


@loose
def _mix(weights_GL: Any, cache_BKSE: Any, k: Any, blocks: Any, oldest: Any, length: Any, mixed_GE: Any) -> None:
    """Sum the values of tokens oldest to length, weighted. ``weights_GL`` starts at the first slot of a block."""
    kv_heads, size, size_e = cache_BKSE.shape[1], cache_BKSE.shape[2], cache_BKSE.shape[3]
    low = oldest // size
    for n in range(low, (length - 1) // size + 1):
        begin, end = max(oldest - n * size, 0), min(length - n * size, size)
        values = ((blocks[n] * kv_heads + k) * size + begin) * size_e
        for g in range(mixed_GE.shape[0]):
            weights = g * weights_GL.shape[1] + (n - low) * size + begin
            for e in range(0, size_e, VECTOR_SIZE):
                target = g * size_e + e
                weighted_sum(
                    weights_GL, weights, end - begin, cache_BKSE, values + e, size_e, mixed_GE, target, n == low
                )


@kernel(
    "void(intp, intp, int64[::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, :, :], "
    "float32[:, :, :], float32[:, :, :], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[:, ::1], int32[::1], "
    "int64[:, ::1], float64, intp, float64, float32[::1], float32[:, :, ::1])",
    loose=True,
)
def attend(
    begin: Any, end: Any, stored: Any, query_GD: Any, scores_GL: Any, mixed_GE: Any, queries_THD: Any, keys_TKD: Any,
    values_TKE: Any, cache_BKDS: Any, cache_BKSE: Any, inputs: Any, blocks: Any, tree_links_T2: Any, scaling: Any,
    window: Any, softcap: Any, sinks_H: Any, out_THE: Any,
) -> None:  # fmt: skip
    """Store keys and values and compute attention, for the items begin to end of (input, kv head).

    inputs, blocks, tree_links_T2: see ``BatchLayout``. stored, query_GD, scores_GL and mixed_GE are workspace.

    In a draft tree, each token is attended as the last of a chain: its ancestors are first stored at their positions.
    So its sums are bit-identical to those of the chain.
    """
    kv_heads, size = cache_BKDS.shape[1], cache_BKDS.shape[3]
    group = queries_THD.shape[1] // kv_heads
    has_trees = tree_links_T2.shape[0] > 0
    for item in range(begin, end):
        row, k = item // kv_heads, item % kv_heads
        first, start, stop, table = inputs[row, 0], inputs[row, 1], inputs[row, 2], blocks[inputs[row, 3] :]
        for index in range(start, stop):
            stored[index - start] = first + index - start
            _store(first + index - start, index, keys_TKD, values_TKE, k, cache_BKDS, cache_BKSE, table)
        for index in range(start, stop):
            t, length = first + index - start, index + 1
            if has_trees:
                length = tree_links_T2[t, 0] + 1
                _store_path(
                    t, first, start, tree_links_T2, stored, keys_TKD, values_TKE, k, cache_BKDS, cache_BKSE, table
                )
            oldest = max(0, length - window) if window > 0 else 0
            low = oldest // size
            _scale(queries_THD, t, k * group, scaling, query_GD)
            _scores(query_GD, cache_BKDS, k, table, low, (length - 1) // size + 1, scores_GL)
            for g in range(group):
                sink = sinks_H[k * group + g] if sinks_H.size else np.float32(-np.inf)
                query_GD[g, 0] = _softmax_weights(scores_GL[g, oldest - low * size :], length - oldest, softcap, sink)
            _mix(scores_GL, cache_BKSE, k, table, oldest, length, mixed_GE)
            for g in range(group):
                for e in range(out_THE.shape[2]):
                    out_THE[t, k * group + g, e] = mixed_GE[g, e] / query_GD[g, 0]
        if has_trees:
            _store_in_order(first, start, stop, stored, keys_TKD, values_TKE, k, cache_BKDS, cache_BKSE, table)
