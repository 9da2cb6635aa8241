"""Draws follow the distribution: chi-square at alpha 1e-6, with fixed seeds, tails included."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nucleate.backends import reference
from nucleate.core import noise
from nucleate.stages import Categorical, Gumbel, Temperature, TopP


def critical(degrees):
    """The chi-square that is exceeded once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * part**0.5) ** 3


def assert_follows(counts, p):
    """Bins that expect fewer than 10 are put together."""
    expected = p * counts.sum()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert counts[-1] < 20
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < critical(len(counts) - 1), statistic


@pytest.mark.parametrize("degrees", [2, 4, 10, 100, 600])
def test_the_critical_values_are_about_right(degrees):
    half = critical(degrees) / 2
    log_terms = [i * math.log(half) - math.lgamma(i + 1) - half for i in range(degrees // 2)]
    assert 2e-7 < math.fsum(map(math.exp, log_terms)) < 1.1e-6  # the exact tail, for even degrees


@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
@pytest.mark.parametrize(
    "logits",
    [
        [0.0, 0.0],
        [2.0, 1.0, 1.0, 0.0, -1.0, -1.0, -np.inf, -6.0],
        [0.0] * 7,
        np.where(np.arange(700) % 100 == 0, np.arange(700) / 300, -np.inf),  # seven tokens over three groups
    ],
    ids=["coin", "ties", "equal", "groups"],
)
def test_draws_of_the_reference(draw, logits):
    logits = np.array(logits, np.float32)
    stages = (Temperature(1.5), TopP(0.99), draw)
    got = [reference.draw(logits, stages, 7, step) for step in range(4000)]
    assert_follows(np.bincount(got, minlength=len(logits)), reference.probabilities(logits, stages))


@pytest.mark.parametrize("draw", [Gumbel(0), Categorical(0)], ids=["gumbel", "categorical"])
def test_seeds_are_as_good_as_steps(draw):
    logits = np.array([1.0, 0.0, 0.5, -1.0], np.float32)
    got = [reference.draw(logits, (draw,), seed, 0) for seed in range(4000)]
    assert_follows(np.bincount(got, minlength=4), reference.probabilities(logits, (draw,)))


def uniforms(seed, steps, stream, index):
    """noise.uniform for many steps at once: [steps, index]."""
    step, index = np.broadcast_arrays(steps[:, None].astype(np.uint64), np.asarray(index).astype(np.uint64))
    words = noise.philox((index, step, np.zeros_like(step), np.full_like(step, stream)), (seed, 0))
    return ((words[0] << np.uint64(32)) | words[1]).astype(np.float64) * 2.0**-64 + 2.0**-65


def many(logits, seed, steps, chunk=100):
    """The two-level draw of the reference for many steps at once."""
    groups = np.arange(-(-len(logits) // 256))
    padded = np.full(len(groups) * 256, -np.inf)
    padded[: len(logits)] = logits
    rows = padded.reshape(-1, 256)
    mass = np.logaddexp.reduce(rows, axis=1)
    drawn = []
    for part in np.array_split(steps, -(-len(steps) // chunk)):
        winner = (mass + noise.gumbel(uniforms(seed, part, noise.GROUP, groups))).argmax(axis=1)
        ids = winner[:, None] * 256 + np.arange(256)
        drawn.append(
            (rows[winner] + noise.gumbel(uniforms(seed, part, noise.TOKEN, ids))).argmax(axis=1) + winner * 256
        )
    return np.concatenate(drawn)


def test_a_whole_vocabulary_over_several_groups():
    logits = np.random.default_rng(3).normal(size=700).astype(np.float32) * 1.5
    got = many(logits, 11, np.arange(30_000))
    assert got[:200].tolist() == [reference.draw(logits, (Gumbel(0),), 11, step) for step in range(200)]
    p = reference.probabilities(logits, (Gumbel(0),))
    assert_follows(np.bincount(got, minlength=700), p)
    by_group = np.add.reduceat(p, [0, 256, 512])
    assert_follows(np.bincount(got // 256, minlength=3), by_group)


def tail(steps):
    """One token, and 128k others 18 nats below it, that have 0.2 % together: all of it is drawn, and evenly."""
    logits = np.zeros(131_072, np.float32)
    logits[70_000] = 18.0
    got = many(logits, 5, steps)
    few = got != 70_000
    expected = len(steps) * reference.probabilities(logits, (Gumbel(0),))[0] * 131_071
    assert abs(few.sum() - expected) < 4.9 * expected**0.5
    halves = np.bincount(got[few] % 2, minlength=2)
    assert_follows(halves, np.array([0.5, 0.5]))
    assert len(np.unique(got[few] // 256)) > few.sum() * 0.8 * (1 - few.sum() / 1024)
    checked = [*np.flatnonzero(few)[:5], 0, 1]
    assert got[checked].tolist() == [reference.draw(logits, (Gumbel(0),), 5, int(steps[i])) for i in checked]
    return int(few.sum())


def test_a_long_tail_gets_its_true_mass():
    assert tail(np.arange(25_000)) > 20


@pytest.mark.slow
def test_a_long_tail_gets_its_true_mass_over_many_draws():
    assert tail(np.arange(300_000)) > 450


def test_the_walk_of_categorical_reaches_the_tail():
    logits = np.zeros(131_072, np.float32)
    logits[70_000] = 18.0
    u = uniforms(5, np.arange(25_000), noise.TOKEN, np.array([0]))[:, 0]
    p = reference.probabilities(logits, (Categorical(0),))
    step = int(np.flatnonzero(u > p[70_000])[0])
    drawn = reference.draw(logits, (Categorical(0),), 5, step)
    order = np.argsort(-p, kind="stable")
    assert drawn == order[np.searchsorted(np.cumsum(p[order]), u[step])]
    assert drawn != 70_000
