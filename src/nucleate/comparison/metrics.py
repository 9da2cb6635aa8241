"""Metrics of generated token ids, and their means with bootstrap intervals. docs/compare.md defines them.

n-grams are over token ids. A metric that is not defined, as for texts that are too short, is NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Tokens = Sequence[int]

MAX_ORDER = 4
"""BLEU counts n-grams of 1 to this many tokens."""
NO_MATCH = 0.1
"""Matches of an order without any, so that the geometric mean is not 0 (smoothing method 1 of Chen and Cherry 2014)."""


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """All n-grams of a text, in order."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct(texts: Iterable[Tokens], n: int) -> float:
    """The number of different n-grams of some texts over the number of all (Li et al., arXiv 1510.03055)."""
    found = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else math.nan


def repetition(text: Tokens, n: int) -> float:
    """The part of the n-grams of a text that occurred in it before (seq-rep-n; Welleck et al., arXiv 1908.04319)."""
    return 1.0 - distinct([text], n)


def self_bleu(texts: Sequence[Tokens]) -> float:
    """The mean BLEU-4 of each text with all others as references (Zhu et al., arXiv 1802.01886)."""
    texts = [text for text in texts if text]
    if len(texts) < 2:
        return math.nan
    logs = [0.0] * len(texts)
    for n in range(1, MAX_ORDER + 1):
        counts = [Counter(ngrams(text, n)) for text in texts]
        highest = _two_highest(counts)
        for i, own in enumerate(counts):
            matches = sum(min(count, _highest_of_others(highest[gram], i)) for gram, count in own.items())
            logs[i] += math.log((matches or NO_MATCH) / max(own.total(), 1)) / MAX_ORDER
    lengths = sorted(map(len, texts))
    return sum(math.exp(one) * _brevity(len(text), lengths) for one, text in zip(logs, texts, strict=True)) / len(texts)


def _two_highest(counts: Sequence[Counter[tuple[int, ...]]]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Of each n-gram, the two highest numbers of occurrences in a text, each with the index of the text."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, own in enumerate(counts):
        for gram, count in own.items():
            entries = found.setdefault(gram, [])
            entries.append((count, i))
            entries.sort(reverse=True)
            del entries[2:]
    return found


def _highest_of_others(entries: Sequence[tuple[int, int]], own: int) -> int:
    return next((count for count, i in entries if i != own), 0)


def _brevity(length: int, lengths: Sequence[int]) -> float:
    """The brevity penalty, by the length of another text that is closest; of two, the shorter one."""
    others = [*lengths]
    others.remove(length)
    closest = min(others, key=lambda other: (abs(other - length), other))
    return 1.0 if length > closest else math.exp(1.0 - closest / length)


RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean, and the bounds of its 95 % interval; NaN if unknown."""

    mean: float
    low: float
    high: float


def estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean over prompts of the mean of each, with a percentile bootstrap over prompts.

    groups: the values of each prompt; a metric of all outputs together has one. NaN values are left out. With a single
    prompt, the bootstrap is over its values.
    """
    known = [[value for value in group if value == value] for group in groups]  # noqa: PLR0124  # not NaN
    means = [float(np.mean(group)) for group in known if group]
    if not means:
        return Estimate(np.nan, np.nan, np.nan)
    mean, units = float(np.mean(means)), means if len(means) > 1 else next(filter(None, known))
    if len(units) < 2:
        return Estimate(mean, np.nan, np.nan)
    index_BU = np.random.default_rng(0).integers(0, len(units), (RESAMPLES, len(units)))  # the same for all settings
    means_B = np.asarray(units)[index_BU].mean(axis=1)
    low, high = np.quantile(means_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))
