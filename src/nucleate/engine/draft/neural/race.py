"""The target's Gumbel draw (``stages/gumbel.py``) from scores and a temperature alone, compiled. Knows no sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nucleate.backends.cpu.compile import inline, kernel
from nucleate.backends.cpu.noise import GROUP, TOKEN, uniform
from nucleate.core.noise import GROUP_SIZE


@inline
def _noise(seed: Any, step: Any, stream: Any, index: Any) -> Any:
    return -math.log(-math.log1p(-uniform(seed, step, stream, index)))


@kernel
def race(logits_RV: Any, heat_R: Any, seeds_R: Any, steps_R: Any, out_R: Any) -> None:
    """The token of each row: first the group with the best mass and noise, then the best of it. Scores are finite
    or -inf, with a finite one in each row; seeds and steps are uint64."""
    rows, size = logits_RV.shape
    for r in range(rows):
        scale, top = 1.0 / heat_R[r], -np.inf
        for v in range(size):
            top = max(top, np.float64(logits_RV[r, v]))
        best, low = -np.inf, 0
        for begin in range(0, size, GROUP_SIZE):
            mass = 0.0
            for v in range(begin, min(size, begin + GROUP_SIZE)):
                mass += math.exp((np.float64(logits_RV[r, v]) - top) * scale)
            if mass > 0:
                score = math.log(mass) + _noise(seeds_R[r], steps_R[r], GROUP, begin // GROUP_SIZE)
                if score > best:
                    best, low = score, begin
        best, token = -np.inf, low
        for v in range(low, min(size, low + GROUP_SIZE)):
            score = (np.float64(logits_RV[r, v]) - top) * scale + _noise(seeds_R[r], steps_R[r], TOKEN, v)
            if score > best:
                best, token = score, v
        out_R[r] = token
