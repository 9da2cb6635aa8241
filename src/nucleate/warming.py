"""warm: compile now what later calls run through, so that none of them waits for the compiler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from nucleate.core.stage import Draw, Pipeline
from nucleate.kernels import KERNELS
from nucleate.params import SamplingParams
from nucleate.pipeline import Params, as_pipeline
from nucleate.rows import ids_in
from nucleate.sampler import Sampler
from nucleate.stages.gumbel import Gumbel

logger = logging.getLogger("nucleate")

SCORES = 1024
"""In a row: so many that loops over scores are compiled."""


def warm(
    *params: Params, background: bool = False, also: Callable[[], object] | None = None
) -> threading.Thread | None:
    """Compile the CPU kernels that some parameters need and those nearly all need, or load them from disk.

    background: in a thread, which is returned. Until it ends, backend "auto" answers with the reference: the same
    tokens, slowly, but no call waits for the compiler. Without it, returns None when all is done. also: what to call
    then, such as ``Runner.warm``. Raises ParameterError for parameters that are wrong, in either case at once. Once it
    is done, "auto" takes kernels for small rows too.
    """
    pipelines = [as_pipeline(one) for one in (SamplingParams(logprobs=1), *params)]
    if not background:
        _compile(pipelines)
        if also is not None:
            also()
        return None
    thread = threading.Thread(target=_compile_beside, args=(pipelines, also), name="nucleate-warm", daemon=True)
    KERNELS.warming.append(thread)
    thread.start()
    return thread


def _compile_beside(pipelines: list[Pipeline], also: Callable[[], object] | None) -> None:
    try:
        try:
            _compile(pipelines)
        finally:
            KERNELS.warming.remove(threading.current_thread())
        if also is not None:
            also()
    except Exception:
        logger.exception("warm: the kernels could not be compiled; they will be when they are needed")


def _compile(pipelines: list[Pipeline]) -> None:
    for stages in pipelines:
        size = max((SCORES, *(token + 1 for _, token in ids_in(stages))))
        row = np.linspace(0.0, 1e-3, size, dtype=np.float32)[None]
        for some in (stages, *((stage, Gumbel(0)) for stage in stages if not isinstance(stage, Draw))):
            sampler = Sampler(size, backend="cpu")
            sampler.add(some, [0, 1], output_ids=[1, 2, 1])
            sampler(row)
    KERNELS.warm = True
