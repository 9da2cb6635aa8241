"""Detects watermarks in token ids. The p-values are exact for text that was written without the key.

They are upper tails of the statistics in such text, with a relative error of about 1e-10.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.keywords import with_suggestions
from nucleate.sampling.inputs import history
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN, uniforms
from nucleate.sampling.stage import Stage
from nucleate.sampling.stages import GumbelWatermark, Kgw, SynthId
from nucleate.sampling.stages.watermarks.gumbel_watermark import NOISE
from nucleate.sampling.stages.watermarks.kgw import GREEN, SELF, green_threshold, pair_words
from nucleate.sampling.stages.watermarks.synthid import TOURNAMENT
from nucleate.sampling.watermark_key import WatermarkKey, token_words
from nucleate.watermark.kinds import check_watermark, read_watermark

Floats = NDArray[np.float64]
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


def binomial_tail(count: int, p: float, least: int) -> float:
    """The probability of at least ``least`` successes in ``count`` trials."""
    if least <= 0:
        return 1.0
    factorials = _log_factorials(count)
    k = np.arange(least, count + 1)
    terms = factorials[count] - factorials[k] - factorials[count - k] + k * math.log(p) + (count - k) * math.log1p(-p)
    return _sum_exp(terms)


def gamma_tail(shape: int, least: float) -> float:
    """The probability that the sum of ``shape`` standard exponential variables is at least ``least``."""
    if least <= 0 or shape == 0:
        return 1.0
    k = np.arange(shape)
    return _sum_exp(k * math.log(least) - _log_factorials(shape)[:-1] - least)


def weighted_bits_tail(weights: Sequence[int], count: int, least: int) -> float:
    """The probability that a weighted sum of random bits is at least ``least``: ``count`` bits for each weight.

    The distribution is tilted so that its mean is ``least``, computed by a Fourier transform, and tilted back: small
    probabilities keep their relative precision.
    """
    w, highest = np.asarray(weights, np.float64), count * sum(weights)
    if least <= 0 or count == 0:
        return 1.0
    if least >= highest:
        return 2.0 ** (-count * len(w)) if least == highest else 0.0
    tilt = _tilt(w, least / count) if 2 * least > highest else 0.0
    size = 1 << highest.bit_length()
    roots, half = np.exp(-2j * np.pi * np.arange(size) / size), np.arange(size // 2 + 1)
    log_size, phase = np.zeros((2, len(half)))
    with np.errstate(divide="ignore"):  # log(0)
        for weight, times in Counter(weights).items():
            chance = 1.0 / (1.0 + math.exp(-tilt * weight))
            factor = 1.0 - chance + chance * roots[half * weight % size]
            log_size += count * times * np.log(np.abs(factor))
            phase += count * times * np.angle(factor)
    transform = np.exp(log_size) * np.exp(1j * phase)
    tilted = np.maximum(np.fft.irfft(transform, size)[least : highest + 1], 0.0)
    cumulant = count * float((np.logaddexp(0.0, tilt * w) - math.log(2.0)).sum())
    total = float((np.exp(-tilt * np.arange(len(tilted))) * tilted).sum())
    return min(1.0, math.exp(cumulant - tilt * least) * total)


def _tilt(w: Floats, mean: float) -> float:
    """The tilt at which the mean of the weighted sum of one bit per weight is ``mean``; by bisection."""
    low, high = 0.0, 64.0
    for _ in range(64):
        middle = (low + high) / 2.0
        if float((w / (1.0 + np.exp(-middle * w))).sum()) < mean:
            low = middle
        else:
            high = middle
    return low


def _log_factorials(count: int) -> Floats:
    """log(k!) for k = 0 to count."""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, count + 1.0)))))


def _sum_exp(terms: Floats) -> float:
    """The sum of exponentials, at most 1."""
    top = float(terms.max())
    return min(1.0, math.exp(top) * float(np.exp(terms - top).sum()))
