"""Compile the CPU kernels now, so that nothing has to do without them later.

All that there are: those that draw tokens, and those of models on NumPy. They are kept in NUCLEATE_CACHE, or in
nucleate under XDG_CACHE_HOME or ~/.cache, until a new version of them comes.
"""

from __future__ import annotations

import argparse
import time

from nucleate.cli.main import UsageError
from nucleate.jit.kernel_cache import writable

USAGE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    from nucleate.jit.kernel_libraries import ALL
    from nucleate.jit.warmup import warm

    place = ALL[0].folder.parent
    if not all(
        writable(library.folder) for library in ALL
    ):  # before a compilation that would be for this process alone
        raise UsageError(f"kernels cannot be kept: {place} cannot be written (NUCLEATE_CACHE may name another folder)")
    warm(on_progress=lambda line: print(f"  {line}", flush=True))
    print(f"CPU kernels ready after {time.perf_counter() - start:.1f} s, in {place}")
    return 0
