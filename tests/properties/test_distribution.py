"""Sampled tokens follow the distribution: chi-square tests at alpha 1e-6, with fixed seeds, tails included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiers
from chi_square import assert_follows, critical_value
from stage_examples import ENGINES, on_every_engine

from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.single_row import SeededDraws
from nucleate.sampling.stages import Categorical, Gumbel, LogitBias, MinP, Temperature, TopK, TopP, Typical, Xtc

DRAWS = tiers.count(20_000, 200_000)


@pytest.mark.parametrize("degrees", [2, 4, 10, 100, 600])
def test_the_critical_values_are_about_right(degrees):
    half = critical_value(degrees) / 2
    log_terms = [i * math.log(half) - math.lgamma(i + 1) - half for i in range(degrees // 2)]
    assert 2e-7 < math.fsum(map(math.exp, log_terms)) < 1.1e-6  # the exact tail, for even degrees


def test_the_chi_square_test_detects_a_small_error():
    """Shows that the tests below can fail: a token that is sampled a little too often is detected."""
    p = np.full(10, 0.1)
    counts = np.round(p * 200_000).astype(int)
    assert_follows(counts, p)
    counts[0] = round(counts[0] * 1.08)
    with pytest.raises(AssertionError):
        assert_follows(counts, p)


def assert_draws(logits, stages, draws=DRAWS, checked=100):
    """Sample with many seeds, and check some of the tokens against each backend."""
    survivors, p = reference.survivors(logits, stages), reference.probabilities(logits, stages)
    got = sample_many(logits, stages, np.arange(draws))
    for engine in ENGINES:
        assert got[:checked].tolist() == [engine.draw(logits, stages, seed, 7) for seed in range(checked)]
        assert engine.survivors(logits, stages).ids_N.tolist() == survivors.ids_N.tolist()
        assert engine.probabilities(logits, stages) == pytest.approx(p, rel=1e-12, abs=1e-300)
    assert_follows(np.bincount(got, minlength=len(logits)), p)
    by_group = np.add.reduceat(p, np.arange(0, len(p), 256))
    if np.count_nonzero(by_group) > 1:
        assert_follows(np.bincount(got // 256, minlength=len(by_group)), by_group)


def sample_many(logits, stages, seeds):
    """The tokens of these seeds, in step 7."""
    return SeededDraws(logits, stages, History(), 7).tokens(seeds.astype(np.uint64))


ROW = (np.random.default_rng(3).normal(size=700) * 1.5).astype(np.float32)
SPARSE = np.where(np.arange(700) % 9 == 0, ROW, np.float32(-np.inf))
TIES = np.array([2, 1, 1, 0, -1, -1, -np.inf, -6, 1, 1, 0, 2], np.float32)
FAR_APART = np.where(np.arange(2000) % 100 == 0, np.arange(2000) % 7, -np.inf).astype(np.float32)


@pytest.mark.parametrize(
    ("logits", "stages"),
    [
        (SPARSE, (Temperature(1.5),)),
        (ROW, (TopK(40),)),
        (ROW, (Temperature(0.8), TopP(0.7))),
        (ROW, (MinP(0.1),)),
        (ROW, (Temperature(1.3), TopK(60), TopP(0.9), MinP(0.05), LogitBias({300: 3.0, 650: -1.0}))),
        (TIES, ()),
        (TIES, (TopK(5),)),
        (TIES, (TopP(0.6),)),
        (np.zeros(7, np.float32), ()),
        (np.zeros(2, np.float32), ()),
        (FAR_APART, (Temperature(2.0),)),
        (ROW, (Temperature(1.2), Typical(0.6))),
        (ROW, (Temperature(0.8), Xtc(0.3, 0.03, (int(ROW.argmax()),)), TopP(0.95))),
    ],
    ids=[
        *("temperature", "top-k", "top-p", "min-p", "all of them", "ties", "ties cut by top-k", "ties cut by top-p"),
        *("equal", "two equal tokens", "groups of one or two", "typical", "both outcomes of xtc"),
    ],
)
@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.fast_cases(0)
def test_sampling_follows_the_distribution(logits, stages, draw):
    assert_draws(logits, (*stages, draw))


@on_every_engine
@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.fast_cases(0)
def test_sampling_over_seeds_follows_the_distribution(engine, draw):
    logits = np.array([1.0, 0.0, 0.5, -1.0], np.float32)
    got = [engine.draw(logits, (draw,), seed, 0) for seed in range(tiers.count(800, 2500))]
    assert_follows(np.bincount(got, minlength=4), reference.probabilities(logits, (draw,)))


@on_every_engine
@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.fast_cases(0)
def test_consecutive_tokens_are_independent(engine, draw):
    """Pairs of tokens in consecutive steps, and in one step of consecutive seeds, are independent."""
    logits = np.array([0.7, 0.0, -0.3], np.float32)
    p = reference.probabilities(logits, (draw,))
    got = np.array([[engine.draw(logits, (draw,), seed, step) for step in range(1000)] for seed in (8, 9)])
    for one, other in ((got[0, :-1], got[0, 1:]), (got[0], got[1])):
        assert_follows(np.bincount(one * 3 + other, minlength=9), np.outer(p, p).ravel())


def tail(seeds, draw):
    """One token, and 128k others 18 nats below it with 0.2 % of the mass: the tail is sampled evenly."""
    logits = np.zeros(131_072, np.float32)
    logits[70_000] = 18.0
    got = sample_many(logits, (draw,), seeds)
    few = got != 70_000
    p = reference.probabilities(logits, (draw,))
    expected = len(seeds) * p[0] * 131_071
    assert abs(few.sum() - expected) < 4.9 * expected**0.5
    for parts in (2, 8):
        assert_follows(np.bincount(got[few] * parts // 131_072, minlength=parts), np.full(parts, 1 / parts))
        assert_follows(np.bincount(got[few] % parts, minlength=parts), np.full(parts, 1 / parts))
    assert len(np.unique(got[few] // 256)) > few.sum() * 0.8 * (1 - few.sum() / 1024)
    checked = [*np.flatnonzero(few)[:12], 0, 1]
    for engine in ENGINES:
        assert got[checked].tolist() == [engine.draw(logits, (draw,), int(seeds[i]), 7) for i in checked]
    return int(few.sum())


@pytest.mark.slow
def test_a_long_tail_gets_its_probability_mass():
    assert tail(np.arange(DRAWS), Gumbel(0)) > DRAWS / 700


@pytest.mark.exhaustive
def test_a_long_tail_gets_its_probability_mass_over_many_samples():
    assert tail(np.arange(DRAWS, 2_000_000), Gumbel(0)) > 3000


def test_categorical_sampling_reaches_the_tail():
    tail(np.arange(DRAWS), Categorical(0))
