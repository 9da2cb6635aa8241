"""Compiled in each process."""

import numba
from numba import types

RULE = types.void(types.int64, types.int64, types.int64, types.int64, types.float64, types.int64)


def kernel(function):
    return numba.njit(nogil=True, error_model="numpy")(function)


def entry(function):
    return numba.cfunc(RULE, error_model="numpy")(function)
