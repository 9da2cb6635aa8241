"""Compile the CPU kernels now, so that nothing has to wait for them later.

They are kept in NUCLEATE_CACHE, or in nucleate under XDG_CACHE_HOME or ~/.cache, until a new version of them comes.
"""

from __future__ import annotations

import argparse
import logging
import time

USAGE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> int:
    logging.getLogger("nucleate").setLevel(logging.ERROR)  # what it would say is what was asked for
    start = time.perf_counter()
    from nucleate.backends.cpu import compile as compiling
    from nucleate.backends.cpu.rows import warm

    warm()
    print(f"CPU kernels ready after {time.perf_counter() - start:.1f} s, in {compiling.folder()}")
    return 0
