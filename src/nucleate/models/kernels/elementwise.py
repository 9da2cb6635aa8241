"""Kernels of a Llama layer in float32, compiled by Numba: normalisation, rotary embedding, gate, matrix product."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import extending, types

from nucleate.jit.compiler import kernel, loose


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
