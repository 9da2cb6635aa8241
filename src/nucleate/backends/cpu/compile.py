"""How the functions of this backend are compiled: the decorators, see ``core.compiling``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending

from nucleate.core.compiling import jit, kernel, loose


def inline(function: Callable[..., Any]) -> Any:
    """The same, written into its callers."""
    return numba.njit(inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says its own instructions."""
    return numba.extending.intrinsic(function)


__all__ = ["inline", "intrinsic", "jit", "kernel", "loose"]
