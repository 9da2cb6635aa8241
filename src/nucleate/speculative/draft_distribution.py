"""Probability distributions over the vocabulary, as float64 arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]
"""Probabilities [V] that sum to 1."""


def normalize(weights_V: Any) -> Distribution | None:
    """Normalize weights [V]. None if they are invalid: NaN, infinite or negative ones, or none above 0."""
    x_V = np.asarray(weights_V, np.float64)
    if x_V.ndim != 1:
        raise ValueError(f"a distribution has the shape [vocabulary], got {list(x_V.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(x_V.sum())
    if not 0 < total < np.inf or x_V.min() < 0:
        return None
    return np.asarray(x_V / total)


def sample_inverse_cdf(weights_V: Distribution, u: float) -> int:
    """Inverse-CDF sampling: the first token at which the cumulative weight exceeds u times the total; u in 0..1.

    The token has a weight above 0, whatever rounding does: u = 0 gives the first such token, 1 the last.
    """
    sums_V = weights_V.cumsum()
    token = int(sums_V.searchsorted(u * sums_V[-1], side="right"))
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def exclude_token(p_V: Distribution, token: int) -> Distribution | None:
    """The distribution without one token, renormalized; None if no other token has a probability."""
    weights_V = p_V.copy()
    weights_V[token] = 0.0
    return normalize(weights_V)


def sample_without_replacement(
    p_V: Distribution, uniforms: Iterable[float]
) -> tuple[tuple[int, ...], tuple[Distribution, ...]]:
    """Sample tokens without replacement, one per uniform number: the tokens, and the distribution of each.

    There are fewer if no other token has a probability above 0.
    """
    tokens: list[int] = []
    distributions: list[Distribution] = []
    remaining: Distribution | None = p_V
    for u in uniforms:
        if remaining is None:
            break
        distributions.append(remaining)
        tokens.append(sample_inverse_cdf(remaining, u))
        remaining = exclude_token(remaining, tokens[-1])
    return tuple(tokens), tuple(distributions)
