"""The fused kernel's survivors and tokens equal the reference's; float edges are counted by kind.

The tests of the survivors are slow: the function that returns them compiles for a minute.
"""

from __future__ import annotations

import time
from collections import Counter
from unittest import mock

import edge_rows as edges
import numpy as np
import pytest
import tiers
from edge_rows import agrees, left

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.maths import SLACK
from nucleate.sampling.pipeline import FusedParams, simplify, to_fused_pipeline
from nucleate.sampling.stages import Gumbel, LogitBias, MinP, Temperature, TopK, TopNSigma, TopP, Typical

SEEDS = 2
"""Samples compared per row."""


def size_of(rng: np.random.Generator) -> int:
    return int(rng.choice(edges.SMALL)) if rng.random() < 0.6 else int(rng.integers(1, 1500))


class CountFallbacks:
    """Counts the rows that the fused kernel leaves to the fallback because of near ties."""

    count = 0

    def __call__(self, *row: object) -> reference.RowResult:
        self.count += 1
        return reference.run(*row)  # type: ignore[arg-type]


def survey(count: int, seed: int, sizes: tuple[int, ...] = ()) -> Counter[str]:
    """Compare random rows; return how many were compared, and the differences at float edges. Others fail."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    for turn in range(count):
        size, kind = int(rng.choice(sizes)) if sizes else size_of(rng), str(rng.choice(edges.KINDS))
        x = edges.row(rng, size, kind)
        params, tight = edges.numbers_for(rng, x)
        stages = simplify(edges.pipeline(params))
        fused = to_fused_pipeline(stages)
        if isinstance(fused, str):
            assert "temperature" in fused
            continue
        description = (seed, turn, size, kind, params)
        found["rows"] += 1
        found["tight"] += tight
        survivors = reference.survivors(x, stages)
        assert agrees(x, fused.params, survivors.ids_N.tolist()), description
        keys = rng.integers(2**63, size=SEEDS).tolist()
        steps = rng.integers(2**40, size=SEEDS).tolist()
        batch = [edges.pipeline(params, key) for key in keys]
        others = CountFallbacks()
        with mock.patch.object(composed, "run", others):
            tokens = nc.sample(np.broadcast_to(x, (SEEDS, size)), batch, step=steps, backend="cpu").tolist()
        found["tight, left" if tight else "left"] += others.count
        for key, step, token in zip(keys, steps, tokens, strict=True):
            if token != reference.select_token(stages[-1], survivors, key, step):
                edge = edges.edge_of_a_draw(survivors, key, step, token)
                assert edge, (*description, key, step, token)
                found[f"draw: {edge}"] += 1
    return found


def fallback_share(found: Counter[str]) -> float:
    """The fraction of samples left to the fallback, over rows whose parameters are not tight by design."""
    return found["left"] / (SEEDS * (found["rows"] - found["tight"]))


@pytest.mark.exhaustive
def test_survivors_and_tokens_equal_the_reference() -> None:
    count = tiers.count(400, 3000)
    found = survey(count, 0)
    print(found)
    assert found["rows"] > 0.93 * count
    assert found["left"] <= 1
    assert edges.edges_of(found, tight=False) <= 1, found
    assert edges.edges_of(found, tight=True) < 0.03 * found["tight"], found


@pytest.mark.slow
@pytest.mark.parametrize("size", [5000, 20_000, *edges.LARGE])
def test_survivors_and_tokens_of_full_vocabularies_equal_the_reference(size: int) -> None:
    found = survey(tiers.count(10, 40) if size in edges.LARGE else tiers.count(40, 150), size, (size,))
    print(found)
    assert edges.edges_of(found, tight=False) <= 1, found
    assert edges.edges_of(found, tight=True) <= 4, found


@pytest.mark.exhaustive
def test_survivors_and_tokens_of_very_many_rows_equal_the_reference() -> None:
    found = survey(110_000, 1)
    print(found)
    assert found["rows"] >= 100_000
    assert fallback_share(found) < 1e-3  # rows of a few equal scores, where p is met exactly
    assert edges.edges_of(found, tight=False) <= 2, found
    assert edges.edges_of(found, tight=True) < 0.03 * found["tight"], found
    found = survey(400, 2, (*edges.LARGE, 20_000, 50_257, 65_537))
    print(found)
    assert edges.edges_of(found, tight=False) <= 2, found
    assert edges.edges_of(found, tight=True) <= 20, found


@pytest.mark.slow
def test_a_threshold_at_score_zero_is_found() -> None:
    """The sign bit changes between 0.0 and the number below it."""
    for top in (0.25, 2.5, 3.0, 7.0):
        m = float(np.exp(SLACK - top))
        for _ in range(50):
            if (over := top + (np.log(m) - SLACK)) == 0:
                break
            m = float(np.nextafter(m, 0.0 if over > 0 else 1.0))
        assert over == 0
        x = np.array([top, 0.0, -0.0, -1.4e-45, 1.4e-45, -1.0], np.float32)
        assert agrees(x, FusedParams(m=m), reference.survivors(x, (MinP(m),)).ids_N.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("part", [1e-4, 0.003, 0.5, 0.999])
def test_a_top_p_threshold_within_an_equal_tail_is_found(part: float) -> None:
    """One token, and groups of equal ones whose mass is just what may be removed, or a little more."""
    for below in np.linspace(2, 19, 35).tolist():
        x = np.full(256 * 60, -below, np.float32)
        x[:256] = -np.inf
        x[7] = 0.0
        e = np.exp(x.astype(np.float64))
        params = FusedParams(p=float(min((1 + part * (e.sum() - 1)) / e.sum() / (1 - edges.SLACK), 1 - 1e-9)))
        expected = reference.survivors(x, edges.pipeline(params)).ids_N.tolist()
        assert 2 <= len(expected) <= len(x) - 255
        assert agrees(x, params, expected)


@pytest.mark.parametrize("p", [0.9, 0.95])
@pytest.mark.fast_cases(0)
def test_no_token_after_the_last_of_equal_survivors_is_sampled(p: float) -> None:
    """More tokens than are checked one by one, so that the threshold is a score and an id, often met by that id."""
    x, step = np.zeros(5000, np.float32), 3
    x[::2] = -0.0
    survivors = reference.survivors(x, (TopP(p),))
    last, met = int(survivors.ids_N[-1]), 0
    assert sorted(survivors.ids_N) == list(range(last + 1))
    for start in range(0, tiers.count(8000, 24_000), 4000):
        batch = [(TopP(p), Gumbel(seed)) for seed in range(start, start + 4000)]
        tokens = nc.sample(np.broadcast_to(x, (4000, 5000)), batch, step=step, backend="cpu")
        assert tokens.max() <= last
        for index in np.flatnonzero(tokens // 256 == last // 256).tolist():
            expected = reference.select_token(Gumbel(0), survivors, start + index, step)
            assert tokens[index] == expected
            met += expected == last
    assert met


@pytest.mark.slow
@pytest.mark.parametrize("t", [1e-4, 0.3, 5.0, 1e4])
def test_a_temperature_after_a_truncation_does_not_move_the_threshold(t: float) -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-4, 1e-2, 1.0):
        x = (rng.normal(size=1000) * scale).astype(np.float32)
        for cuts in ((TopNSigma(1.5),), (TopK(300),), (TopNSigma(1.0), TopK(300)), (TopNSigma(2.0), TopK(900))):
            stages = (*cuts, Temperature(t), TopP(0.8), Gumbel(0))
            survivors = reference.survivors(x, stages)
            fused = to_fused_pipeline(stages)
            if not isinstance(fused, str):
                assert agrees(x, fused.params, survivors.ids_N.tolist())
            for seed in range(20):
                token = int(nc.sample(x[None], (*stages[:-1], Gumbel(seed)), backend="cpu")[0])
                assert token == reference.select_token(stages[-1], survivors, seed, 0)


@pytest.mark.slow
def test_every_supported_order_equals_the_reference() -> None:
    """Stages in random orders: the fused kernel runs those it supports, truncation and sampling alike."""
    rng, supported = np.random.default_rng(4), Counter[str]()
    for turn in range(3000):
        size, kind = int(rng.choice(edges.SMALL)), str(rng.choice(edges.KINDS))
        x = edges.row(rng, size, kind)
        params, tight = edges.numbers_for(rng, x)
        if tight:
            continue
        t, sigmas, k, m, p, late_m, late_t = params
        every = [Temperature(t), TopNSigma(sigmas), TopK(k), MinP(m), TopP(p), MinP(late_m), Temperature(late_t)]
        chosen = [every[i] for i in sorted(rng.choice(7, size=rng.integers(1, 5), replace=False))]
        if turn % 2:
            chosen = [chosen[i] for i in rng.permutation(len(chosen))]
        stages = simplify((*chosen, Gumbel(turn)))
        fused = to_fused_pipeline(stages)
        if isinstance(fused, str):
            continue
        supported[" ".join(type(stage).__name__ for stage in stages[:-1])] += 1
        survivors = reference.survivors(x, stages)
        assert agrees(x, fused.params, survivors.ids_N.tolist()), (turn, kind, stages)
        token = int(nc.sample(x[None], (*chosen, Gumbel(turn)), backend="cpu")[0])
        assert token == reference.select_token(stages[-1], survivors, turn, 0), (turn, kind, stages)
    assert len(supported) > 40


@pytest.mark.slow
def test_a_row_with_invalid_logits_has_no_survivors() -> None:
    for bad in (np.nan, np.inf):
        assert left(np.array([1, bad, 2], np.float32), FusedParams()) == ([], [])
    assert left(np.full(3, -np.inf, np.float32), FusedParams()) == ([], [])


def test_the_float_edge_check_detects_errors() -> None:
    """Shows that the tests above can fail."""
    x, params = np.linspace(3, -3, 100).astype(np.float32), FusedParams(p=0.9)
    order, survivors = list(range(100)), len(reference.survivors(x, edges.pipeline(params)).ids_N)
    for n in (survivors - 1, survivors + 1, 0, 100):
        assert edges.edge_of_a_set(x, params, order, order[:n]) == ""
    assert edges.edge_of_a_set(x, params, order, order[1 : survivors + 1]) == ""
    mass = np.cumsum(np.exp(x.astype(np.float64)))
    at = params._replace(p=float(mass[29] / mass[-1] / (1 - edges.SLACK)) * (1 + 1e-9))
    assert {edges.edge_of_a_set(x, at, order, order[:n]) for n in (30, 31)} == {"top-p"}
    assert {edges.edge_of_a_set(x, at, order, order[:n]) for n in (29, 32)} == {""}
    row = reference.survivors(x, edges.pipeline(params))
    sampled = reference.select_token(Gumbel(0), row, 5, 6)
    assert [edges.edge_of_a_draw(row, 5, 6, token) != "" for token in range(survivors)] == [
        token == sampled for token in range(survivors)
    ]


@pytest.mark.slow
def test_no_order_of_the_scores_is_slow():
    """Orders for which quickselect with a middle or median-of-three pivot takes hours."""
    size = 200_000
    ramp = np.linspace(-1e-3, 1e-3, size)
    orders = [ramp, -ramp, abs(ramp), -abs(ramp), np.where(np.arange(size) % 2, ramp, -ramp), np.roll(abs(ramp), 7)]
    cuts = [(TopK(k),) for k in (9, 3000, 100_000)] + [(TopP(0.9),), (Typical(0.5),), (TopP(0.5), TopK(5))]
    for x_V in orders:
        x_V = x_V.copy()
        x_V[size // 2] = 1.0
        for stages in cuts:
            start = time.thread_time()
            token = nc.sample(x_V[None].astype(np.float32), (LogitBias({5: 1.0}), *stages, Gumbel(3)), backend="cpu")
            assert time.thread_time() - start < 1.0, stages
            assert token == nc.sample(x_V[None], (LogitBias({5: 1.0}), *stages, Gumbel(3)), backend="reference")
