"""The kernels of a Llama layer in float32, compiled by Numba.

They are normalisation, rotary embedding, gate, matrix product, and attention of few new tokens over the paged KV cache
(``attend``). Attention sums vectors of 16 numbers in LLVM IR, which is faster than the loops that Numba vectorises
itself; LLVM splits the vectors on processors with narrower ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import intrinsic

from nucleate.jit.compiler import kernel, loose
from nucleate.models.paged_cache import VECTOR_SIZE


@extending.intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, x: Any) -> Any:
    """A float32 as the int32 of the same bits."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], context.get_value_type(types.int32))

    return types.int32(types.float32), make


@extending.intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, x: Any) -> Any:
    """An int32 as the float32 of the same bits."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], context.get_value_type(types.float32))

    return types.float32(types.int32), make


@loose
def exp(x: Any) -> Any:
    """e ** x for x <= 0 in float32, with a relative error of 2e-7, vectorised by LLVM. Never 0."""
    power = max(x * np.float32(1.4426950408889634), np.float32(-126))
    whole = np.int32(power - np.float32(0.5))
    part = power - np.float32(whole)
    series = np.float32(1.5252733804059840e-5)  # the Taylor series of 2 ** part on -0.5..0.5
    series = series * part + np.float32(1.5403530393381608e-4)
    series = series * part + np.float32(1.3333558146428443e-3)
    series = series * part + np.float32(9.6181291076284770e-3)
    series = series * part + np.float32(5.5504108664821580e-2)
    series = series * part + np.float32(2.4022650695910072e-1)
    series = series * part + np.float32(6.9314718055994530e-1)
    series = series * part + np.float32(1)
    return series * float_of(np.int32((whole + np.int32(127)) << np.int32(23)))


@kernel("void(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32[:, ::1])", loose=True)
def add_and_normalise(x_TX: Any, delta_TX: Any, weight_X: Any, epsilon: Any, out_TX: Any) -> None:
    """x += delta, in place; out: the rows of x after RMSNorm."""
    for t in range(x_TX.shape[0]):
        square = np.float32(0)
        for i in range(x_TX.shape[1]):
            x = x_TX[t, i] + delta_TX[t, i]
            x_TX[t, i] = x
            square += x * x
        scale = np.float32(1) / np.float32(math.sqrt(square / np.float32(x_TX.shape[1]) + epsilon))
        for i in range(x_TX.shape[1]):
            out_TX[t, i] = x_TX[t, i] * scale * weight_X[i]


@kernel("void(float32[:, :, :], float32[:, ::1], float32[:, ::1])", loose=True)
def rotate(heads_THD: Any, cos_TD: Any, sin_TD: Any) -> None:
    """Rotary position embedding (Su et al., arXiv 2104.09864) in place. Element i is paired with i + half."""
    half = heads_THD.shape[2] // 2
    for t in range(heads_THD.shape[0]):
        for h in range(heads_THD.shape[1]):
            for d in range(half):
                first, second = heads_THD[t, h, d], heads_THD[t, h, half + d]
                heads_THD[t, h, d] = first * cos_TD[t, d] - second * sin_TD[t, d]
                heads_THD[t, h, half + d] = second * cos_TD[t, d] + first * sin_TD[t, d]


@kernel("void(float32[:, ::1], float32[:, ::1])", loose=True)
def gate(gate_up_TY: Any, out_TX: Any) -> None:
    """silu(gate) * up; a row of ``gate_up`` is gate and up, concatenated."""
    size = out_TX.shape[1]
    for t in range(out_TX.shape[0]):
        for i in range(size):
            x = gate_up_TY[t, i]
            small = exp(-abs(x))  # of the two forms of the sigmoid, the one that cannot overflow
            top = np.float32(1) if x >= np.float32(0) else small
            out_TX[t, i] = x * gate_up_TY[t, size + i] * top / (np.float32(1) + small)


@kernel("void(float32[:, ::1], float32[:, ::1], float32[:, ::1])", loose=True)
def multiply(x_TX: Any, weight_XY: Any, out_TY: Any) -> None:
    """``out = x @ weight``, for a weight with a multiple of eight rows, which are processed at a time.

    The matrix is read once, sequentially. A row of the result is bit-identical whatever the batch size (batch
    invariance).
    """
    out_TY[:] = np.float32(0)
    for i in range(0, weight_XY.shape[0], 8):
        w0, w1, w2, w3 = weight_XY[i], weight_XY[i + 1], weight_XY[i + 2], weight_XY[i + 3]
        w4, w5, w6, w7 = weight_XY[i + 4], weight_XY[i + 5], weight_XY[i + 6], weight_XY[i + 7]
        for t in range(x_TX.shape[0]):
            x0, x1, x2, x3 = x_TX[t, i], x_TX[t, i + 1], x_TX[t, i + 2], x_TX[t, i + 3]
            x4, x5, x6, x7 = x_TX[t, i + 4], x_TX[t, i + 5], x_TX[t, i + 6], x_TX[t, i + 7]
            out_Y = out_TY[t]
            for y in range(weight_XY.shape[1]):
                first = x0 * w0[y] + x1 * w1[y] + x2 * w2[y] + x3 * w3[y]
                out_Y[y] += first + x4 * w4[y] + x5 * w5[y] + x6 * w6[y] + x7 * w7[y]


_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, VECTOR_SIZE)
_UNDEFINED = ir.Constant(_FLOATS, ir.Undefined)
_ZERO = ir.Constant(_FLOATS, [0.0] * VECTOR_SIZE)


def _data(context: Any, b: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, b, array).data


def _read(b: Any, data: Any, index: Any) -> Any:
    vector = b.load(b.bitcast(b.gep(data, [index]), _FLOATS.as_pointer()))
    vector.align = 4
    return vector


def _write(b: Any, vector: Any, data: Any, index: Any) -> None:
    b.store(vector, b.bitcast(b.gep(data, [index]), _FLOATS.as_pointer())).align = 4


def _broadcast(b: Any, data: Any, index: Any) -> Any:
    one = b.insert_element(_UNDEFINED, b.load(b.gep(data, [index])), ir.Constant(_INT, 0))
    return b.shuffle_vector(one, _UNDEFINED, ir.Constant(ir.VectorType(_INT, VECTOR_SIZE), [0] * VECTOR_SIZE))


def _add(b: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y, as a fused multiply-add where the processor has one."""
    b.store(b.fadd(b.load(total), b.fmul(x, y, flags=("contract",)), flags=("contract",)), total)


