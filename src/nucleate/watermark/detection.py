"""Detects watermarks in token ids. The p-values are exact for text that was written without the key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.keywords import with_suggestions
from nucleate.sampling.inputs import history
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN, uniforms
from nucleate.sampling.stage import Stage
from nucleate.sampling.stages.watermarks.gumbel_watermark import NOISE, GumbelWatermark
from nucleate.sampling.stages.watermarks.kgw import GREEN, SELF, Kgw, green_threshold, pair_words
from nucleate.sampling.stages.watermarks.synthid import TOURNAMENT, SynthId
from nucleate.sampling.watermark_key import WatermarkKey, token_words
from nucleate.watermark.kinds import check_watermark, read_watermark
from nucleate.watermark.null_distributions import binomial_tail, gamma_tail, weighted_bits_tail

Ids = NDArray[np.int64]
MAX_ID = 2**31 - 1


class Detection(NamedTuple):
    """The result of a detector."""

    p_value: float  #: the probability of such a statistic, or a larger one, in text without this watermark
    statistic: float  #: kgw: share of green tokens; gumbel: mean of -log(u); synthid: weighted mean of the bits
    expected: float  #: its mean in text without this watermark
    num_scored: int  #: tokens that count: with a full context, and the first ones of their kind


@with_suggestions
def detect(token_ids: Sequence[int], key: WatermarkKey | bytes, watermark: str | Stage = "kgw") -> Detection:
    """Look for a watermark in a text.

    token_ids: of the text. key: that of the generator. watermark: its kind, with the parameters that differ from the
    defaults ("kgw", "kgw(gamma=0.5, context=4)", "gumbel", "synthid"), or the stage. A text without any token to score
    has the p-value 1. Raises ParameterError, ValueError.
    """
    ids = history(token_ids, MAX_ID + 1, "token_ids")
    secret = key if isinstance(key, WatermarkKey) else WatermarkKey(key)
    stage: Any = read_watermark(watermark, secret) if isinstance(watermark, str) else watermark
    check_watermark(stage)
    found: Detection = _DETECTORS[type(stage)](stage, secret, ids)
    return found


def _kgw(stage: Kgw, key: WatermarkKey, ids: Ids) -> Detection:
    """Counts the green ones among distinct pairs of context and token."""
    threshold = green_threshold(stage.gamma)
    grams = np.unique(_grams(ids, stage.context + 1), axis=0)
    if stage.self_hash:
        green = _self_hash_colors(grams, key, threshold)
    else:
        numbers = _numbers(key, GREEN, map(tuple, grams[:, :-1].tolist()))
        green = token_words(*numbers, grams[:, -1]) < threshold
    count, share = int(green.sum()), threshold / 2.0**32
    return _result(binomial_tail(len(green), share, count), count, share, len(green))


def _self_hash_colors(grams: Ids, key: WatermarkKey, threshold: int) -> NDArray[np.bool_]:
    """The colors of distinct pairs of a token and the token of its context that decides."""
    anchors, tokens = grams[:, :-1], np.broadcast_to(grams[:, -1:], grams[:, :-1].shape)
    numbers = _numbers(key, SELF, ((anchor,) for anchor in anchors.ravel().tolist()))
    words = pair_words(*numbers, tokens.ravel(), threshold).reshape(anchors.shape)
    chosen = words.argmin(1)[:, None] if len(words) else np.zeros((0, 1), np.int64)
    pairs = np.stack([np.take_along_axis(one, chosen, 1)[:, 0] for one in (anchors, tokens)], 1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    green: NDArray[np.bool_] = words[np.arange(len(words)), chosen[:, 0]][first] % 2 == 1
    return green


def _gumbel(stage: GumbelWatermark, key: WatermarkKey, ids: Ids) -> Detection:
    """Sums -log(u) of both uniform numbers of each token: that of its group of 256 ids, and its own."""
    grams = _first_of_context(ids, stage.context)
    numbers = _numbers(key, NOISE, map(tuple, grams[:, :-1].tolist()))
    tokens, count = grams[:, -1], len(grams)
    both = uniforms(*numbers, GROUP, tokens // GROUP_SIZE), uniforms(*numbers, TOKEN, tokens)
    total = -float(np.log(both).sum())
    return _result(gamma_tail(2 * count, total), total / 2, 1.0, count)


def _synthid(stage: SynthId, key: WatermarkKey, ids: Ids) -> Detection:
    """Sums the bits of the tokens with a weight per layer: the first layers change probabilities most."""
    grams = _first_of_context(ids, stage.context)
    words = token_words(*_numbers(key, TOURNAMENT, map(tuple, grams[:, :-1].tolist())), grams[:, -1])
    weights = layer_weights(stage.layers)
    total = sum(weight * int((words >> np.uint32(layer) & np.uint32(1)).sum()) for layer, weight in enumerate(weights))
    p_value = weighted_bits_tail(weights, len(grams), total)
    return _result(p_value, total / max(sum(weights), 1), 0.5, len(grams))


def layer_weights(layers: int) -> list[int]:
    """The weight of each layer: 10 for the first to 1 for the last, in whole numbers."""
    return [int(weight) for weight in np.round(np.linspace(10, 1, layers))]


_DETECTORS: dict[type[Stage], Any] = {Kgw: _kgw, GumbelWatermark: _gumbel, SynthId: _synthid}


def _result(p_value: float, total: float, expected: float, count: int) -> Detection:
    return Detection(p_value, total / count if count else expected, expected, count)


def _grams(ids: Ids, length: int) -> Ids:
    """All sequences of this many consecutive tokens: [N, length]."""
    if len(ids) < length:
        return np.zeros((0, length), np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, length)


def _first_of_context(ids: Ids, context: int) -> Ids:
    """Contexts with the token after each: of equal contexts the first, as the generator marks only that one."""
    grams = _grams(ids, context + 1)
    _, first = np.unique(grams[:, :-1], axis=0, return_index=True)
    return grams[np.sort(first)]


def _numbers(
    key: WatermarkKey, purpose: str, contexts: Iterable[tuple[int, ...]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The seed and the step of each context."""
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    found = [known.get(one) or known.setdefault(one, key.numbers(purpose, one)) for one in contexts]
    columns = np.array(found, np.uint64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]
