"""The numbers of kernels: a vectorisable exponential in float64, and ``sampling.noise``, bit for bit."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from nucleate.jit.compiler import inline, jit

LOG2_E = 1.4426950408889634
LN_2, LN_2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
MIN_EXPONENT = -700.0
"""Lower values are clamped to this."""

POLYNOMIAL = (
    *(1.0, 1.0000000000000069, 0.5000000000000006, 0.16666666666553953, 0.04166666666657277, 0.008333333385825085),
    *(0.0013888888932619635, 0.00019841170070971308, 2.4801504180837137e-05, 2.7640263790318923e-06),
    2.7626426376580335e-07,
)
"""exp on -log(2)/2..log(2)/2, with a relative error of 3e-16."""
C0, C1, C2, C3, C4, C5, C6, C7, C8, C9, C10 = POLYNOMIAL
ROUNDING_SHIFT = 1.5 * 2.0**52
"""Adding it to a number below 2**51 leaves the nearest integer in the low bits of the float64."""


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """exp(x) for x <= 700, clamped at MIN_EXPONENT, with a relative error below 1e-15."""
    x = max(x, MIN_EXPONENT)
    rounded = x * LOG2_E + ROUNDING_SHIFT
    whole = rounded - ROUNDING_SHIFT
    r = (x - whole * LN_2) - whole * LN_2_LOW
    p = C10 * r + C9
    p = p * r + C8
    p = p * r + C7
    p = p * r + C6
    p = p * r + C5
    p = p * r + C4
    p = p * r + C3
    p = p * r + C2
    p = p * r + C1
    p = p * r + C0
    exponent = np.float64(rounded).view(np.int64) << np.int64(52)
    return np.int64(np.float64(p).view(np.int64) + exponent).view(np.float64)


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
