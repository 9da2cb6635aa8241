"""Compile the CPU kernels now, so that nothing has to wait for them later.

Those that nearly all requests need, those of the stages that the flags switch on, and those of models on NumPy. They
are kept in NUCLEATE_CACHE, or in nucleate under XDG_CACHE_HOME or ~/.cache, until a new version of them comes.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nucleate.cli import flags
from nucleate.cli.main import UsageError
from nucleate.core.kept import writable
from nucleate.core.request import REQUEST_PARAMETERS

USAGE = "[OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_sampling(parser, without=tuple(REQUEST_PARAMETERS))


def run(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    from nucleate.models.packed_llama import compiled
    from nucleate.params import SamplingParams
    from nucleate.warming import warm

    params = SamplingParams(**flags.given(arguments))
    from nucleate.backends.cpu.compile import folder  # after what may be wrong, because it loads the compiler

    place = folder()
    if not writable(place):  # before a compilation that would be for this process alone
        raise UsageError(f"kernels cannot be kept: {place} cannot be written (NUCLEATE_CACHE may name another folder)")
    with _only_errors():  # it would warn that it compiles, which is what was asked for
        warm(params, also=compiled)
    print(f"CPU kernels ready after {time.perf_counter() - start:.1f} s, in {place.parent}")
    return 0


@contextmanager
def _only_errors() -> Iterator[None]:
    logger = logging.getLogger("nucleate")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
