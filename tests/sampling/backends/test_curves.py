"""Scales that are polynomials: the same tokens as the reference, without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nucleate.sampling import reference, stages
from nucleate.sampling.cpu import evaluation
from nucleate.sampling.cpu.edited_row import EditedRow, fitted
from nucleate.sampling.stage import RowStats, Scale

ROW = RowStats(*map(np.float64, (9, 0.0, 2.0, 1.5, 1.0, -1.0, 2.0, 2.0)))
GUMBEL = stages.Gumbel(seed=1)


class Cubic(Scale):
    """Rises, but not in every rounding."""

    def apply(self, x: Any, row: Any) -> Any:
        return 0.3 * x + 0.02 * (x - row.top) * x * x - 0.001 * (row.top - x) * (row.top - x)


class Bump(Scale):
    """A cubic that falls between two of the scores at which it is checked."""

    monotone = False

    def apply(self, x: Any, row: Any) -> Any:
        return x * (x + 4.0) * (x + 5.0)


class Sine(Scale):
    """Not a polynomial."""

    def apply(self, x: Any, row: Any) -> Any:
        return x + np.sin(x)


def rows(size: int) -> list[np.ndarray]:
    draw = np.random.default_rng(size)
    noise = draw.normal(0, 2.5, size)
    peaked = noise + np.where(draw.random(size) < 20 / size, 15.0, 0.0)
    masked = np.where(draw.random(size) < 0.5, -np.inf, noise)
    alone = np.full(size, -np.inf)
    alone[size // 2] = 3.0
    far = np.where(np.arange(size) < 3, 3.4e38, -3.4e38)
    some = (
        noise,
        peaked,
        masked,
        alone,
        far,
        np.round(noise),
        np.zeros(size),
        noise * 1e-20,
        noise * 1e20,
        noise + 1e6,
    )
    return [one.astype(np.float32) for one in some]


SCALES = [
    *(stages.Quadratic(factor) for factor in (0.3, 0.01, 4.0, 1e-30, 1e30, 1e-300, 1e300)),
    *(stages.Quadratic(0.3, curve) for curve in (1.0 + 2**-52, 1.7, 3.0)),
    *(Cubic(), Sine(), Bump()),
]
AFTER: list[tuple[Any, ...]] = [
    (),
    (stages.Temperature(0.5),),
    (stages.Temperature(1e-4), stages.TopP(0.9)),
    (stages.TopK(5), stages.TopP(0.5)),
    (stages.TopP(0.9),),
    (stages.Typical(0.7),),
    (stages.MinP(0.02), stages.Typical(0.9)),
    (stages.TopNSigma(1.0),),
    (stages.Xtc(1.0, 0.01), stages.Eta(1e-3)),
    (stages.PLess(True),),
    (stages.Quadratic(0.7), stages.TopH(0.5)),
    (stages.LogitBias({3: 2.0, 5: -1.0}), stages.Epsilon(1e-4)),
    (stages.Mirostat(2.0),),
    (stages.Logprobs(5),),
    (stages.DynamicTemperature(0.5, 1.5),),
    (stages.AdaptiveP(0.3),),
]
EXACT = AFTER[:8]
"""Their scores do not depend on sums."""


@pytest.mark.parametrize("after", AFTER, ids=repr)
@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize(
    "before", [(), (stages.Temperature(0.7),), (stages.LogitBias({7: 4.0}), stages.Suppress((8,)))], ids=repr
)
@pytest.mark.fast_cases(0)
def test_the_same_as_the_reference(before: tuple[Any, ...], scale: Scale, after: tuple[Any, ...]) -> None:
    pipeline = (*before, scale, *after)
    for size in (40, 3000):
        for place, row_V in enumerate(rows(size)):
            for seed in range(2):
                results: list[Any] = []
                scores = []
                for backend in (reference, evaluation):
                    try:
                        found = backend.run(row_V, (*pipeline, GUMBEL), seed, 3)
                        kept = backend.survivors(row_V, (*pipeline, GUMBEL), u=0.0)
                        logprobs = None if found.logprobs is None else [one.token_id for one in found.logprobs.top]
                        results.append((found.token, kept.ids_N.tolist(), logprobs))
                        scores.append(kept.x_N)
                    except reference.RowError as error:
                        results.append(str(error))
                assert results[0] == results[1], (place, seed)
                if scores:  # equal, but for rules that read sums
                    np.testing.assert_allclose(*scores, rtol=0.0 if after in EXACT else 1e-9, atol=1e-300)


def test_a_curve_does_not_rank_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw reads the row in order of ids, a truncation ranks the tokens that it needs."""
    listed = []
    ranked = EditedRow.ranked
    monkeypatch.setattr(
        EditedRow, "ranked", lambda self, lowest: (listed.append((r := ranked(self, lowest))[0].size), r)[1]
    )
    row_V = np.random.default_rng(0).normal(0, 2.5, 50_000).astype(np.float32)
    for after in ((), (stages.TopK(40),), (stages.MinP(0.1),), (stages.Temperature(0.5), stages.TopP(0.3))):
        evaluation.run(row_V, (stages.Quadratic(0.3, 1.5), *after, GUMBEL), 0, 0)
    assert sum(listed) < 6000


def test_a_fitted_curve_equals_the_rule_and_other_rules_have_none() -> None:
    z = -np.geomspace(1e-3, 100, 50)
    for scale in (stages.Quadratic(0.3), stages.Quadratic(1e-9, 3.0), stages.Quadratic(1e9, 2.0), Cubic()):
        curve = fitted(scale.apply, ROW)
        assert curve is not None
        assert curve.at(z) == pytest.approx(scale.apply(z, ROW), rel=1e-11, abs=1e-11)
    assert fitted(Sine().apply, ROW) is None
    assert fitted(Bump().apply, ROW) is None
    assert fitted(stages.Quadratic(1e-300).apply, ROW) is None
