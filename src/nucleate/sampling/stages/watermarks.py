"""Watermarks: statistical marks in sampled text that a detector with the secret key finds.

**Gumbel** (Aaronson 2022; Kuditipudi et al., arXiv 2307.15593): Gumbel-max with keyed noise.

**KGW** (Kirchenbauer et al., arXiv 2301.10226): favour the tokens of a pseudo-random green list. Whether a token is
green depends on the key, the context and the token only, independently of all other tokens. The count of green tokens
in a text without the watermark is then exactly binomial.

**SynthID-Text** (Dathathri et al., Nature 634, 2024), non-distortionary: a tournament between candidates. Each layer
compares two candidates by a pseudo-random bit g of the key, the context and the token. The distribution of the winner
has a closed form: p <- p * (1 + g - sum of p * g), layer after layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.noise import WATERMARK_RANK
from nucleate.sampling.stage import Draw, HistoryView, Shift, TokenInfo, Transform, param
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.watermark_key import WatermarkKey, require_key, token_words, values_below, vocabulary_words

NOISE, GREEN, SELF, TOURNAMENT = "gumbel noise", "kgw green", "kgw self", "synthid"
"""The purposes of the key, see ``WatermarkKey.numbers``."""

CACHED_ANCHORS = 64
"""Number of context tokens whose words are cached: 4 bytes per token of the vocabulary each."""


class GumbelWatermark(Draw):
    """Watermark: sample by the Gumbel-max trick, with noise that depends on a key and the last tokens."""

    uniforms = "each"
    seed: int | None = param(
        "Random seed, 0 to 2**64 - 1; none: a random one", default=None, low=0, high=2**64 - 1, name="seed"
    )
    context: int = param(
        "Number of last output tokens that the noise depends on; the first tokens of an output, and tokens after a "
        "repeated context, use the seed",
        default=4,
        low=1,
        public=False,
    )
    key: WatermarkKey | None = param("Secret key", default=None, public=False)

    score = Gumbel.score

    def verify(self) -> None:
        require_key(self.key, self.name)

    def noise_key(self, history: HistoryView) -> tuple[int, int] | None:
        context = history.context(self.context)
        if context is None or context.repeated:  # with the same noise again, text could loop
            return None
        return require_key(self.key, self.name).numbers(NOISE, context.tokens)


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


class SynthId(Transform):
    """Watermark: draw by a tournament that favours tokens with pseudo-random bits of 1 (SynthID-Text)."""

    rank = 95
    name = "synthid"
    layers: int = param(
        "Number of layers of the tournament; 0: off", neutral=0, default=30, low=0, high=32, public=False
    )
    context: int = param(
        "Number of last output tokens that the bits depend on; the first tokens of an output, and tokens after a "
        "repeated context, carry no watermark",
        default=4,
        low=1,
        public=False,
    )
    key: WatermarkKey | None = param("Secret key", default=None, public=False)

    def verify(self) -> None:
        require_key(self.key, self.name)

    def apply(self, ids: Any, x: Any, history: HistoryView) -> Any:
        context = history.context(self.context)
        if context is None or context.repeated:
            return x
        words_N = token_words(*require_key(self.key, self.name).numbers(TOURNAMENT, context.tokens), ids)
        p_N = np.exp(x)
        p_N /= p_N.sum()
        for bits_N in ((words_N >> np.arange(self.layers, dtype=np.uint32)[:, None]) & np.uint32(1)).astype(np.float64):
            p_N *= bits_N + max(1.0 - float(p_N @ bits_N), 0.0)  # rounding may make a sum exceed 1
        return np.log(p_N)
