"""Counter-based random numbers: (seed, step, stream, index) gives the same bits on every machine, batch and thread.

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011). There is no state, so
any token of any run can be reproduced.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.maths import log, log1p

# Streams: one per use of random numbers.
TOKEN, GROUP, XTC, ACCEPT, RESIDUAL, DRAFT = range(6)

GROUP_SIZE = 256
"""Number of consecutive token ids in a group, the first level of a Gumbel draw."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85

Words = NDArray[np.uint64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox-4x32. Words are 32-bit values held in uint64 arrays, because products need 64 bits."""
    c0, c1, c2, c3 = counter
    for r in range(10):
        k0, k1 = (np.uint64((k + r * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
    return c0, c1, c2, c3


def uniform(seed: int, step: int, stream: int, index: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per index: u = (r + 0.5) / 2**64 with r = word 0 * 2**32 + word 1.

    seed and step: integers in 0..2**64 - 1; stream: one of the constants above; index: token or group ids, < 2**32.
    """
    ids: Words = np.atleast_1d(index).astype(np.uint64)
    low, high, kind = (np.full_like(ids, word) for word in (step & 0xFFFFFFFF, step >> 32, stream))
    w0, w1, _, _ = philox((ids, low, high, kind), (seed & 0xFFFFFFFF, seed >> 32))
    r = (w0 << _SHIFT) | w1
    return np.minimum((r.astype(np.float64) + 0.5) * 2.0**-64, 1.0 - 2.0**-53)  # float64 would round the last to 1


def gumbel(u: Any) -> Any:
    """A standard Gumbel variate from a uniform one. The largest come from small u, where floats are dense."""
    return -log(-log1p(-u))


def fresh_seed() -> int:
    """A new 64-bit seed from the operating system."""
    return secrets.randbits(64)
