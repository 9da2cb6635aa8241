"""Exact tests of draws: distributions after stages, settings that separate meanings, and the error rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.comparison.exact_tests import (
    ORDERS,
    STAGE_ALPHA,
    Difference,
    Expected,
    NotTested,
    Stages,
    TopTokens,
    apply,
    chi_square_tail,
    fit,
    follow,
    is_robust,
    order_questions,
    pick,
    questions,
    smallest_difference,
)


def top_tokens(row: np.ndarray, known: int | None = None) -> TopTokens:
    """The distribution of a row, of which so many tokens are known."""
    x = row.astype(np.float64)
    p = np.exp(x - x.max())
    order = np.argsort(-x, kind="stable")
    p = (p / p.sum())[order]
    known = len(p) if known is None else known
    return TopTokens(tuple(map(int, order[:known])), p[:known], float(p[known:].sum()))


def random_stages(rng: np.random.Generator) -> Stages:
    made: dict[str, Any] = {
        "temperature": round(float(rng.uniform(0.3, 3)), 3),
        "top_k": int(rng.integers(2, 12)),
        "min_p": round(float(rng.uniform(0.01, 0.6)), 3),
        "top_p": round(float(rng.uniform(0.1, 0.98)), 3),
    }
    names = [name for name in made if rng.random() < 0.6]
    return tuple((name, made[name]) for name in names)


def test_distributions_after_stages_are_those_of_the_library() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        row = rng.normal(0, 2.5, 80).astype(np.float32)
        stages = random_stages(rng)
        made = apply(top_tokens(row), stages)
        assert made is not None
        truth = nc.probabilities(row[None], nc.SamplingParams(**dict(stages)))[0]
        found = np.zeros(80)
        found[[*made.labels]] = made.q
        if is_robust(top_tokens(row), stages):
            np.testing.assert_allclose(found, truth, atol=1e-5)


def test_with_unknown_tokens_a_distribution_is_right_or_none() -> None:
    rng = np.random.default_rng(1)
    known = 0
    for _ in range(400):
        row = rng.normal(0, rng.uniform(1, 4), 200)
        stages = random_stages(rng)
        rng.shuffle(order := [*stages])  # any order
        made, truth = apply(top_tokens(row, 15), order), apply(top_tokens(row), order)
        assert truth is not None
        if made is None:
            continue
        known += 1
        q = truth.q[:15]
        np.testing.assert_allclose(made.q, q / q.sum(), rtol=1e-9)
        if made.other is not None:
            assert made.other == pytest.approx(truth.q[15:].sum(), abs=1e-9)
        assert made.other == 0 or truth.q[15:].sum() > 0
    assert 100 < known < 390


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (18.307, 10, 0.05), (30.144, 19, 0.05), (23.513, 9, 0.0051), (0.0, 5, 1.0)],
)
def test_the_tail_of_chi_square(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=0.01)


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
def test_the_rate_of_false_alarms(scale: float) -> None:
    rng = np.random.default_rng(7)
    listed = top_tokens(rng.normal(0, scale, 200), 20)
    expected = apply(listed, ())
    assert expected is not None
    p, count = np.append(listed.p, listed.rest), tiers.count(1500, 30_000)
    samples = rng.multinomial(1280, p, count)
    labels = [*listed.labels, -1]
    fails = sum(fit(expected, dict(zip(labels, map(int, sample), strict=True))).fails for sample in samples)
    assert fails <= count * STAGE_ALPHA * 2 + 4 * math.sqrt(count * STAGE_ALPHA)


@pytest.mark.parametrize("draws", [400, 1280])
def test_the_stated_power_is_reached(draws: int) -> None:
    q = np.array([0.35, 0.25, 0.2, 0.12, 0.08])
    expected = Expected(tuple("abcde"), q, 0.0)
    change = smallest_difference(expected, draws)
    other = q * (1 - q[0] - change) / (1 - q[0])
    other[0] = q[0] + change
    samples = np.random.default_rng(3).multinomial(draws, other, 600)
    found = np.mean([fit(expected, dict(zip("abcde", map(int, each), strict=True))).fails for each in samples])
    assert found**2 >= 0.97
    assert smallest_difference(expected, 4 * draws) < change


def test_a_token_outside_of_the_kept_ones_is_found_at_once() -> None:
    expected = apply(top_tokens(np.log([0.5, 0.3, 0.2])), (("top_k", 2),))
    assert expected is not None
    calls = []

    def draw(count: int, fields: Mapping[str, Any]) -> Counter[Any]:
        calls.append(count)
        return Counter({0: 625, 1: 374, 2: 1})

    with pytest.raises(Difference, match=r"1 of 1,000 draws are outside of the kept tokens: 2 1 times"):
        follow(draw, {"top_k": 2}, expected, {}, 1000)
    assert calls == [1000]
    with pytest.raises(Difference, match="outside"):  # not even one of the labels
        follow(lambda *_: Counter({0: 625, 1: 374, "other": 1}), {}, expected, {}, 1000)


def test_a_chi_square_test_needs_a_second_sample() -> None:
    expected = Expected(("a", "b"), np.array([0.5, 0.5]), 0.0)
    samples = iter([Counter(a=600, b=400), Counter(a=505, b=495)])
    assert "chi-square 0.1" in follow(lambda *_: next(samples), {}, expected, {}, 1000)
    others = {"coins": Expected(("a", "b"), np.array([0.6, 0.4]), 0.0), "dice": None}
    with pytest.raises(Difference, match=r"'a' has probability 0.5000 and is drawn 0.6000 times\. It fits coins$"):
        follow(lambda *_: Counter(a=600, b=400), {"x": 1}, expected, others, 1000)


def test_a_setting_separates_the_meanings_and_no_rounding_decides() -> None:
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(tiers.count(3, 20)):
        listed = top_tokens(rng.normal(0, 2.5, 300), 20)
        made = [questions(name, listed) for name in ("top_k", "top_p", "min_p")]
        for each in [*made, *(order_questions(first, second, listed) for first, second in ORDERS)]:
            try:
                stages, others = pick(listed, each)
            except NotTested:
                continue
            found += 1
            expected = apply(listed, stages)
            assert expected is not None
            assert np.count_nonzero(expected.q) > 1
            noisy = listed.p * np.exp(rng.normal(0, 0.002, 20))  # logprobs of a row that was rounded otherwise
            moved = apply(TopTokens(listed.labels, noisy, listed.rest), stages)
            assert moved is not None
            assert ((moved.q > 0) == (expected.q > 0)).all()
            for other in others.values():
                meant = apply(listed, other)
                assert meant is not None
                assert np.abs(meant.q - expected.q).sum() / 2 >= 0.04
    assert found > 10


def test_equal_tokens_at_a_threshold_are_not_used() -> None:
    listed = top_tokens(np.log(np.full(8, 0.125)))
    assert not is_robust(listed, (("top_k", 3),))
    with pytest.raises(NotTested):
        pick(listed, questions("top_k", listed))
