"""The functions that a stage rule may use, for numbers, NumPy arrays and torch tensors.

A rule is one expression of these and of Python's operators, so every backend can evaluate it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

INFINITY = float("inf")
"""A token with the score -INFINITY is masked."""

SLACK = 1e-6
"""Relative tolerance of thresholds: float32 logits give probabilities to about this precision. A token that misses a
threshold by less survives. Without it, top_p = 0.7 over (0.4, 0.3, ...) would depend on the last bit of a sum."""


def exp(x: Any) -> Any:
    """The exponential function."""
    return x.exp() if hasattr(x, "exp") else np.exp(x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return x.log() if hasattr(x, "log") else np.log(x)


def log1p(x: Any) -> Any:
    """log(1 + x), exact for small x."""
    return x.log1p() if hasattr(x, "log1p") else np.log1p(x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return x.sqrt() if hasattr(x, "sqrt") else np.sqrt(x)


def absolute(x: Any) -> Any:
    """The absolute value."""
    return abs(x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one of a and b, for each token."""
    if hasattr(a, "clamp"):
        return a.clamp(max=b)
    return b.clamp(max=a) if hasattr(b, "clamp") else np.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger one of a and b, for each token."""
    if hasattr(a, "clamp"):
        return a.clamp(min=b)
    return b.clamp(min=a) if hasattr(b, "clamp") else np.maximum(a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b, for each token. Both are computed."""
    if isinstance(condition, bool):
        return a if condition else b
    if hasattr(condition, "new_ones"):  # a tensor
        import torch

        return torch.where(condition != 0, a, b)
    return np.where(condition, a, b)


def ones(x: Any) -> Any:
    """An array of ones with the shape of x."""
    return x.new_ones(x.shape) if hasattr(x, "new_ones") else np.ones_like(x)


def places(x: Any) -> Any:
    """The place of each value in an array such as ``row.sorted_scores``, from 1."""
    return ones(x).cumsum(-1) if hasattr(x, "new_ones") else np.cumsum(ones(x), -1)


def total(x: Any) -> Any:
    """The sum of an array such as ``row.sorted_scores``."""
    return x.sum(-1, keepdim=True) if hasattr(x, "new_ones") else np.sum(x, -1)


def log_softmax(x: Any) -> Any:
    """The log-probabilities of a row of scores [V]; all NaN for a row that cannot be sampled. For Combine stages."""
    if hasattr(x, "log_softmax"):
        return x.log_softmax(-1)
    with np.errstate(all="ignore"):
        x = x - x.max()
        x -= np.log(np.exp(x).sum())
        return x