@intrinsic  # type: ignore[untyped-decorator]
def weighted_sum(
    typing: Any, weights: Any, w: Any, count: Any, rows: Any, r: Any, step: Any, out: Any, o: Any, overwrite: Any
) -> Any:  # fmt: skip
    """out[o : o + 16] += the sum over i < count of weights[w + i] * rows[r + i * step :][:16].

    The arrays are contiguous and indexed as flat. overwrite: start from 0, not from the content of ``out``.
    """

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        kinds = signature.args
        weights, rows, out = (_data(context, b, kinds[i], given[i]) for i in (0, 3, 6))
        w, count, r, step, o, overwrite = (given[i] for i in (1, 2, 4, 5, 7, 8))
        totals = [cgutils.alloca_once(b, _FLOATS) for _ in range(4)]  # four independent sums hide the latency
        b.store(b.select(overwrite, _ZERO, _read(b, out, o)), totals[0])
        for total in totals[1:]:
            b.store(_ZERO, total)
        whole = b.and_(count, ir.Constant(count.type, -4))
        zero, one, four = (ir.Constant(count.type, i) for i in (0, 1, 4))
        with cgutils.for_range_slice(b, zero, whole, four, count.type) as (i, _):
            for j in range(4):
                at = b.add(i, ir.Constant(count.type, j))
                _add(b, totals[j], _broadcast(b, weights, b.add(w, at)), _read(b, rows, b.add(r, b.mul(at, step))))
        with cgutils.for_range_slice(b, whole, count, one, count.type) as (i, _):
            _add(b, totals[0], _broadcast(b, weights, b.add(w, i)), _read(b, rows, b.add(r, b.mul(i, step))))
        pairs = [b.fadd(b.load(totals[i]), b.load(totals[i + 1])) for i in (0, 2)]
        _write(b, b.fadd(*pairs), out, o)
        return context.get_dummy_value()

    arrays = weights, rows, out
    if not all(isinstance(kind, types.Array) and kind.dtype == types.float32 and kind.layout == "C" for kind in arrays):
        return None
    index = types.intp
    return types.void(weights, index, index, rows, index, index, out, index, types.boolean), make


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
