"""Products of few rows with a matrix, compiled by Numba: a draft that is verified, or a small batch. Knows no model.

BLAS copies a matrix into an order of its own before it multiplies, unless there is one row only. For a few rows that
takes longer than all else. Here the matrix is read once, from its beginning to its end, as for one row. A row comes out
the same, to the last bit, whatever the others are and however many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.models import product as large
from nucleate.models.kernels import floats, kernel
from nucleate.models.pool import LANES, Floats
from nucleate.models.vectors import STEPS, adding

FEW = 16
"""Rows up to which this is as fast as BLAS, or faster."""
GROUP = 5
"""Rows of x that are taken together: for each of them, and STEPS of the matrix, a number stays in a register."""


_one, _two, _three, _four, _five = (adding(rows) for rows in range(1, GROUP + 1))


@kernel(floats(2), floats(2), floats(2))
def multiply(x_TX: Any, weight_XY: Any, out_TY: Any) -> None:
    """``out = x @ weight``. The rows of weight are a multiple of STEPS, its columns one of LANES."""
    count, (size, columns) = x_TX.shape[0], weight_XY.shape
    groups = (count + GROUP - 1) // GROUP
    out_TY[:] = np.float32(0)
    for i in range(0, size, STEPS):
        t = 0
        for group in range(groups):  # these rows of the matrix are near by, after the first group
            rows = (count - t + groups - group - 1) // (groups - group)
            if rows == 1:
                _one(x_TX, weight_XY, out_TY, size, columns, t, i)
            elif rows == 2:
                _two(x_TX, weight_XY, out_TY, size, columns, t, i)
            elif rows == 3:
                _three(x_TX, weight_XY, out_TY, size, columns, t, i)
            elif rows == 4:
                _four(x_TX, weight_XY, out_TY, size, columns, t, i)
            else:
                _five(x_TX, weight_XY, out_TY, size, columns, t, i)
            t += rows


def product(x_TX: Floats, weight_XY: Floats, out_TY: Floats | None = None) -> Floats:
    """``x_TX @ weight_XY``, into ``out_TY`` if it is given; by BLAS where that is as fast. Arrays are contiguous."""
    count, (size, columns) = len(x_TX), weight_XY.shape
    if not 0 < count <= FEW or size % STEPS or columns % LANES:
        return large.product(x_TX, weight_XY, out_TY)
    out = np.empty((count, columns), np.float32) if out_TY is None else out_TY
    multiply()(np.ascontiguousarray(x_TX), weight_XY, out)
    return out
