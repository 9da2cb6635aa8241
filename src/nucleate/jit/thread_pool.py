"""The thread pool for kernels and matrix products, and what each thread has of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TypeVar

from nucleate.parameters.parameter import ParameterError

Made = TypeVar("Made")


def per_thread(make: Callable[[int], Made]) -> Callable[[int], Made]:
    """What ``make`` returns for a size, one per thread and size. The last 16 are kept."""
    cached = lru_cache(16)(lambda size, _: make(size))
    return lambda size: cached(size, threading.get_ident())


@cache
def cores() -> int:
    """The maximum number of threads: the number of cores that this process may use, or NUCLEATE_THREADS."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("NUCLEATE_THREADS", "").strip()
    if setting and not (setting.isdecimal() and int(setting)):
        raise ParameterError("NUCLEATE_THREADS", f"NUCLEATE_THREADS must be an integer >= 1, got {setting!r:.40}")
    return int(setting) if setting else available


def pool() -> ThreadPoolExecutor:
    """The worker threads of this process, one fewer than ``cores()``. A forked process gets its own."""
    return _pool(os.getpid())


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, cores() - 1), thread_name_prefix="nucleate")
