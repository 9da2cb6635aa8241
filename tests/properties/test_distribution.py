"""Sampled tokens follow the distribution: chi-square tests at alpha 1e-6, with fixed seeds, tails included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiers
from stage_examples import ENGINES, on_every_engine

from nucleate.sampling import noise, reference
from nucleate.sampling.stages import Categorical, Gumbel, LogitBias, MinP, Temperature, TopK, TopP, Typical, Xtc

DRAWS = tiers.count(60_000, 200_000)


def critical(degrees):
    """The chi-square value that is exceeded once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * part**0.5) ** 3


def assert_follows(counts, p):
    """Compare counts with probabilities; bins with an expected count below 10 are merged."""
    assert counts[p == 0].sum() == 0
    expected = p * counts.sum()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert counts[-1] < 20
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert len(counts) > 1
    assert statistic < critical(len(counts) - 1), statistic


@pytest.mark.parametrize("degrees", [2, 4, 10, 100, 600])
def test_the_critical_values_are_about_right(degrees):
    half = critical(degrees) / 2
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


def uniforms(seed, steps, stream, index):
    """noise.uniform for many steps at once: [steps, index]."""
    step, index = steps[:, None].astype(np.uint64), np.asarray(index).astype(np.uint64)
    index = np.broadcast_to(index, (len(steps), index.shape[-1]))
    words = noise.philox((index, step, np.zeros_like(step), np.full_like(step, stream)), (seed, 0))
    return ((words[0] << np.uint64(32)) | words[1]).astype(np.float64) * 2.0**-64 + 2.0**-65


