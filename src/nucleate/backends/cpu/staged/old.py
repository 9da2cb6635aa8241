"""Compiled in each process."""

from collections.abc import Callable
from typing import Any

import numba
from numba import types

RULE = types.void(types.int64, types.int64, types.int64, types.int64, types.float64, types.int64)


def kernel(function: Callable[..., Any]) -> Any:
    return numba.njit(nogil=True, error_model="numpy")(function)


def entry(function: Callable[..., Any]) -> Any:
    return numba.cfunc(RULE, error_model="numpy")(function)
