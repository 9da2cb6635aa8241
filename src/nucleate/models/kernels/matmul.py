"""Products of matrices, large ones over our own threads. Knows no model.

The threads of BLAS stay awake between products: where anything else wants a core (an event loop, another process), a
forward would take ten times as long. So BLAS is held to one (see ``one_thread``), and rows are shared out here.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import MODELS
from nucleate.jit.thread_pool import cores
from nucleate.jit.thread_pool import pool as workers

Floats = NDArray[np.float32]
FEW = 16
"""Rows up to which the kernel is about as fast as BLAS, or faster."""
LARGE = 1 << 25
"""Multiplications from which another thread is worth its start."""


def product(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """``x_TX @ weight_XY``, into ``out_TY`` if it is given."""
    count = len(x_TX)
    out = np.empty((count, weight_XY.shape[1]), np.float32) if out_TY is None else out_TY
    shares = min(cores(), 1 + count * weight_XY.size // LARGE)
    cuts = [count * share // shares for share in range(shares + 1)]
    given = [
        (workers().submit(np.matmul, x_TX[begin:end], weight_XY, out=out[begin:end]), begin, end)
        for begin, end in pairwise(cuts[1:])
    ]
    np.matmul(x_TX[: cuts[1]], weight_XY, out=out[: cuts[1]])
    for job, begin, end in reversed(given):
        if job.cancel():  # nobody has begun with it: the other threads may have been given no time
            np.matmul(x_TX[begin:end], weight_XY, out=out[begin:end])
        else:
            job.result()
    return out


def compiled_product(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """The same, of few rows by a kernel: a draft that is verified, or a small batch. Arrays are contiguous.

    BLAS copies a matrix into an order of its own before it multiplies, unless there is one row only. For a few rows
    that takes longer than all else.
    """
    count, (size, columns) = len(x_TX), weight_XY.shape
    if not 0 < count <= FEW or size % 8:
        return product(x_TX, weight_XY, out_TY)
    out = np.empty((count, columns), np.float32) if out_TY is None else out_TY
    MODELS.multiply(np.ascontiguousarray(x_TX), weight_XY, out)
    return out
