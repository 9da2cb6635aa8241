"""Compile the CPU kernels now, so that nothing has to wait for them later.

Those that nearly all requests need, and those of the stages that the flags switch on. They are kept in NUCLEATE_CACHE,
or in nucleate under XDG_CACHE_HOME or ~/.cache, until a new version of them comes.
"""

from __future__ import annotations

import argparse
import logging
import time

from nucleate.cli import flags
from nucleate.core.request import REQUEST_PARAMETERS

USAGE = "[OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_sampling(parser, without=tuple(REQUEST_PARAMETERS))


def run(arguments: argparse.Namespace) -> int:
    logging.getLogger("nucleate").setLevel(logging.ERROR)  # what it would say is what was asked for
    start = time.perf_counter()
    from nucleate.params import SamplingParams
    from nucleate.warming import warm

    warm(SamplingParams(**flags.given(arguments)))
    from nucleate.backends.cpu.compile import folder  # after it, because it loads the compiler

    print(f"CPU kernels ready after {time.perf_counter() - start:.1f} s, in {folder()}")
    return 0
