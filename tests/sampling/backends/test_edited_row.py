"""Rows after Shifts, through the fused kernel and the composed path: survivors and tokens equal the reference."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from typing import Any

import edge_rows as edges
import numpy as np
import pipeline_cases as cases
import pytest
import tiers

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.cpu import edited_row
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.history import History
from nucleate.sampling.maths import maximum, ones
from nucleate.sampling.pipeline import simplify, to_fused_pipeline
from nucleate.sampling.stage import Prefix, RowStats, Shift, param
from nucleate.sampling.stages import STAGES, Frequency, Gumbel, Mask, Presence, Repetition, Temperature

SHIFTS = [name for name, kind in STAGES.items() if issubclass(kind, Shift)]
DRAWS = 2


def shifts(rng: random.Random, size: int, pool: tuple[int, ...]) -> tuple[Shift, ...]:
    """One to four Shifts in any order, at the edges of their parameters; half of the time from ``stages``."""
    names = rng.sample(SHIFTS, rng.randrange(1, 5))
    if rng.random() < 0.5:
        return tuple(cases.stage(rng, name, size, pool) for name in names)
    usual = [Repetition(rng.uniform(1.0, 1.5)), Frequency(rng.uniform(0, 1)), Presence(rng.uniform(-1, 1))]
    bias = STAGES["logit_bias"](dict.fromkeys(cases.ids(rng, size, 6), rng.uniform(-5, 5)))
    return (bias, *rng.sample(usual, rng.randrange(1, 4)))


def survey(count: int, seed: int) -> Counter[str]:
    """Compare random rows with histories; return how many were compared and how many are errors."""
    array_rng, found = np.random.default_rng(seed), Counter[str]()
    for turn in range(count):
        rng = random.Random(seed * 10**9 + turn)
        size = max(2, int(array_rng.choice(edges.SMALL)))
        kind = str(array_rng.choice(edges.KINDS))
        x = edges.row(array_rng, size, kind)
        fused_params, _ = edges.numbers_for(array_rng, x)
        pool = cases.ids(rng, size, 6)
        edits, rest = shifts(rng, size, pool), edges.pipeline(fused_params)
        stages = (*edits, *rest)
        if isinstance(to_fused_pipeline(simplify(stages)), str):
            continue
        masked = any(isinstance(stage, Mask) for stage in edits)
        packed = cases.mask(rng, size)[: -(-size // 32)] if masked else None
        past = History(cases.ids(rng, size, 25, pool), cases.ids(rng, size, 25, pool), packed)
        keys = [rng.getrandbits(64) for _ in range(DRAWS)]
        batch = [(*stages[:-1], Gumbel(key)) for key in keys]
        history_fields = {
            "prompt_ids": [past.prompt] * DRAWS,
            "output_ids": [past.output] * DRAWS,
            "mask": None if packed is None else np.stack([packed] * DRAWS),
        }
        description = (seed, turn, size, kind, stages, past)
        found["rows"] += 1
        tokens = draws(x, batch, turn, history_fields)
        try:
            survivors = reference.survivors(x, stages, past)
            expected: object = [reference.select_token(stages[-1], survivors, key, turn) for key in keys]
        except reference.RowError as error:
            expected = dict.fromkeys(range(DRAWS), str(error))
            found["errors"] += 1
        assert tokens == expected, description
    return found


def draws(x: np.ndarray, batch: list[tuple[object, ...]], step: int, history_fields: dict[str, object]) -> object:
    """The tokens of a row with each pipeline, or the error message."""
    try:
        return nc.sample(
            np.broadcast_to(x, (DRAWS, len(x))), batch, step=step, backend="cpu", **history_fields
        ).tolist()
    except nc.LogitsError as error:
        return error.errors


@pytest.mark.slow
def test_tokens_after_shifts_equal_the_reference() -> None:
    count = tiers.count(500, 2500)
    found = survey(count, 0)
    print(found)
    assert found["rows"] > 0.6 * count
    assert found["errors"] < 0.2 * found["rows"]


@pytest.mark.exhaustive
def test_tokens_after_shifts_of_very_many_rows_equal_the_reference() -> None:
    found = survey(50_000, 1)
    print(found)
    assert found["rows"] > 30_000


def nudged(stages: tuple[object, ...]) -> list[tuple[object, ...]]:
    """The same pipeline with one parameter changed in its last digits."""
    found = []
    for index, stage in enumerate(stages):
        for attribute, parameter in stage.parameters.items():
            value = getattr(stage, attribute)
            if parameter.kind == "float" and value:
                for by in (1 - edges.SHARP, 1 + edges.SHARP):
                    try:
                        off = dataclasses.replace(stage, **{attribute: value * by})
                    except ParameterError:
                        continue
                    found.append((*stages[:index], off, *stages[index + 1 :]))
    return found


def survey_stages(seeds: range) -> Counter[str]:
    """Compare random pipelines through the composed path; return how many were compared, and float edges."""
    found: Counter[str] = Counter()
    for seed in seeds:
        logits, stages, history, _ = cases.case(seed)
        u = (1.0, 0.3, 2.0**-65)[seed % 3]
        found["rows"] += 1
        try:
            expected = reference.survivors(logits, stages, history, u)
        except reference.RowError as error:
            found["errors"] += 1
            with pytest.raises(reference.RowError, match=f"^{re.escape(str(error))}$"):
                composed.survivors(logits, stages, history, u)
            continue
        got = composed.survivors(logits, stages, history, u)
        if not np.array_equal(got.ids_N, expected.ids_N):
            near = [reference.survivors(logits, off, history, u).ids_N for off in nudged(stages)]
            assert any(np.array_equal(got.ids_N, ids) for ids in near), (seed, stages)
            found["edge: a parameter off by its last digits"] += 1
            continue
        assert np.allclose(got.x_N, expected.x_N, rtol=1e-12, atol=1e-12), (seed, stages)
        for actual_part, expected_part in zip(got.total, expected.total, strict=True):
            assert actual_part == pytest.approx(expected_part, rel=1e-12), (seed, stages)
    return found


@pytest.mark.slow
def test_survivors_after_each_stage_equal_the_reference() -> None:
    found = survey_stages(range(50_000, tiers.count(50_600, 53_000)))
    print(found)
    assert found["errors"] < 0.2 * found["rows"]
    assert found["edge: a parameter off by its last digits"] <= 1


@pytest.mark.exhaustive
def test_survivors_after_each_stage_of_long_rows_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", (2049, 5000, 12_000))
    found = survey_stages(range(60_000, tiers.count(60_100, 60_500)))
    print(found)
    assert found["errors"] < 0.2 * found["rows"]
    assert found["edge: a parameter off by its last digits"] <= 1


class AtMost(Prefix):
    """Keep the first tokens with a total weight of at most n: integers, so that the threshold is met exactly."""

    inclusive = False
    n: int = param("how many", neutral=0, low=0)

    def weight(self, x: Any, row: RowStats) -> Any:
        return ones(x)

    def target(self, row: RowStats) -> Any:
        return self.n


class AtMostTheLeast(AtMost):
    """The same from the other end of the order, whose second half is unchanged."""

    n: int = param("how many", neutral=0, low=0)

    def order(self, x: Any, row: RowStats) -> Any:
        return maximum(x, -1.0)


@pytest.mark.parametrize("size", [1, 7, 300, 3000, 9000])
@pytest.mark.parametrize("kind", [AtMost, AtMostTheLeast], ids=lambda kind: kind.name)
def test_a_threshold_that_is_met_exactly_is_inclusive(kind: type[AtMost], size: int) -> None:
    array_rng = np.random.default_rng(size)
    for x in (np.zeros(size), np.round(array_rng.normal(size=size)), array_rng.normal(size=size)):
        for n in {1, 2, size // 3 + 1, max(1, size - 1), size, size + 5}:
            for before in ((), (Temperature(1e300),)):  # makes all scores equal, and keeps the order
                stages = (*before, kind(n), Gumbel(1))
                got, expected = (engine.survivors(x.astype(np.float32), stages) for engine in (composed, reference))
                assert got.ids_N.tolist() == expected.ids_N.tolist()
                assert len(got.ids_N) == min(n, size)


@pytest.mark.exhaustive
def test_survivors_after_each_stage_of_very_many_rows_equal_the_reference() -> None:
    found = survey_stages(range(100_000, 160_000))
    print(found)
    assert found["errors"] < 0.2 * found["rows"]
    assert found["edge: a parameter off by its last digits"] <= 10


def test_a_floor_below_all_scores_lists_no_padding() -> None:
    row = edited_row.EditedRow(edited_row.RowWorkspace(2049), np.zeros(2049, np.float32))
    listed: list[int] = []
    kept = row.at_least(np.float32(-np.inf), np.float32(1.0), lambda ids_N: listed.extend(ids_N) or ids_N >= 0)
    assert listed == [*range(2049)]
    assert kept.count() == 2049
