"""The metrics equal their definitions, written out over all pairs and all n-grams."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from nucleate.comparison import comparison as metrics
from nucleate.comparison.comparison import estimate


def bleu(text: list[int], references: list[list[int]]) -> float:
    """BLEU-4 as in its definition: clipped precisions of each order, and the brevity penalty."""
    product = 1.0
    for n in range(1, 5):
        own = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
        others = [Counter(tuple(ref[i : i + n]) for i in range(len(ref) - n + 1)) for ref in references]
        matches = sum(min(count, max(other[gram] for other in others)) for gram, count in own.items())
        product *= (matches or 0.1) / max(sum(own.values()), 1)
    closest = min((abs(len(ref) - len(text)), len(ref)) for ref in references)[1]
    return product**0.25 * (1 if len(text) > closest else math.exp(1 - closest / len(text)))


def random_texts(numbers: random.Random) -> list[list[int]]:
    size = numbers.choice([2, 3, 10, 50])
    count = numbers.randint(2, 6)
    texts = [[numbers.randrange(size) for _ in range(numbers.randint(1, 12))] for _ in range(count)]
    return texts + texts[: numbers.randint(0, 2)]


def test_self_bleu_equals_its_definition() -> None:
    numbers = random.Random(1)
    for _ in range(200):
        texts = random_texts(numbers)
        expected = [bleu(text, texts[:i] + texts[i + 1 :]) for i, text in enumerate(texts)]
        assert metrics.self_bleu(texts) == pytest.approx(sum(expected) / len(expected))


def test_known_values() -> None:
    same = [[1, 2, 3, 4, 5]] * 3
    assert metrics.self_bleu(same) == pytest.approx(1.0)
    assert metrics.distinct(same, 1) == 5 / 15
    assert metrics.distinct([[1, 1, 1], [1, 2]], 2) == 2 / 3
    assert metrics.repetition((7, 7, 7, 7, 7), 4) == 0.5
    assert metrics.repetition(range(10), 2) == 0
    assert metrics.repetition((1, 2, 1, 2, 1, 2), 2) == pytest.approx(1 - 2 / 5)


def test_metrics_of_too_little_text_are_undefined() -> None:
    assert math.isnan(metrics.self_bleu([[1, 2]]))
    assert math.isnan(metrics.self_bleu([[1, 2], []]))
    assert math.isnan(metrics.distinct([[1], [2]], 2))
    assert math.isnan(metrics.repetition((1, 2, 3), 4))
    assert metrics.distinct([[1], [1, 2]], 2) == 1


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    numbers, covered = random.Random(3), 0
    for _ in range(200):
        found = estimate([[numbers.gauss(5, 2) for _ in range(2)] for _ in range(40)])
        covered += found.low <= 5 <= found.high
        assert found.low <= found.mean <= found.high
    assert 175 <= covered <= 199


def test_an_interval_needs_two_values() -> None:
    one = estimate([[3.0]])
    assert (one.mean, math.isnan(one.low), math.isnan(one.high)) == (3.0, True, True)
    assert math.isnan(estimate([[], [math.nan]]).mean)
    of_outputs = estimate([[1.0, 3.0, math.nan]])  # a single prompt
    assert (of_outputs.mean, of_outputs.low, of_outputs.high) == (2.0, 1.0, 3.0)
    assert estimate([[1.0, 3.0], [5.0, math.nan]]).mean == 3.5
