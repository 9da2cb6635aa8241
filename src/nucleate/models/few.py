"""Products of few rows with a matrix, compiled by Numba: a draft that is verified, or a small batch. Knows no model.

BLAS copies a matrix into an order of its own before it multiplies, unless there is one row only. For a few rows that
takes longer than all else. Here the matrix is read once, from its beginning to its end, as for one row. A row comes out
the same, to the last bit, whatever the others are and however many.
"""

from __future__ import annotations

import numpy as np

from nucleate.core.libraries import MODELS
from nucleate.models import product as large
from nucleate.models.pool import LANES, STEPS, Floats

FEW = 16
"""Rows up to which this is as fast as BLAS, or faster."""


def product(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """``x_TX @ weight_XY``, into ``out_TY`` if it is given; by BLAS where that is as fast. Arrays are contiguous."""
    count, (size, columns) = len(x_TX), weight_XY.shape
    if not 0 < count <= FEW or size % STEPS or columns % LANES:
        return large.product(x_TX, weight_XY, out_TY)
    out = np.empty((count, columns), np.float32) if out_TY is None else out_TY
    MODELS.multiply(np.ascontiguousarray(x_TX), weight_XY, out)
    return out
