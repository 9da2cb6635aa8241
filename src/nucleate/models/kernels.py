"""Small kernels for models on CPU in float32, compiled by Numba and kept on disk, see ``core.kept``. Knows no model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import extending, types

from nucleate.core import kept
from nucleate.core.compiling import compiled

NAMES = ("attention.py", "branches.py", "few.py", "kernels.py", "pool.py", "vectors.py")
SOURCES = [Path(__file__).parent / name for name in NAMES]
FLOAT, LONG = types.float32, types.int64


def floats(dimensions: int, layout: str = "C") -> Any:
    """The type of a float32 array."""
    return types.Array(FLOAT, dimensions, layout)


def kernel(*signature: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """A function that gives the kernel: compiled on the first call, for these types only, or read from disk."""

    def later(function: Callable[..., Any]) -> Callable[[], Any]:
        settings: dict[str, Any] = dict(nogil=True, error_model="numpy", fastmath=LOOSE)
        decorator = functools.partial(numba.njit, types.void(*signature), **settings)
        return functools.cache(lambda: compiled(function, decorator, folder(), "the kernels for models", 5))

    return later


@functools.cache
def folder() -> Path:
    """Where the kernels of this version of the sources are kept."""
    return kept.folder(numba.__version__, SOURCES, "models-")


LOOSE = {"reassoc", "contract", "nsz"}
"""Sums may be added in any order, and so in vectors. NaN and inf stay what they are."""


def loose(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=LOOSE, no_cfunc_wrapper=True)(function)


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
    """e ** x for x <= 0 of float32, to 2e-7 of the result, in a form that loops do in vectors; 0 < e ** -87 below."""
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


@kernel(floats(2), floats(2), floats(1), FLOAT, floats(2))
def add_and_normalise(x_TX: Any, more_TX: Any, weight_X: Any, epsilon: Any, out_TX: Any) -> None:
    """x += more, in place; out: the root-mean-square normalisation of its rows."""
    for t in range(x_TX.shape[0]):
        square = np.float32(0)
        for i in range(x_TX.shape[1]):
            x = x_TX[t, i] + more_TX[t, i]
            x_TX[t, i] = x
            square += x * x
        scale = np.float32(1) / np.float32(math.sqrt(square / np.float32(x_TX.shape[1]) + epsilon))
        for i in range(x_TX.shape[1]):
            out_TX[t, i] = x_TX[t, i] * scale * weight_X[i]


@kernel(floats(3, "A"), floats(2), floats(2))
def rotate(heads_THD: Any, cos_TD: Any, sin_TD: Any) -> None:
    """Rotary position embedding (Su et al., arXiv 2104.09864) in place, halves as pairs."""
    half = heads_THD.shape[2] // 2
    for t in range(heads_THD.shape[0]):
        for h in range(heads_THD.shape[1]):
            for d in range(half):
                first, second = heads_THD[t, h, d], heads_THD[t, h, half + d]
                heads_THD[t, h, d] = first * cos_TD[t, d] - second * sin_TD[t, d]
                heads_THD[t, h, half + d] = second * cos_TD[t, d] + first * sin_TD[t, d]


@kernel(floats(2), floats(2))
def gate(both_TY: Any, out_TX: Any) -> None:
    """silu(gate) * up, where a row of ``both`` is gate and up."""
    size = out_TX.shape[1]
    for t in range(out_TX.shape[0]):
        for i in range(size):
            x = both_TY[t, i]
            small = exp(-abs(x))  # the half of the sigmoid that cannot overflow
            top = np.float32(1) if x >= np.float32(0) else small
            out_TX[t, i] = x * both_TY[t, size + i] * top / (np.float32(1) + small)
