"""Compile the CPU kernels now instead of on first use.

Compiles the kernels for sampling and for the NumPy models, and caches them in NUCLEATE_CACHE, or in the folder nucleate
of XDG_CACHE_HOME or ~/.cache, until the next version.
"""

from __future__ import annotations

import argparse
import time

from nucleate.cli.argument_parser import UsageError
from nucleate.jit.native_library import writable

USAGE = ""
FLAGS = ()


def run(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    from nucleate.jit.kernel_libraries import ALL, warm

    cache = ALL[0].folder.parent
    if not all(writable(library.folder) for library in ALL):  # check before a long compilation
        raise UsageError(f"the kernel cache {cache} is not writable; set NUCLEATE_CACHE to another folder")
    warm(on_progress=lambda line: print(f"  {line}", flush=True))
    print(f"CPU kernels ready after {time.perf_counter() - start:.1f} s, cached in {cache}")
    return 0
