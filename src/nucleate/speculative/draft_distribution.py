"""Laws: distributions over the vocabulary as arrays. Knows neither who drew from them nor what for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.float64]
"""Chances [V] that sum to 1."""


def law_of(weights_V: Any) -> Law | None:
    """Weights [V] as a law. None if they are none: NaN, infinite or negative ones, or nothing above 0."""
    x_V = np.asarray(weights_V, np.float64)
    if x_V.ndim != 1:
        raise ValueError(f"a law has the shape [vocabulary], got {list(x_V.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(x_V.sum())
    if not 0 < total < np.inf or x_V.min() < 0:
        return None
    return np.asarray(x_V / total)


def choose(weights_V: Law, u: float) -> int:
    """The token at which the sum of the weights, in the order of ids, exceeds u of the whole; u in 0..1.

    It has a weight above 0, whatever rounding does: 0 takes the first of these, 1 the last.
    """
    sums_V = weights_V.cumsum()
    token = int(sums_V.searchsorted(u * sums_V[-1], side="right"))
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def without(law_V: Law, token: int) -> Law | None:
    """The law of a draw that is not to be this token; None if no other can be drawn."""
    weights_V = law_V.copy()
    weights_V[token] = 0.0
    return law_of(weights_V)


def siblings(law_V: Law, uniforms: Iterable[float]) -> tuple[tuple[int, ...], tuple[Law, ...]]:
    """Tokens drawn without replacement, one per uniform number, and the law that each was drawn from.

    Fewer if there are no more that can be drawn.
    """
    tokens: list[int] = []
    laws: list[Law] = []
    left: Law | None = law_V
    for u in uniforms:
        if left is None:
            break
        laws.append(left)
        tokens.append(choose(left, u))
        left = without(left, tokens[-1])
    return tuple(tokens), tuple(laws)
