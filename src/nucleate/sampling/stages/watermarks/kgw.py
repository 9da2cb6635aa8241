"""KGW (Kirchenbauer et al., arXiv 2301.10226): favour the tokens of a pseudo-random green list.

Whether a token is green depends on the key, the context and the token only, independently of all other tokens. The
count of green tokens in a text without the watermark is then exactly binomial.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.noise import WATERMARK_RANK
from nucleate.sampling.stage import HistoryView, Shift, TokenInfo, param
from nucleate.sampling.watermark_key import WatermarkKey, require_key, token_words, values_below, vocabulary_words

CACHED_ANCHORS = 64
"""Number of context tokens whose words are cached: 4 bytes per token of the vocabulary each."""

GREEN, SELF = "kgw green", "kgw self"
"""The purposes of the key, see ``WatermarkKey.numbers``."""


class Kgw(Shift):
    """Watermark: add delta to the logits of a pseudo-random green list, which depends on the last tokens (KGW)."""

    rank = 5  # first, so that the fused kernel runs the other stages
    touches = "all"
    delta: float = param("Added to the logits of green tokens", neutral=0.0, default=2.0, low=0.0, public=False)
    gamma: float = param("Share of green tokens", default=0.25, low=2.0**-32, high=1.0 - 2.0**-32, public=False)
    context: int = param(
        "Number of last output tokens that the green list depends on; the first tokens of an output carry no watermark",
        default=1,
        low=1,
        public=False,
    )
    self_hash: bool = param(
        "Select the list by the token itself and one token of the context, which resists edits better",
        default=False,
        public=False,
    )
    key: WatermarkKey | None = param("Secret key", default=None, public=False)

    def verify(self) -> None:
        require_key(self.key, self.name)

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.value

    def values(self, history: HistoryView, size: int) -> Any:
        context = history.context(self.context)
        if context is None:
            return 0.0
        key, threshold = require_key(self.key, self.name), green_threshold(self.gamma)
        if not self.self_hash:
            return values_below(*key.numbers(GREEN, context.tokens), size, threshold, self.delta)
        words = [_anchor_words(key, anchor, size, threshold) for anchor in dict.fromkeys(context.tokens)]
        green_V: NDArray[np.float32] = (np.minimum.reduce(words) & np.uint32(1)).astype(np.float32)
        green_V *= np.float32(self.delta)
        return green_V


def green_threshold(gamma: float) -> int:
    """Words below it are green: a share of round(gamma * 2**32) / 2**32."""
    return round(gamma * 2**32)


@lru_cache(CACHED_ANCHORS)
def _anchor_words(key: WatermarkKey, anchor: int, size: int, threshold: int) -> NDArray[np.uint32]:
    numbers = key.numbers(SELF, (anchor,))
    rank_V, color_V = vocabulary_words(*numbers, size, WATERMARK_RANK), vocabulary_words(*numbers, size)
    return pack_words(rank_V, color_V, threshold)


def pack_words(rank_V: NDArray[np.uint32], color_V: NDArray[np.uint32], threshold: int) -> NDArray[np.uint32]:
    """For self-hash: 31 bits of a rank, and a bit that is 1 for green. The lowest rank of the context decides."""
    return (rank_V & np.uint32(0xFFFFFFFE)) | (color_V < threshold)


def pair_words(seeds_N: Any, steps_N: Any, ids_N: Any, threshold: int) -> NDArray[np.uint32]:
    """``pack_words`` of pairs of a context token, given by its numbers, and a token."""
    rank_N = token_words(seeds_N, steps_N, ids_N, WATERMARK_RANK)
    return pack_words(rank_N, token_words(seeds_N, steps_N, ids_N), threshold)
