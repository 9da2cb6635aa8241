"""Compiling a kernel with Numba: read from disk, or kept there, where that can be done. See ``kept``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

from nucleate.core import kept


def compiled(function: Any, decorator: Callable[..., Any], place: Path, what: str, seconds: int) -> Any:
    """A function that a decorator of Numba has made a kernel.

    decorator: takes ``cache``, and gives what takes the function. place: where kernels are kept. what, seconds: what is
    said of them if they must be compiled.
    """
    with global_compiler_lock:  # Numba has one folder at a time, for all threads
        folder, before = kept.prepared(place, what, seconds), numba.config.CACHE_DIR
        if folder is None:
            return decorator()(function)
        try:
            settle(function, place)
            numba.config.CACHE_DIR = str(folder)
            return decorator(cache=True)(function)
        except (OSError, RuntimeError):  # it can be written, but not as Numba does
            return decorator()(function)
        finally:
            numba.config.CACHE_DIR = before


def settle(function: Any, place: Path) -> None:
    """Have a function say that its source is a copy of it where kernels are kept, as Numba knows kernels by paths.

    So they serve each environment and checkout of this user that has the same sources. Raises OSError.
    """
    source = Path(function.__code__.co_filename)
    home = place / source.parent.name / source.name
    if not source.is_file() or source == home:
        return
    if not home.is_file():
        home.parent.mkdir(parents=True, exist_ok=True)
        new = home.with_suffix(f".{os.getpid()}")
        shutil.copyfile(source, new)
        new.replace(home)
    function.__code__ = function.__code__.replace(co_filename=str(home))
