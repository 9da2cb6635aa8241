"""Exact upper tails of the detectors' statistics for text without a watermark. Relative error about 1e-10."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
