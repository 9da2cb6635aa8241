"""The reference against an independent implementation in plain Python (naive.py)."""

from __future__ import annotations

import naive_sampler as naive
import numpy as np
import pytest
import tiers
from pipeline_cases import case

from nucleate.sampling import reference
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.stages import Categorical, Greedy, Gumbel, LogitBias, MinP, Suppress, Temperature, TopK, TopP

SIMPLE = 1e-13  # relative error of scores: the reference sums in another order
ENTROPY = 1e-6  # a power of the entropy magnifies that error


def past(history, u=1.0):
    return naive.Past(list(history.prompt), list(history.output), history.mask, u)


@pytest.mark.slow
def test_survivors_and_probabilities_equal_the_naive_ones():
    errors, random_decisions = 0, 0
    count = tiers.count(600, 3000)
    for seed in range(count):
        logits, stages, history, _ = case(seed)
        for u in (1.0, 0.2) if any(stage.name == "xtc" for stage in stages) else (1.0,):
            random_decisions += u < 1
            try:
                naively = naive.run(logits, stages, past(history, u))
            except naive.BadRowError:
                errors += 1
                with pytest.raises(reference.RowError):
                    reference.survivors(logits, stages, history, u)
                continue
            survivors = reference.survivors(logits, stages, history, u)
            assert survivors.ids_N.tolist() == naively.order, (seed, stages)
            rough = any(stage.name == "dynamic_temperature" for stage in stages)
            np.testing.assert_allclose(
                survivors.x_N, list(naively.x.values()), rtol=ENTROPY if rough else SIMPLE, atol=1e-13
            )
        try:
            expected = naive.probabilities(logits, stages, past(history))
        except naive.BadRowError:
            with pytest.raises(reference.RowError):
                reference.probabilities(logits, stages, history)
            continue
        p = reference.probabilities(logits, stages, history)
        np.testing.assert_allclose(p, expected, rtol=1e-5 if rough else 1e-9, atol=1e-300, err_msg=f"{seed} {stages}")
        assert p.sum() == pytest.approx(1.0)
    assert 70 / 3000 < errors / count < 0.4
    assert random_decisions / count > 0.05


GOLDEN = {
    "gumbel": [568, 568, 1389, 1088, 173, 448, 1655, 718, 1334, 568, 99, 544],
    "categorical": [1680, 1285, 1284, 1384, 1187, 1408, 1680, 1680, 1853, 915, 1385, 942],
}


@pytest.mark.parametrize("kind", [Gumbel, Categorical])
def test_golden_tokens(kind):
    """Fixed forever: changing one of these changes every seeded output of every user."""
    logits = (np.arange(2000) * 7919 % 2000 / 200).astype(np.float32)
    stages = (Temperature(0.8), TopP(0.98), kind(0))
    pairs = [(seed, step) for seed in (0, 42, 2**64 - 1) for step in (0, 1, 2**33, 2**64 - 1)]
    got = [reference.draw(logits, stages, seed, step) for seed, step in pairs]
    assert got == GOLDEN[kind.name]


@pytest.mark.parametrize("draw", [Greedy(), Gumbel(0), Categorical(0)])
def test_a_token_is_always_sampled(draw):
    for size in (1, 300):
        logits = np.full(size, -np.inf, np.float32)
        logits[size - 1] = -3e38
        assert reference.draw(logits, (draw,), 5, 7) == size - 1


def test_ties_go_to_the_lowest_id():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert reference.survivors(logits, (TopK(2),)).ids_N.tolist() == [1, 2]
    assert reference.draw(logits, (Greedy(),), 0, 0) == 1
    assert reference.survivors(logits, (LogitBias({0: 1.0}), TopK(2))).ids_N.tolist() == [0, 1]


def test_a_scale_keeps_the_order_even_where_rounding_makes_ties():
    logits = np.array([0, 1e-30], np.float32)
    for after in (TopK(1), Greedy()):
        stages = (Temperature(1e300), after, Gumbel(0)) if after != Greedy() else (Temperature(1e300), after)
        assert reference.draw(logits, stages, 0, 0) == reference.draw(logits, simplify(stages), 0, 0) == 1


def test_a_ban_after_greedy_applies():
    stages = (TopK(1), Suppress((0,)), Gumbel(0))
    logits = np.array([2, 1], np.float32)
    for each in (stages, simplify(stages)):
        with pytest.raises(reference.RowError, match="every token is at -inf after suppress"):
            reference.draw(logits, each, 0, 0)


def test_overflow_drops_tokens_without_warnings():
    logits = np.array([3e38, -3e38, 0], np.float32)
    stages = (Temperature(1e-300), TopP(0.9), MinP(0.1), Gumbel(0))
    assert reference.survivors(logits, stages).ids_N.tolist() == [0]
    bias = (LogitBias({0: 1.7e308, 1: -1.7e308}), TopP(0.9), Gumbel(1))
    assert reference.probabilities(logits, bias).tolist() == [1, 0, 0]


def test_row_statistics():
    got = reference.statistics(np.array([1.0, 2.0, 4.0]))
    p = np.exp([-3, -2, 0]) / np.exp([-3, -2, 0]).sum()
    assert (got.n, got.top) == (3, 4.0)
    assert got.mass == pytest.approx(1 + np.exp(-2) + np.exp(-3))
    assert got.square == pytest.approx(1 + np.exp(-4) + np.exp(-6))
    assert got.entropy == pytest.approx(-(p * np.log(p)).sum())
    assert (got.mean, got.var) == pytest.approx((7 / 3, np.var([1, 2, 4])))
    single = reference.statistics(np.array([-1e30]))
    assert tuple(single)[:8] == (1, -1e30, 1.0, 1.0, 0.0, -1e30, 0.0, 1.0)
    assert reference.statistics(np.full(10, 3e38)).var == 0
    with np.errstate(over="ignore"):
        far = reference.statistics(np.array([1.7e308, -1.7e308]))
    assert (far.mass, far.entropy) == (1.0, 0.0)
