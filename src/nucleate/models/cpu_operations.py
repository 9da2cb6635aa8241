"""The operations of a Llama layer in float32 on CPU: matrix products, attention, and NumPy versions of the kernels.

Large matrix products run on nucleate's threads, those of few rows in a kernel. BLAS is limited to one thread
(``one_thread``): its threads spin between products, which slows down everything else on the machine, such as an event
loop. The NumPy versions are used until the kernels are compiled, and are their reference.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import MODELS
from nucleate.jit.thread_pool import cores
from nucleate.jit.thread_pool import pool as thread_pool
from nucleate.models.paged_cache import MAX_TREE_TOKENS, AttentionRule, BatchLayout, Floats, KVCache, token_major

MAX_KERNEL_ROWS = 16
"""Up to this many rows, the kernel is about as fast as BLAS or faster."""
SPIN_COUNT = "2000"
"""GOMP_SPINCOUNT for idle threads of torch and llama.cpp; OpenMP's default is a hundred times as high."""
MULTIPLICATIONS_PER_THREAD = 1 << 25
"""The work that justifies starting another thread."""


def limit_spinning() -> None:
    """Let idle threads of OpenMP sleep early, unless it is loaded: other threads can use the cores."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def matmul(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """``x_TX @ weight_XY`` with BLAS, into ``out_TY`` if given."""
    rows = len(x_TX)
    out = np.empty((rows, weight_XY.shape[1]), np.float32) if out_TY is None else out_TY
    threads = min(cores(), 1 + rows * weight_XY.size // MULTIPLICATIONS_PER_THREAD)
    bounds = [rows * thread // threads for thread in range(threads + 1)]
    in_parallel(lambda begin, end: np.matmul(x_TX[begin:end], weight_XY, out=out[begin:end]), bounds)
    return out


def in_parallel(work: Callable[[int, int], object], bounds: Sequence[int]) -> None:
    """Call ``work`` for each range of adjacent bounds: the first one here, the others on threads that start in time."""
    jobs = [(thread_pool().submit(work, begin, end), begin, end) for begin, end in pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
        for job, begin, end in reversed(jobs):
            if job.cancel():  # not started: the other threads may not have been scheduled
                work(begin, end)
    finally:
        for job, _, _ in jobs:
            if not job.cancel():
                job.result()


def compiled_matmul(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """The same, with a kernel for few rows (a small batch, or the verification of draft tokens). Arrays are contiguous.

    BLAS repacks the matrix before it multiplies, except for a single row. For few rows, that takes longer than the
    product itself.
    """
    rows, (size, columns) = len(x_TX), weight_XY.shape
    if not 0 < rows <= MAX_KERNEL_ROWS or size % 8:
        return matmul(x_TX, weight_XY, out_TY)
    out = np.empty((rows, columns), np.float32) if out_TY is None else out_TY
    MODELS.multiply(np.ascontiguousarray(x_TX), weight_XY, out)
    return out


def invariant_matmul(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """The same, with the kernel for any number of rows: each row has the same bits in every batch."""
    out = np.empty((len(x_TX), weight_XY.shape[1]), np.float32) if out_TY is None else out_TY
    bounds = range(0, len(x_TX) + MAX_KERNEL_ROWS, MAX_KERNEL_ROWS)

    def multiply(begin: int, end: int) -> None:
        for start in range(begin, end, MAX_KERNEL_ROWS):
            rows = slice(start, min(start + MAX_KERNEL_ROWS, end))
            MODELS.multiply(np.ascontiguousarray(x_TX[rows]), weight_XY, out[rows])

    threads = min(cores(), len(bounds) - 1, 1 + len(x_TX) * weight_XY.size // MULTIPLICATIONS_PER_THREAD)
    split = [bounds[(len(bounds) - 1) * thread // threads] for thread in range(threads)] if threads else [0]
    in_parallel(multiply, [*split, len(x_TX)])
    return out


@functools.cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # only the NumPy models need it: torch models run without it

    return ThreadpoolController()


def one_thread() -> AbstractContextManager[object]:
    """Limits BLAS to one thread: on products this small, several threads are up to ten times slower than one."""
    return _blas().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


def add_and_normalise(x_TX: Floats, delta_TX: Floats, weight_X: Floats, epsilon: np.float32, out_TX: Floats) -> None:
    """x += delta, in place; out: the rows of x after RMSNorm."""
    x_TX += delta_TX
    np.multiply(x_TX / np.sqrt(np.mean(x_TX * x_TX, axis=-1, keepdims=True) + epsilon), weight_X, out=out_TX)


def rotate(heads_THD: Floats, cos_TD: Floats, sin_TD: Floats) -> None:
    """Rotary position embedding (Su et al., arXiv 2104.09864) in place. Element i is paired with i + half."""
    first, second = np.split(heads_THD, 2, axis=-1)
    cos_TD, sin_TD = cos_TD[:, None], sin_TD[:, None]
    first[:], second[:] = first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD


def gate(gate_up_TY: Floats, out_TX: Floats) -> None:
    """silu(gate) * up; a row of ``gate_up`` is gate and up, concatenated."""
    x, up = np.split(gate_up_TY, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the correct result, 0
        np.multiply(x / (1 + np.exp(-x)), up, out=out_TX)


MIN_BYTES = 2 << 20
"""Size of the KV cache entries to read from which a second thread is worth its start of 50 microseconds."""


def attend(
    query_THD: Floats, key_TKD: Floats, value_TKD: Floats, cache: KVCache, layout: BatchLayout, rule: AttentionRule
) -> Floats:
    """Store the keys and values of new tokens, and return the attention [T, heads, size] of every new token.

    Query heads that share a key head are adjacent (grouped-query attention).
    """
    out_THD = np.empty(query_THD.shape, np.float32)
    store(cache, layout, key_TKD, value_TKD)
    _attend(query_THD, cache, layout, layout.inputs, rule, out_THD)
    return out_THD


def attend_compiled(
    query_THD: Floats, key_TKD: Floats, value_TKD: Floats, cache: KVCache, layout: BatchLayout, rule: AttentionRule
) -> Floats:
    """The same, with the kernel for inputs of few new tokens."""
    out_THD = np.empty(query_THD.shape, np.float32)
    if layout.has_long:
        store(cache, layout, key_TKD, value_TKD)
    if len(layout.short):
        decode_attention(query_THD, key_TKD, value_TKD, cache, layout, rule, out_THD)
    _attend(query_THD, cache, layout, layout.long, rule, out_THD)
    return out_THD


def _attend(
    query_THD: Floats, cache: KVCache, layout: BatchLayout, inputs: NDArray[np.int64], rule: AttentionRule,
    out_THD: Floats,
) -> None:  # fmt: skip
    """The attention of some inputs (rows of ``layout.inputs``), in NumPy."""
    for first, start, stop, table in inputs.tolist():
        block_table = layout.blocks[table : table + -(-stop // layout.block_size)]
        tokens = slice(first, first + stop - start)
        if first in layout.trees:
            hidden = ~layout.trees[first].mask(start)
        else:
            hidden = np.arange(stop) > np.arange(start, stop)[:, None]
        out_THD[tokens] = attend_sequence(query_THD[tokens], cache, block_table, stop, rule.scaling, hidden)


def store(cache: KVCache, layout: BatchLayout, key_TKD: Floats, value_TKD: Floats) -> None:
    """Write keys and values to the slots of their tokens."""
    block_T, offset_T = np.divmod(layout.slots, layout.block_size)
    for stored, new in zip(token_major(cache, value_TKD.shape[2]), (key_TKD, value_TKD), strict=True):
        stored[block_T, :, offset_T] = new


def attend_sequence(
    query_THD: Floats, cache: KVCache, block_table: NDArray[np.int32], length: int, scaling: float,
    hidden_TL: NDArray[np.bool_] | None = None,
) -> Floats:  # fmt: skip
    """Attention [T, heads, size] of tokens of one sequence over its first ``length`` tokens, except those hidden."""
    count, heads, size = query_THD.shape
    kv_heads = cache[0].shape[1]
    keys, values = (
        array[block_table].swapaxes(0, 1).reshape(kv_heads, -1, size)[:, :length] for array in token_major(cache, size)
    )
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


def decode_attention(
    query_THD: Floats, key_TKD: Floats, value_TKE: Floats, cache: KVCache, layout: BatchLayout, rule: AttentionRule,
    out_THE: Floats, threads: int | None = None,
) -> None:  # fmt: skip
    """Store the keys and values of the short inputs of a batch, and compute their attention, with the kernel.

    Arrays contain all T tokens of the batch, with any strides. Rows of long inputs in ``out_THE`` are not written.
    threads: the maximum number of threads; None for ``cores()``.
    """
    kv_heads, size = cache[0].shape[1], cache[0].shape[2] + cache[1].shape[3]
    count = min(cores(), threads or cores()) if layout.total_keys * kv_heads * size * 4 >= MIN_BYTES else 1
    bounds = layout.split(kv_heads, rule.window, 2 * count if count > 1 else 1)
    batch = layout.short, layout.blocks, layout.tree_links_T2
    arguments: Any = (query_THD, key_TKD, value_TKE, *cache, *batch, *rule, out_THE)
    group = query_THD.shape[1] // kv_heads

    def work(begin: int, end: int) -> None:
        MODELS.attend(begin, end, *_workspace(group, cache, layout.max_keys), *arguments)

    in_parallel(work, bounds)


def _workspace(group: int, cache: KVCache, max_keys: int) -> tuple[Any, ...]:
    """Buffers for one thread: the tokens of a tree; queries, scores and outputs of the heads that share a key head."""
    _, _, key_size, block_size = cache[0].shape
    query_GD = np.empty((group, key_size), np.float32)
    scores_GL = np.empty((group, (max_keys // block_size + 1) * block_size), np.float32)
    return np.empty(MAX_TREE_TOKENS, np.int64), query_GD, scores_GL, np.empty((group, cache[1].shape[3]), np.float32)
