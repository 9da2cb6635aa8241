"""Compiling kernels once: kept on disk where that can be written, see ``core.kept``; else compiled in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.extending
from numba import types

from nucleate.core import kept
from nucleate.core.compiling import compiled

SOURCES = (
    *sorted(Path(__file__).parent.rglob("*.py")),
    Path(__file__).parents[1] / "chain.py",
    Path(__file__).parents[2] / "core" / "maths.py",
)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that other kernels call. There, float(x) of a float32 stays one: np.float64(x) is meant.

    Nobody calls it through a pointer: that entry would be a tenth of the time to compile.
    """
    return numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)


def inline(function: Callable[..., Any]) -> Any:
    """The same, written into its callers."""
    return numba.njit(inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says its own instructions."""
    return numba.extending.intrinsic(function)


def folder() -> Path:
    """Where the kernels of this version of the sources are kept."""
    return kept.folder(f"{numba.__version__} {llvmlite.__version__}", SOURCES)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, when it is first called; from then on it comes from disk."""
    return _kept(function, numba.njit, nogil=True, error_model="numpy")


RULE = types.void(types.int64, types.int64, types.int64, types.int64, types.float64, types.int64)


def entry(function: Callable[..., Any]) -> Any:
    """Compile, now, a function that kernels call by its ``address``, see ``staged.entries``."""
    return _kept(function, functools.partial(numba.cfunc, RULE), error_model="numpy")


def _kept(function: Callable[..., Any], compiler: Callable[..., Any], **options: Any) -> Any:
    return compiled(function, functools.partial(compiler, **options), folder(), "the CPU kernels", 40)