def sample_many(survivors, seed, steps):
    """The two-level sampling of the reference for many steps at once, over the surviving tokens."""
    groups, group_of, sizes = np.unique(survivors.ids_N // 256, return_inverse=True, return_counts=True)
    ids, x = np.zeros((len(groups), sizes.max()), np.int64), np.full((len(groups), sizes.max()), -np.inf)
    for group in range(len(groups)):
        inside = np.flatnonzero(group_of == group)
        inside = inside[np.argsort(survivors.ids_N[inside])]
        ids[group, : len(inside)], x[group, : len(inside)] = survivors.ids_N[inside], survivors.x_N[inside]
    mass = np.logaddexp.reduce(x, axis=1)
    sampled = []
    for part in np.array_split(steps, -(-len(steps) * (len(groups) + ids.shape[1]) // 30_000)):
        winner = (mass + noise.gumbel(uniforms(seed, part, noise.GROUP, groups))).argmax(axis=1)
        best = (x[winner] + noise.gumbel(uniforms(seed, part, noise.TOKEN, ids[winner]))).argmax(axis=1)
        sampled.append(ids[winner, best])
    return np.concatenate(sampled)


def assert_draws(logits, stages, draws=DRAWS, checked=100):
    """Sample with a vectorized copy of the reference, and check some of its tokens against each backend."""
    survivors, p, steps = reference.survivors(logits, stages), reference.probabilities(logits, stages), np.arange(draws)
    got = sample_many(survivors, 7, steps)
    for engine in ENGINES:
        assert got[:checked].tolist() == [engine.draw(logits, stages, 7, step) for step in range(checked)]
        assert engine.survivors(logits, stages).ids_N.tolist() == survivors.ids_N.tolist()
        assert engine.probabilities(logits, stages) == pytest.approx(p, rel=1e-12, abs=1e-300)
    assert_follows(np.bincount(got, minlength=len(logits)), p)
    by_group = np.add.reduceat(p, np.arange(0, len(p), 256))
    if np.count_nonzero(by_group) > 1:
        assert_follows(np.bincount(got // 256, minlength=len(by_group)), by_group)


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
    ],
    ids=[
        *("temperature", "top-k", "top-p", "min-p", "all of them", "ties", "ties cut by top-k", "ties cut by top-p"),
        *("equal", "two equal tokens", "groups of one or two", "typical"),
    ],
)
def test_gumbel_sampling_follows_the_distribution(logits, stages):
    assert_draws(logits, (*stages, Gumbel(0)))


@pytest.mark.parametrize(
    "stages", [(Temperature(1.5),), (TopK(40),), (TopP(0.7),), (MinP(0.1), Typical(0.9))], ids=repr
)
def test_categorical_sampling_follows_the_distribution(stages):
    """One uniform number per step, located in the cumulative distribution."""
    stages = (*stages, Categorical(0))
    p = reference.probabilities(ROW, stages)
    survivors = reference.survivors(ROW, stages)
    u = uniforms(7, np.arange(DRAWS), noise.TOKEN, np.array([0]))[:, 0]
    mass = np.cumsum(np.exp(survivors.x_N - survivors.x_N[0]))
    got = survivors.ids_N[np.minimum(np.searchsorted(mass, u * mass[-1]), len(mass) - 1)]
    for engine in ENGINES:
        assert got[:100].tolist() == [engine.draw(ROW, stages, 7, step) for step in range(100)]
    assert_follows(np.bincount(got, minlength=len(ROW)), p)


def test_xtc_samples_the_mixture_of_both_outcomes():
    stages = (Temperature(0.8), Xtc(0.3, 0.03, (int(ROW.argmax()),)), TopP(0.95), Gumbel(0))
    steps = np.arange(tiers.count(20_000, 60_000))
    uniform = uniforms(7, steps, noise.XTC, np.array([0]))[:, 0]
    active = uniform < 0.3
    assert abs(active.sum() - 0.3 * len(steps)) < 4.9 * (len(steps) * 0.3 * 0.7) ** 0.5
    got = np.zeros(len(steps), np.int64)
    for part, u in ((active, 0.0), (~active, 1.0)):
        got[part] = sample_many(reference.survivors(ROW, stages, u=u), 7, steps[part])
    for engine in ENGINES:
        assert got[:300].tolist() == [engine.draw(ROW, stages, 7, step) for step in range(300)]
    assert_follows(np.bincount(got, minlength=len(ROW)), reference.probabilities(ROW, stages))


@on_every_engine
@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.fast_cases(2)
def test_sampling_over_seeds_follows_the_distribution(engine, draw):
    logits = np.array([1.0, 0.0, 0.5, -1.0], np.float32)
    got = [engine.draw(logits, (draw,), seed, 0) for seed in range(tiers.count(800, 2500))]
    assert_follows(np.bincount(got, minlength=4), reference.probabilities(logits, (draw,)))


@on_every_engine
@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.fast_cases(2)
def test_consecutive_tokens_are_independent(engine, draw):
    """Pairs of tokens in consecutive steps, and in one step of consecutive seeds, are independent."""
    logits = np.array([0.7, 0.0, -0.3], np.float32)
    p = reference.probabilities(logits, (draw,))
    got = np.array([[engine.draw(logits, (draw,), seed, step) for step in range(1000)] for seed in (8, 9)])
    for one, other in ((got[0, :-1], got[0, 1:]), (got[0], got[1])):
        assert_follows(np.bincount(one * 3 + other, minlength=9), np.outer(p, p).ravel())


def tail(steps):
    """One token, and 128k others 18 nats below it with 0.2 % of the mass: the tail is sampled evenly."""
    logits = np.zeros(131_072, np.float32)
    logits[70_000] = 18.0
    got = sample_many(reference.survivors(logits, ()), 5, steps)
    few = got != 70_000
    p = reference.probabilities(logits, (Gumbel(0),))
    expected = len(steps) * p[0] * 131_071
    assert abs(few.sum() - expected) < 4.9 * expected**0.5
    for parts in (2, 8):
        assert_follows(np.bincount(got[few] * parts // 131_072, minlength=parts), np.full(parts, 1 / parts))
        assert_follows(np.bincount(got[few] % parts, minlength=parts), np.full(parts, 1 / parts))
    assert len(np.unique(got[few] // 256)) > few.sum() * 0.8 * (1 - few.sum() / 1024)
    checked = [*np.flatnonzero(few)[:12], 0, 1]
    for engine in ENGINES:
        assert got[checked].tolist() == [engine.draw(logits, (Gumbel(0),), 5, int(steps[i])) for i in checked]
    return int(few.sum())


@pytest.mark.slow
def test_a_long_tail_gets_its_probability_mass():
    assert tail(np.arange(DRAWS)) > DRAWS / 700


@pytest.mark.exhaustive
def test_a_long_tail_gets_its_probability_mass_over_many_samples():
    assert tail(np.arange(DRAWS, 2_000_000)) > 3000


def test_categorical_sampling_reaches_the_tail():
    logits = np.zeros(131_072, np.float32)
    logits[70_000] = 18.0
    u = uniforms(5, np.arange(25_000), noise.TOKEN, np.array([0]))[:, 0]
    p = reference.probabilities(logits, (Categorical(0),))
    order = np.argsort(-p, kind="stable")
    few = np.flatnonzero(u > p[70_000])
    assert abs(len(few) - 25_000 * (1 - p[70_000])) < 4.9 * (25_000 * (1 - p[70_000])) ** 0.5
    for step in few[:10].tolist():
        expected = order[np.searchsorted(np.cumsum(p[order]), u[step])]
        assert expected != 70_000
        assert [engine.draw(logits, (Categorical(0),), 5, step) for engine in ENGINES] == [expected] * len(ENGINES)
