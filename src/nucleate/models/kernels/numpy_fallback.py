"""The kernels of a Llama in NumPy: the slow twins of ``kernels``, for who would not wait for a compiler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def add_and_normalise(x_TX: Floats, more_TX: Floats, weight_X: Floats, epsilon: np.float32, out_TX: Floats) -> None:
    """x += more, in place; out: the root-mean-square normalisation of its rows."""
    x_TX += more_TX
    np.multiply(x_TX / np.sqrt(np.mean(x_TX * x_TX, axis=-1, keepdims=True) + epsilon), weight_X, out=out_TX)


def rotate(heads_THD: Floats, cos_TD: Floats, sin_TD: Floats) -> None:
    """Rotary position embedding (Su et al., arXiv 2104.09864) in place, halves as pairs."""
    first, second = np.split(heads_THD, 2, axis=-1)
    cos_TD, sin_TD = cos_TD[:, None], sin_TD[:, None]
    first[:], second[:] = first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD


def gate(both_TY: Floats, out_TX: Floats) -> None:
    """silu(gate) * up, where a row of ``both`` is gate and up."""
    x, up = np.split(both_TY, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-x) = inf is right: the gate is shut
        np.multiply(x / (1 + np.exp(-x)), up, out=out_TX)
