"""A Prefix that orders tokens by their distance from a score: the same tokens as the reference, with a histogram."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nucleate.sampling import reference, stages
from nucleate.sampling.cpu import evaluation
from nucleate.sampling.cpu.edited_row import EditedRow

GUMBEL = stages.Gumbel(seed=1)
SIZE = 6000
DRAW = np.random.default_rng(0)
NOISE = DRAW.normal(0, 2.5, SIZE)
ROWS = {
    "flat": NOISE,
    "narrow": 0.01 * NOISE,
    "wide": 30.0 * NOISE,
    "far": 1e6 + NOISE,
    "ties": np.round(NOISE),
    "halves": np.round(4.0 * NOISE) / 4.0,
    "two values": np.where(DRAW.random(SIZE) < 0.3, 1.0, -1.0),
    "symmetric": np.repeat(np.linspace(-5, 5, SIZE // 2), 2),
    "equal": np.zeros(SIZE),
    "masked": np.where(DRAW.random(SIZE) < 0.3, -np.inf, NOISE),
    "peak": np.where(np.arange(SIZE) == 77, 12.0, NOISE),
    "line": np.linspace(-40, 0, SIZE),
}


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.5, 0.9, 0.95, 0.9999, 1.0 - 1e-12])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.fast_cases(14)
def test_the_same_as_the_reference(name: str, p: float) -> None:
    row_V = ROWS[name].astype(np.float32)
    typical = stages.Typical(p)
    for around in (
        (typical,),
        (stages.Temperature(0.6), typical),
        (stages.Temperature(3.0), typical, stages.TopP(0.9)),
        (stages.MinP(1e-3), typical, stages.Eta(1e-4)),
        (stages.LogitBias({5: 3.0}), typical),
        (stages.Quadratic(0.05), typical),
        (stages.Typical(p, min_keep=3000), stages.TopK(2000)),
        (stages.Mask(), typical, stages.Logprobs(3)),
    ):
        pipeline: tuple[Any, ...] = (*around, GUMBEL)
        expected, found = (backend.survivors(row_V, pipeline) for backend in (reference, evaluation))
        assert found.ids_N.tolist() == expected.ids_N.tolist()
        assert found.x_N.tolist() == expected.x_N.tolist()
        assert found.total == pytest.approx(expected.total, rel=1e-9)
        for seed in range(2):
            assert evaluation.run(row_V, pipeline, seed, 0).token == reference.run(row_V, pipeline, seed, 0).token


@pytest.mark.parametrize("p", [0.5, 0.95])
def test_only_the_boundary_is_ranked(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    listed: list[int] = []

    def counting(ranked: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            ids_N, x_N = ranked(*arguments)
            listed.append(len(ids_N))
            return ids_N, x_N

        return counted

    monkeypatch.setattr(EditedRow, "ranked", counting(EditedRow.ranked))
    monkeypatch.setattr(reference, "ranked", counting(reference.ranked))
    evaluation.run(
        np.random.default_rng(3).normal(0, 2.5, 100_000).astype(np.float32), (stages.Typical(p), GUMBEL), 0, 0
    )
    assert 0 < sum(listed) < 2000


@pytest.mark.parametrize("temperature", [1e-190, 1e-100, 1e-40, 1e40, 1e190])
def test_extreme_temperatures(temperature: float) -> None:
    row_V = NOISE.astype(np.float32)
    for stage in (stages.Typical(0.9), stages.TopH(0.4), stages.TopP(0.9)):
        for draw in (GUMBEL, stages.Categorical(seed=1)):
            pipeline: tuple[Any, ...] = (stages.Temperature(temperature), stage, draw)
            assert evaluation.run(row_V, pipeline, 1, 0).token == reference.run(row_V, pipeline, 1, 0).token
