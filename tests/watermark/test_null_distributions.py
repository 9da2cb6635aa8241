"""The tails of the null distributions against exact sums."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest

from nucleate.watermark.detection import binomial_tail, gamma_tail, weighted_bits_tail


@pytest.mark.parametrize("p", [2.0**-32, 0.25, 0.5, 0.9])
def test_binomial_tail_equals_the_exact_sum(p):
    chance = Fraction(p)
    for count in (1, 2, 7, 150):
        for least in {0, 1, count // 4, count // 2, count - 1, count}:
            terms = (math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(least, count + 1))
            assert binomial_tail(count, p, least) == pytest.approx(float(sum(terms)), rel=1e-10)


def test_gamma_tail_equals_the_exact_sum():
    with localcontext() as context:
        context.prec = 60
        for shape in (1, 2, 30, 400):
            for least in (0.01, 0.5 * shape, 1.0 * shape, 1.3 * shape, 3.0 * shape):
                term, total = Decimal(1), Decimal(0)
                for k in range(shape):
                    total, term = total + term, term * Decimal(least) / (k + 1)
                assert gamma_tail(shape, least) == pytest.approx(float(total * (-Decimal(least)).exp()), rel=1e-10)


def test_the_tail_of_weighted_bits_equals_the_exact_sum():
    rng = random.Random(4)
    for _ in range(30):
        weights, count = [rng.randrange(1, 8) for _ in range(rng.randrange(1, 5))], rng.randrange(1, 12)
        ways = [1]
        for weight in weights * count:
            ways = [a + b for a, b in zip([*ways, *[0] * weight], [*[0] * weight, *ways], strict=True)]
        for least in range(len(ways)):
            exact = sum(ways[least:]) / 2 ** (len(weights) * count)
            assert weighted_bits_tail(weights, count, least) == pytest.approx(exact, rel=1e-9)


def test_small_probabilities_keep_their_precision():
    # 300 bits of weight 1, all 1; and the same with one 0
    assert weighted_bits_tail([1], 300, 300) == 2.0**-300
    assert weighted_bits_tail([1], 300, 299) == pytest.approx(301 * 2.0**-300, rel=1e-9)
    assert 0 < binomial_tail(1000, 0.25, 700) < 1e-150
    assert 0 < gamma_tail(1000, 2000.0) < 1e-80


def test_nothing_scored_has_probability_1():
    assert binomial_tail(0, 0.25, 0) == gamma_tail(0, 0.0) == weighted_bits_tail([3, 2], 0, 0) == 1.0
    assert weighted_bits_tail([], 5, 0) == 1.0
