"""Attention of few new tokens over keys and values in blocks, see ``attention``, compiled by Numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.jit.compiler import kernel, loose
from nucleate.models.kernels.elementwise import bits_of, exp, float_of
from nucleate.models.kernels.vector_ops import weighted
from nucleate.models.paged.kv_pool import LANES

LEAST = np.float32(-44)
"""A weight below e ** this is 0: next to the best, 1, it adds nothing, and its products would be slow subnormals."""


@loose
def _weigh(scores_L: Any, length: Any, softcap: Any, sink: Any) -> Any:
    """Turn scores into exp(score - highest), in place; their sum, with the sink's. NaN if a score is."""
    if softcap > 0:
        for i in range(length):
            scores_L[i] = np.float32(softcap * math.tanh(scores_L[i] / softcap))
    best, wrong = bits_of(np.float32(sink)), np.int32(0)
    best ^= (best >> np.int32(31)) & np.int32(0x7FFFFFFF)
    for i in range(length):
        bits = bits_of(scores_L[i])
        best = max(best, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))  # in the order of floats
        wrong |= np.int32(scores_L[i] != scores_L[i])  # a NaN with a sign is below all in that order
    if wrong:
        return np.float32(np.nan)
    highest = float_of(np.int32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    total = np.float32(0)
    for i in range(length):
        below = scores_L[i] - highest
        weight = exp(below) if below > LEAST else np.float32(0)
        scores_L[i] = weight
        total += weight
    return total + np.float32(math.exp(np.float32(sink) - highest))


@loose
def _put(
    t: Any, place: Any, keys_TKD: Any, values_TKE: Any, k: Any, pool_BKDS: Any, pool_BKSE: Any, table: Any
) -> None:
    """Put the key and value of a token and head to a place of its sequence."""
    block, at = table[place // pool_BKDS.shape[3]], place % pool_BKDS.shape[3]
    for i in range(keys_TKD.shape[2]):
        pool_BKDS[block, k, i, at] = keys_TKD[t, k, i]
    for i in range(values_TKE.shape[2]):
        pool_BKSE[block, k, at, i] = values_TKE[t, k, i]


@loose
def _lay(
    t: Any, first: Any, start: Any, followed_T2: Any, held: Any, keys_TKD: Any, values_TKE: Any, k: Any,
    pool_BKDS: Any, pool_BKSE: Any, table: Any,
) -> None:  # fmt: skip
    """Have what leads to a token of a tree, and itself, lie as a chain. held: the token at each place from start on."""
    place = followed_T2[t, 0]
    while t >= first:
        if held[place - start] != t:
            held[place - start] = t
            _put(t, place, keys_TKD, values_TKE, k, pool_BKDS, pool_BKSE, table)
        t = followed_T2[t, 1]
        place -= 1


@loose
def _list(
    first: Any, start: Any, stop: Any, held: Any, keys_TKD: Any, values_TKE: Any, k: Any, pool_BKDS: Any,
    pool_BKSE: Any, table: Any,
) -> None:  # fmt: skip
    """Have all tokens of a tree lie in their order."""
    for place in range(start, stop):
        if held[place - start] != first + place - start:
            _put(first + place - start, place, keys_TKD, values_TKE, k, pool_BKDS, pool_BKSE, table)


@loose
def _scale(queries_THD: Any, t: Any, h: Any, scaling: Any, query_GD: Any) -> None:
    """The queries of a token from head h on, for the heads that share keys."""
    for g in range(query_GD.shape[0]):
        for d in range(query_GD.shape[1]):
            query_GD[g, d] = queries_THD[t, h + g, d] * np.float32(scaling)


@loose
def _score(query_GD: Any, pool_BKDS: Any, k: Any, blocks: Any, low: Any, high: Any, scores_GL: Any) -> None:
    """The scores of all tokens of blocks low to high, also of places that nobody has written."""
    group, size_d = query_GD.shape
    kv_heads, size = pool_BKDS.shape[1], pool_BKDS.shape[3]
    for n in range(low, high):
        keys = (blocks[n] * kv_heads + k) * size_d * size
        for g in range(group):
            for s in range(0, size, LANES):
                goal = g * scores_GL.shape[1] + (n - low) * size + s
                weighted(query_GD, g * size_d, size_d, pool_BKDS, keys + s, size, scores_GL, goal, True)


@loose
def _mix(weights_GL: Any, pool_BKSE: Any, k: Any, blocks: Any, oldest: Any, length: Any, mixed_GE: Any) -> None:
    """The sums of the values of tokens oldest to length by their weights; the first weight is of a block's first."""
    kv_heads, size, size_e = pool_BKSE.shape[1], pool_BKSE.shape[2], pool_BKSE.shape[3]
    low = oldest // size
    for n in range(low, (length - 1) // size + 1):
        near, far = max(oldest - n * size, 0), min(length - n * size, size)
        values = ((blocks[n] * kv_heads + k) * size + near) * size_e
        for g in range(mixed_GE.shape[0]):
            at = g * weights_GL.shape[1] + (n - low) * size + near
            for e in range(0, size_e, LANES):
                goal = g * size_e + e
                weighted(weights_GL, at, far - near, pool_BKSE, values + e, size_e, mixed_GE, goal, n == low)


@kernel(
    "void(intp, intp, int64[::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, :, :], "
    "float32[:, :, :], float32[:, :, :], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[:, ::1], int32[::1], "
    "int64[:, ::1], float64, intp, float64, float32[::1], float32[:, :, ::1])",
    loose=True,
)
def attend(
    begin: Any, end: Any, held: Any, query_GD: Any, scores_GL: Any, mixed_GE: Any, queries_THD: Any, keys_TKD: Any,
    values_TKE: Any, pool_BKDS: Any, pool_BKSE: Any, parts: Any, blocks: Any, followed_T2: Any, scaling: Any,
    window: Any, softcap: Any, sinks_H: Any, out_THE: Any,
) -> None:  # fmt: skip
    """Items begin to end of (part, kv head); a row of ``parts``: first token, start, stop, where its blocks begin.

    held, query_GD, scores_GL and mixed_GE are room to work in.

    Where there are trees (see ``Packing.followed_T2``), each token is attended as the last of a chain, which is laid
    down for it: so its sums are those of that chain, to the last bit.
    """
    kv_heads, size = pool_BKDS.shape[1], pool_BKDS.shape[3]
    group = queries_THD.shape[1] // kv_heads
    branches = followed_T2.shape[0] > 0
    for item in range(begin, end):
        part, k = item // kv_heads, item % kv_heads
        first, start, stop, table = parts[part, 0], parts[part, 1], parts[part, 2], blocks[parts[part, 3] :]
        for place in range(start, stop):
            held[place - start] = first + place - start
            _put(first + place - start, place, keys_TKD, values_TKE, k, pool_BKDS, pool_BKSE, table)
        for place in range(start, stop):
            t, length = first + place - start, place + 1
            if branches:
                length = followed_T2[t, 0] + 1
                _lay(t, first, start, followed_T2, held, keys_TKD, values_TKE, k, pool_BKDS, pool_BKSE, table)
            oldest = max(0, length - window) if window > 0 else 0
            low = oldest // size
            _scale(queries_THD, t, k * group, scaling, query_GD)
            _score(query_GD, pool_BKDS, k, table, low, (length - 1) // size + 1, scores_GL)
            for g in range(group):
                sink = sinks_H[k * group + g] if sinks_H.size else np.float32(-np.inf)
                query_GD[g, 0] = _weigh(scores_GL[g, oldest - low * size :], length - oldest, softcap, sink)
            _mix(scores_GL, pool_BKSE, k, table, oldest, length, mixed_GE)
            for g in range(group):
                for e in range(out_THE.shape[2]):
                    out_THE[t, k * group + g, e] = mixed_GE[g, e] / query_GD[g, 0]
        if branches:
            _list(first, start, stop, held, keys_TKD, values_TKE, k, pool_BKDS, pool_BKSE, table)
