"""The product of few rows with a matrix, see ``few``, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.core.compiling import kernel
from nucleate.models.pool import STEPS
from nucleate.models.vectors import adding

GROUP = 5
"""Rows of x that are taken together: for each of them, and STEPS of the matrix, a number stays in a register."""


_one, _two, _three, _four, _five = (adding(rows) for rows in range(1, GROUP + 1))


@kernel("void(float32[:, ::1], float32[:, ::1], float32[:, ::1])", loose=True)
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
