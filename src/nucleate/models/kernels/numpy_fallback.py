"""NumPy versions of the kernels of a Llama layer: used until the kernels are compiled, and their reference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


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
