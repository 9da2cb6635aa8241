"""Detectors: false alarms, power, keys, repeated and short texts; null distributions against exact sums."""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from naive_stages import token_word, uniform

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import Gumbel, GumbelWatermark, Kgw, SynthId, Temperature, TopK
from nucleate.watermark import Detection, WatermarkKey, detect
from nucleate.watermark.detection import binomial_tail, gamma_tail, weighted_bits_tail

KEY = WatermarkKey(b"0123456789abcdef")
SIZE = 600
PIPELINES = {
    "kgw": (Kgw(key=KEY), Gumbel(7)),
    "kgw(context=3, gamma=0.5)": (Kgw(context=3, gamma=0.5, key=KEY), Gumbel(7)),
    "kgw(context=3, self_hash=True)": (Kgw(context=3, self_hash=True, key=KEY), Gumbel(7)),
    "gumbel": (Temperature(0.9), GumbelWatermark(seed=7, key=KEY)),
    "synthid": (TopK(100), SynthId(key=KEY), Gumbel(7)),
    "synthid(layers=5)": (SynthId(layers=5, key=KEY), Gumbel(7)),
}
KINDS = [*PIPELINES]


def generated(pipeline, count=80, seed=0):
    """Tokens sampled from rows of a pseudo-random language model without context."""
    logits = np.random.default_rng(seed).normal(size=(1, SIZE)).astype(np.float32) * 2
    sampler = nc.Sampler(SIZE, backend="reference")
    row = sampler.add(pipeline, output_ids=())
    for _ in range(count):
        sampler(logits)
    return list(sampler.output_ids(row))


@pytest.mark.parametrize("kind", KINDS)
def test_marked_text_is_found_with_its_key_only(kind):
    ids = generated(PIPELINES[kind])
    found = detect(ids, KEY, kind)
    assert found.p_value < 1e-6
    assert found.statistic > found.expected
    assert 40 < found.num_scored <= 80
    assert detect(ids, WatermarkKey(b"another key of 16 bytes"), kind).p_value > 1e-4
    assert detect(generated((Gumbel(7),)), KEY, kind).p_value > 1e-4


def p_values(kind, texts, length, size):
    """The p-values of texts without a watermark: random tokens, few of them, so that contexts repeat."""
    rng = np.random.default_rng(12)
    return np.array([detect(rng.integers(0, size, length), KEY, kind).p_value for _ in range(texts)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("texts", "size"), [(200, 30), *(pytest.param(5_000, size, marks=pytest.mark.exhaustive) for size in (6, 1000))]
)
def test_false_alarms_have_their_probability(kind, texts, size):
    """The share of p-values up to a level is the level: within 4 standard deviations, or lower if they are discrete."""
    found = p_values(kind, texts, 50, size)
    for level in (0.5, 0.1, 1e-2, 1e-3):
        share, error = np.mean(found <= level), 4 * math.sqrt(level / texts) + 1 / texts
        assert share <= level + error
        assert kind != "gumbel" or share >= level - error


def test_every_token_is_scored_once():
    """By plain Python, with repeated contexts."""
    ids = [5, 300, 5, 300, 5, 9, 5, 300, 599]
    key = KEY
    pairs = {(a, b) for a, b in pairwise(ids)}
    green = [token_word(*key.numbers("kgw green", [a]), b) < 2**30 for a, b in pairs]
    tail = sum(math.comb(5, k) * 0.25**k * 0.75 ** (5 - k) for k in range(sum(green), 6))
    assert detect(ids, KEY) == Detection(pytest.approx(tail), sum(green) / 5, 0.25, 5)
    first = [(5, 300), (300, 5), (9, 5)]
    u = []
    for context, token in first:
        numbers = key.numbers("gumbel noise", [context])
        u += [uniform(*numbers, 1, token // 256), uniform(*numbers, 0, token)]
    found = detect(ids, KEY, "gumbel(context=1)")
    assert found.num_scored == 3
    assert found.statistic == pytest.approx(-sum(map(math.log, u)) / 6)
    bits = [token_word(*key.numbers("synthid", [context]), token) & 3 for context, token in first]
    total = sum(10 * (word & 1) + (word >> 1) for word in bits)
    assert detect(ids, KEY, "synthid(context=1, layers=2)").statistic == pytest.approx(total / 33)


@pytest.mark.parametrize("kind", KINDS)
def test_short_and_empty_texts_have_p_value_1(kind):
    for ids in ([], [3], np.zeros(0, np.int64)):
        found = detect(ids, KEY, kind)
        assert (found.p_value, found.num_scored, found.statistic) == (1.0, 0, found.expected)
    json.dumps(detect([1] * 50, KEY, kind)._asdict(), allow_nan=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_text_is_no_evidence(kind):
    once, many = detect([1, 2, 3, 4, 5] * 2, KEY, kind), detect([1, 2, 3, 4, 5] * 100, KEY, kind)
    assert many.num_scored <= 5
    assert many.num_scored - once.num_scored <= 1


@pytest.mark.slow
def test_edits_remove_part_of_the_mark():
    rng = np.random.default_rng(3)
    for kind in KINDS:
        ids = np.array(generated(PIPELINES[kind], 120))
        edited = ids.copy()
        edited[rng.choice(120, 20, replace=False)] = rng.integers(0, SIZE, 20)
        assert detect(ids, KEY, kind).p_value < detect(edited, KEY, kind).p_value < 1e-3


def test_errors_name_what_is_allowed():
    for watermark, message in {
        "kwg": "unknown watermark 'kwg'; did you mean kgw?",
        "kgw(3)": "name the parameters of kgw: delta, gamma, context, self_hash",
        "kgw(width=3)": "unknown parameter of kgw 'width'",
        "kgw(gamma=2)": "watermark: kgw: gamma must be a number",
        "kgw(key='abc')": "unknown parameter of kgw 'key'",
        "kgw | gumbel": "watermark must be one of kgw, gumbel, synthid",
        "kgw(": "watermark is not of the form",
        7: "watermark must be a stage of Kgw, GumbelWatermark, SynthId",
    }.items():
        with pytest.raises(ParameterError, match=message.replace("(", r"\(").replace("?", r"\?")):
            detect([1, 2], KEY, watermark)
    with pytest.raises(ParameterError, match="must have 16 to"):
        detect([1, 2], b"short")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        detect([-1, 2], KEY)
    with pytest.raises(TypeError, match="list of token ids"):
        detect("text", KEY)


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


@pytest.mark.slow
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
