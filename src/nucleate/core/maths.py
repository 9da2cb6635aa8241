"""The names a rule may use. Here they mean NumPy; a backend rebinds the same code to its own.

A rule's free names are module globals, so one expression is the reference, the Numba kernel and the Triton kernel.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy import absolute, exp, log, log1p, maximum, minimum, sqrt

NAMES = ("absolute", "exp", "log", "log1p", "sqrt", "minimum", "maximum", "where", "ones", "INFINITY", "SLACK")

where: Any = np.where

INFINITY = float("inf")

SLACK = 1e-6
"""Logits arrive as float32, so probabilities are known to about this relative error: a token that misses a cut by less
than it counts as reaching it. Without this, top_p = 0.7 over (0.4, 0.3, ...) would hang on the last bit of a sum."""

Rule = TypeVar("Rule", bound=types.FunctionType)


def ones(x: Any) -> Any:
    return np.ones_like(x)


def rebind(rule: types.FunctionType, names: Mapping[str, Any], tag: str) -> types.FunctionType:
    """The same code object with other globals: ``names`` replaces what the rule's free names mean.

    ``tag`` goes into ``__qualname__``, because compilers key their caches by it: two bindings must never share one.
    """
    bound = types.FunctionType(
        rule.__code__, {**rule.__globals__, **names}, rule.__name__, rule.__defaults__, rule.__closure__
    )
    bound.__module__, bound.__qualname__ = rule.__module__, f"{rule.__qualname__}.{tag}"
    bound.__kwdefaults__ = rule.__kwdefaults__
    return bound


__all__ = [
    "INFINITY",
    "NAMES",
    "SLACK",
    "absolute",
    "exp",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "ones",
    "rebind",
    "sqrt",
    "where",
]
