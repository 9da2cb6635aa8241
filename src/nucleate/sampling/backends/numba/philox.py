"""``sampling.noise`` for kernels, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.jit.compiler import inline, jit

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LARGEST = 1.0 - 2.0**-53


@inline
def words(seed: Any, step: Any, stream: Any, index: Any) -> Any:
    """The four words of ``noise.philox``. seed, step: uint64."""
    c0, c1, c2, c3 = np.uint64(index), step & LOW, step >> HALF, np.uint64(stream)
    k0, k1 = seed & LOW, seed >> HALF
    for _ in range(10):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


@inline
def uniform(seed: Any, step: Any, stream: Any, index: Any) -> Any:
    """``noise.uniform`` of one index. seed, step: uint64."""
    c0, c1, _, _ = words(seed, step, stream, index)
    return min((float((c0 << HALF) | c1) + 0.5) * 2.0**-64, LARGEST)


@jit
def uniforms(out: Any, count: Any, seed: Any, step: Any, stream: Any, first: Any) -> None:
    """``uniform`` of consecutive indices, vectorised by LLVM."""
    for i in range(count):
        out[i] = uniform(seed, step, stream, first + i)
