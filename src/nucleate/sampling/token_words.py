"""Pseudo-random 32-bit words, one per token id: functions of (seed, step, stream, token id) for keyed stages.

Ids are in groups of 256. A Philox block has the words of one place in four groups: token i has the word g % 4 of the
block g // 4 * 256 + i % 256, where g = i // 256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import GENERIC
from nucleate.sampling.noise import GROUP_SIZE, WATERMARK, block_words

Uint32 = NDArray[np.uint32]

WORDS = 4
"""Words per Philox block."""


def token_words(seed: Any, step: Any, ids_N: NDArray[Any], stream: int = WATERMARK) -> Uint32:
    """The words of some tokens: uint32 [N]. seed, step: one for all tokens, or uint64 [N]."""
    ids_N = np.ascontiguousarray(ids_N, np.int64)
    if GENERIC.ready and np.ndim(seed) == np.ndim(step) == 0:
        words_N = np.empty(ids_N.shape, np.uint32)
        GENERIC.listed_words(np.uint64(seed), np.uint64(step), stream, ids_N, words_N)
        return words_N
    seeds, steps = (np.asarray(one, np.uint64).reshape(-1) for one in (seed, step))
    group_N, place_N = ids_N // GROUP_SIZE, ids_N % GROUP_SIZE
    words = block_words(seeds, steps, stream, group_N // WORDS * GROUP_SIZE + place_N)
    return np.choose(group_N % WORDS, words).astype(np.uint32)


def vocabulary_words(seed: int, step: int, size: int, stream: int = WATERMARK) -> Uint32:
    """The words of the tokens 0 to size - 1. Compiled if the kernels are loaded."""
    count = -(-size // (WORDS * GROUP_SIZE))
    if GENERIC.ready:
        words_V = np.empty(count * WORDS * GROUP_SIZE, np.uint32)
        GENERIC.token_words(seed, step, stream, words_V)
        return words_V[:size]
    blocks = np.arange(count * GROUP_SIZE)
    words = block_words(np.array([seed], np.uint64), np.array([step], np.uint64), stream, blocks)
    planes = np.stack(words).astype(np.uint32).reshape(WORDS, count, GROUP_SIZE)
    return planes.transpose(1, 0, 2).reshape(-1)[:size]


def values_below(seed: int, step: int, size: int, threshold: int, value: float) -> NDArray[np.float32]:
    """A value for the tokens whose ``vocabulary_words`` are below a threshold, 0 for the others: float32 [size]."""
    if not GENERIC.ready:
        return np.where(vocabulary_words(seed, step, size) < threshold, np.float32(value), np.float32(0.0))
    values_V = np.empty(-(-size // (WORDS * GROUP_SIZE)) * WORDS * GROUP_SIZE, np.float32)
    GENERIC.values_below(seed, step, WATERMARK, threshold, value, values_V)
    return values_V[:size]
