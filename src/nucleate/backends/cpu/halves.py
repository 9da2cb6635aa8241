"""Half-precision rows as float32, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import kernel
from nucleate.backends.cpu.simd import LANES


@kernel
def widen(source: Any, brain: Any, target: Any) -> None:
    """source: uint16 [V], the bits of float16 or, with ``brain``, bfloat16. target: float32 [V]."""
    if brain:
        for i in range(source.size):
            target[i] = simd.score(np.int32(np.uint32(source[i]) << np.uint32(16)))
        return
    whole = source.size - source.size % LANES
    for i in range(0, whole, LANES):
        simd.widen(source, i, target, i)
    if whole < source.size:
        last, wide = np.zeros(LANES, np.uint16), np.empty(LANES, np.float32)
        last[: source.size - whole] = source[whole:]
        simd.widen(last, 0, wide, 0)
        target[whole:] = wide[: source.size - whole]
