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
TOKEN, GROUP, XTC, ACCEPT, RESIDUAL, DRAFT, WATERMARK, WATERMARK_RANK = range(8)

GROUP_SIZE = 256
"""Number of consecutive token ids in a group, the first level of a Gumbel draw."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
"""What each of the ten rounds adds to the two words of the key."""

Words = NDArray[np.uint64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox-4x32. Words are 32-bit values held in uint64 arrays, because products need 64 bits.

    counter, key: uint64 arrays that broadcast, or integers. Few NumPy calls: two words are one array, as each call
    takes half a microsecond, which counts where one row is sampled without compiled kernels.
    """
    shape, key_shape = np.broadcast(*counter, *key).shape, np.broadcast(*key).shape
    even, odd, product = np.empty((3, 2, *shape), np.uint64)
    (even[0], odd[0], even[1], odd[1]), keys = counter, np.empty((2, *key_shape), np.uint64)
    keys[0], keys[1] = key
    multipliers, swapped = _MULTIPLIERS.reshape(2, *(1,) * len(shape)), product[::-1]
    steps = _WEYL.reshape(10, 2, *(1,) * len(key_shape))
    for round_key in (keys + steps) & _LOW:
        np.multiply(even, multipliers, out=product)
        np.right_shift(swapped, _SHIFT, out=even)
        even ^= odd
        even ^= round_key.reshape(2, *(1,) * (len(shape) - len(key_shape)), *key_shape)
        np.bitwise_and(swapped, _LOW, out=odd)
    return even[0], odd[0], even[1], odd[1]


def uniform(
    seed: int, step: int, stream: int | NDArray[np.integer[Any]], index: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per index: u = (r + 0.5) / 2**64 with r = word 0 * 2**32 + word 1.

    seed and step: integers in 0..2**64 - 1; stream: one of the constants above, or one per index; index: token or group
    ids, < 2**32.
    """
    return uniforms(np.array([seed], np.uint64), np.array([step], np.uint64), stream, np.atleast_1d(index))


def uniforms(seed: Words, step: Words, stream: Any, index: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """``uniform`` of several seeds and steps: uint64 [N] or [1] each."""
    w0, w1, _, _ = block_words(seed, step, stream, index)
    r = (w0 << _SHIFT) | w1
    return np.minimum((r.astype(np.float64) + 0.5) * 2.0**-64, 1.0 - 2.0**-53)  # float64 would round the last to 1


def block_words(seed: Words, step: Words, stream: Any, index: NDArray[np.integer[Any]]) -> tuple[Words, ...]:
    """The four words of each index; arguments as in ``uniforms``."""
    counter = index.astype(np.uint64), step & _LOW, step >> _SHIFT, np.atleast_1d(np.asarray(stream, np.uint64))
    return philox(counter, (seed & _LOW, seed >> _SHIFT))


def gumbel(u: Any) -> Any:
    """A standard Gumbel variate from a uniform one. The largest come from small u, where floats are dense."""
    return -log(-log1p(-u))


def fresh_seed() -> int:
    """A new 64-bit seed from the operating system."""
    return secrets.randbits(64)
