"""Compiling kernels once: kept on disk under a digest of everything they are made of, so that none can be stale.

The folder is NUCLEATE_CACHE, or nucleate in XDG_CACHE_HOME, or ~/.cache/nucleate. Where it cannot be written, kernels
are compiled in every process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.extending

logger = logging.getLogger("nucleate")
SOURCES = (*sorted(Path(__file__).parent.rglob("*.py")), Path(__file__).parents[2] / "core" / "maths.py")


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that other kernels call. There, float(x) of a float32 stays one: np.float64(x) is meant."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inline(function: Callable[..., Any]) -> Any:
    """The same, written into its callers."""
    return numba.njit(inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says its own instructions."""
    return numba.extending.intrinsic(function)


def folder() -> Path:
    """Where the kernels of this version of the sources are kept."""
    base = os.environ.get("NUCLEATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nucleate"
    versions = f"{numba.__version__} {llvmlite.__version__}".encode()
    digest = hashlib.sha256(versions + b"".join(path.read_bytes() for path in SOURCES))
    return Path(base).expanduser() / digest.hexdigest()[:16]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, when it is first called; from then on it comes from disk."""
    before, place = numba.config.CACHE_DIR, folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(place)
        numba.config.CACHE_DIR = str(place)
        if not any(place.rglob("*.nbi")):
            say("compiling the CPU kernels, once: about 15 seconds (kept in %s)", place)
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except (OSError, RuntimeError):
        say("compiling the CPU kernels: about 15 seconds (%s cannot be written: not kept)", place)
        return jit(function)
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def say(message: str, place: Path) -> None:
    """Log, once."""
    logger.warning(message, place)
