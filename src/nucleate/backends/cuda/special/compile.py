"""Compile functions for the GPU. Knows no sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function that kernels call. With TRITON_INTERPRET=1 it runs on the CPU, in NumPy."""
    return triton.jit(function)
