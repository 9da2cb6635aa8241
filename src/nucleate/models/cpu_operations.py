"""The operations of a Llama layer in float32 on CPU: matrix products, and NumPy versions of the other kernels.

Large matrix products run on nucleate's threads, those of few rows in a kernel. BLAS is limited to one thread
(``one_thread``): its threads spin between products, which slows down everything else on the machine, such as an event
loop. The NumPy versions are used until the kernels are compiled, and are their reference.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import MODELS
from nucleate.jit.thread_pool import cores
from nucleate.jit.thread_pool import pool as thread_pool

Floats = NDArray[np.float32]
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
    jobs = [
        (thread_pool().submit(np.matmul, x_TX[begin:end], weight_XY, out=out[begin:end]), begin, end)
        for begin, end in pairwise(bounds[1:])
    ]
    np.matmul(x_TX[: bounds[1]], weight_XY, out=out[: bounds[1]])
    for job, begin, end in reversed(jobs):
        if job.cancel():  # not started: the other threads may not have been scheduled
            np.matmul(x_TX[begin:end], weight_XY, out=out[begin:end])
        else:
            job.result()
    return out


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
