"""The threads that run kernels: their number, and the pool."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from nucleate.parameters.parameter import ParameterError


@cache
def cores() -> int:
    """How many threads work at most: as many as this process may run on, or NUCLEATE_THREADS."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("NUCLEATE_THREADS", "").strip()
    if wanted and not (wanted.isdecimal() and int(wanted)):
        raise ParameterError("NUCLEATE_THREADS", f"NUCLEATE_THREADS must be an integer >= 1, got {wanted!r:.40}")
    return int(wanted) if wanted else mine


def pool() -> ThreadPoolExecutor:
    """The threads beside the caller's, of this process: a fork has none of its parent's."""
    return _pool(os.getpid())


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, cores() - 1), thread_name_prefix="nucleate")
