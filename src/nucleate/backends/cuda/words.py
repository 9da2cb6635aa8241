"""The names of maths for tensors. Numbers may be tensors or Python's own."""

from __future__ import annotations

import math
from typing import Any

import torch


def exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, torch.Tensor) else math.exp(x)


def log(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.log(x)
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)


def log1p(x: Any) -> Any:
    return torch.log1p(x) if isinstance(x, torch.Tensor) else log(1.0 + x) if x <= -1 else math.log1p(x)


def sqrt(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.sqrt(x)
    return math.sqrt(x) if x >= 0 else math.nan


def absolute(x: Any) -> Any:
    return abs(x)


def minimum(a: Any, b: Any) -> Any:
    """NaN stays, as it does in NumPy."""
    if isinstance(a, torch.Tensor):
        return torch.minimum(a, b) if isinstance(b, torch.Tensor) else a.clamp(max=b)
    if isinstance(b, torch.Tensor):
        return b.clamp(max=a)
    return a if a <= b or math.isnan(a) else b


def maximum(a: Any, b: Any) -> Any:
    """The same."""
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)
    if isinstance(b, torch.Tensor):
        return b.clamp(min=a)
    return a if a >= b or math.isnan(a) else b


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition != 0, a, b)
    return a if condition else b


def ones(x: Any) -> Any:
    return torch.ones_like(x) if isinstance(x, torch.Tensor) else 1.0


WORDS: dict[str, Any] = {
    each.__name__: each for each in (absolute, exp, log, log1p, maximum, minimum, ones, sqrt, where)
}
