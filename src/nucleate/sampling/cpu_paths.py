"""The code paths of the CPU, imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling import reference


@cache
def fused() -> Callable[[int], Any]:
    """A function that returns the fused CPU sampler for rows of a size. Each thread has its own."""
    from nucleate.sampling.cpu import fused_sampler  # loads the kernels

    return fused_sampler.thread_sampler


@cache
def _composed() -> Any:
    from nucleate.sampling.cpu import evaluation  # loads the kernels

    return evaluation


def runner(fast: bool) -> Callable[..., reference.RowResult]:
    """The function that samples a row without the fused kernel: composed on the CPU (fast), or the reference."""
    return _composed().run if fast else reference.run


def report(logits_V: NDArray[Any], token: int, request: tuple[int, tuple[int, ...]]) -> StepLogprobs:
    """The logprobs of a row of logits from which a token was sampled on the CPU."""
    found: StepLogprobs = _composed().step_logprobs(logits_V, token, request)
    return found


def row_probabilities(fast: bool) -> Callable[..., NDArray[np.float64]]:
    """The function that computes the distribution of a row: composed on the CPU (fast), or the reference."""
    return _composed().probabilities if fast else reference.probabilities


def survivors(fast: bool) -> Callable[..., reference.Survivors]:
    """The function that computes the surviving tokens: composed on the CPU (fast), or the reference."""
    return _composed().survivors if fast else reference.survivors
