"""Stages of other engines equal their published formulas, and min_keep equals Transformers' ``min_tokens_to_keep``."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from stage_examples import on_every_engine

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.maths import places, total
from nucleate.sampling.pipeline import to_fused_pipeline
from nucleate.sampling.stage import SampledToken
from nucleate.sampling.stages import (
    STAGES,
    EncoderRepetition,
    Epsilon,
    Eta,
    Gumbel,
    LogitBias,
    MinP,
    MirostatV1,
    Quadratic,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)


def rows(count: int, size: int, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    return (numbers.normal(size=(count, size)) * numbers.uniform(0.3, 5, (count, 1))).astype(np.float32)


def llamacpp_k(x: np.ndarray, mu: float) -> int:
    """llama.cpp's k of mirostat 1.0 for sorted scores."""
    p = np.exp(x.astype(np.float64) - x[0])
    p /= p.sum()
    above = below = 0.0
    for i in range(min(99, len(p) - 1)):
        t = math.log((i + 2) / (i + 1))
        above += t * math.log(p[i] / p[i + 1])
        below += t * t
    s = above / below
    return max(int(((s - 1) * 2**mu / (1 - len(p) ** (1 - s))) ** (1 / s)), 1)


@on_every_engine
@pytest.mark.parametrize("size", [5, 99, 100, 101, 3000])
def test_mirostat_1_keeps_the_k_of_llamacpp(engine: Any, size: int) -> None:
    for x in rows(6, size):
        for mu in (0.5, 3.0, 7.7, 10.0):
            kept = engine.survivors(x, (MirostatV1(5.0, mu=mu),)).ids_N
            expected = min(llamacpp_k(-np.sort(-x), mu), size)
            assert abs(len(kept) - expected) <= (expected > 1e5)
            assert (kept == np.argsort(-x, kind="stable")[:expected]).all()


def test_mirostat_1_at_the_limits_of_its_formula() -> None:
    zipf = -np.log(np.arange(1, 301)).astype(np.float32)  # s = 1, where numerator and denominator are 0
    kept = reference.survivors(zipf, (MirostatV1(5.0, mu=4.0),)).ids_N
    assert len(kept) == int(2**4 / math.log(300) * (1 + 1e-4))
    flat = np.zeros(300, np.float32)  # s = 0
    assert len(reference.survivors(flat, (MirostatV1(5.0, mu=8.0),)).ids_N) == 1
    assert len(reference.survivors(flat, (MirostatV1(5.0, mu=8.5),)).ids_N) == 300
    for x in (flat[:1], flat[:2], np.array([0.0, -1e30], np.float32), np.array([3e38, -3e38, -3e38], np.float32)):
        assert len(reference.survivors(x, (MirostatV1(5.0),)).ids_N) >= 1


def test_mirostat_1_learns_as_version_2() -> None:
    stage = MirostatV1(3.0, 0.5)
    assert stage.mu == 6.0
    assert stage.update(SampledToken(0, -9.0, -math.log(2.0) * 2)).mu == pytest.approx(6.0 - 0.5 * (2 - 3))
    with pytest.raises(nc.ParameterError, match="mirostat_v1_tau cannot be set with mirostat_tau"):
        nc.SamplingParams(mirostat_v1_tau=3, mirostat_tau=3)
    with pytest.raises(nc.ParameterError, match="mirostat_v1_tau=3 needs random sampling"):
        nc.SamplingParams(mirostat_v1_tau=3, temperature=0)
    for defaults in (nc.SamplingParams(top_k=40, temperature=0), nc.SamplingParams(min_p=0.1, mirostat_tau=5)):
        assert defaults.override(mirostat_v1_tau=3).build_pipeline()[:-1] == (MirostatV1(3.0),)
    assert nc.SamplingParams(mirostat_v1_tau=3).override(temperature=0).build_pipeline()[:-1] == (Temperature(0),)


@on_every_engine
def test_quadratic_sampling_equals_the_formula_of_text_generation_webui(engine: Any) -> None:
    for x in rows(4, 300):
        for factor, curve in ((0.2, 1.0), (1.0, 1.7), (3.0, 3.0)):
            kept = engine.survivors(x, (Quadratic(factor, curve),))
            d = x.astype(np.float64) - x.max()
            k, s = (3 - curve) / 2, (curve - 1) / 2
            expected = -(k * factor * d**2) + s * factor * d**3 + x.max()
            assert (kept.ids_N == np.argsort(-x, kind="stable")).all()
            assert kept.x_N - kept.x_N[0] == pytest.approx(expected[kept.ids_N] - x.max(), abs=1e-9)


def test_a_rule_may_number_and_sum_sorted_scores() -> None:
    x = np.array([[3.0, 1.0, -2.0], [0.5, 0.25, 0.0]])
    assert places(x).tolist() == [[1, 2, 3]] * 2
    assert total(x).tolist() == [2.0, 0.75]
    torch = pytest.importorskip("torch")
    assert places(torch.tensor(x)).tolist() == [[1, 2, 3]] * 2
    assert total(torch.tensor(x)).tolist() == [[2.0], [0.75]]


@on_every_engine
def test_min_keep_keeps_the_first_tokens(engine: Any) -> None:
    x = np.log(np.array([0.05, 0.6, 0.2, 0.1, 0.04, 0.01], np.float32))
    order = [1, 2, 3, 0, 4, 5]
    for n in (0, 1, 2, 4, 6, 100):
        for stage in (TopP(0.5, min_keep=n), MinP(0.9, min_keep=n), Epsilon(1.0, min_keep=n)):
            for before in ((), (Temperature(0.7),)):
                assert engine.survivors(x, (*before, stage)).ids_N.tolist() == order[: min(max(n, 1), 6)]
        assert engine.survivors(x, (TopK(2), TopP(0.5, min_keep=n))).ids_N.tolist() == order[: 1 if n < 2 else 2]
    assert engine.survivors(x, (Typical(0.05, min_keep=2),)).ids_N.tolist() == [1, 2]  # p nearest to exp(-entropy)
    for n, left in ((2, [3, 0, 4, 5]), (4, [3, 0, 4, 5]), (5, order)):
        assert engine.survivors(x, (Xtc(1.0, 0.09, min_keep=n),), u=0.0).ids_N.tolist() == left


def test_min_keep_is_one_field_for_all_truncations() -> None:
    params = nc.SamplingParams(min_keep=3, top_p=0.5, min_p=0.1, top_k=9, mirostat_v1_tau=2, xtc_probability=0.5)
    stages = {stage.name: stage for stage in params.build_pipeline()}
    assert {name for name, stage in stages.items() if getattr(stage, "min_keep", 0) == 3} == {
        *("min_p", "mirostat_v1", "top_p", "xtc")
    }
    truncations = {kind.name for kind in STAGES.values() if "min_keep" in kind.parameters}
    assert "top_k" not in truncations
    assert nc.SamplingParams(min_keep=5).build_pipeline() == nc.SamplingParams().build_pipeline()
    assert repr(TopP(0.5, min_keep=2)) == "TopP(p=0.5, min_keep=2)"
    assert nc.SamplingParams(pipeline="top_p(0.5, min_keep=2)").pipeline == (TopP(0.5, min_keep=2),)
    for least, is_fused in ((0, True), (1, True), (2, False)):
        for stage in (TopP(0.5, min_keep=least), MinP(0.5, min_keep=least), TopNSigma(1.0, min_keep=least)):
            assert isinstance(to_fused_pipeline((stage, Gumbel(1))), str) != is_fused


WARPERS = {
    "TopPLogitsWarper": (TopP, (0.1, 0.5, 0.9)),
    "MinPLogitsWarper": (MinP, (0.05, 0.5)),
    "TypicalLogitsWarper": (Typical, (0.1, 0.5, 0.9)),
    "EpsilonLogitsWarper": (Epsilon, (0.01, 0.3)),
    "EtaLogitsWarper": (Eta, (0.01, 0.3)),
}


@pytest.mark.parametrize("name", WARPERS)
def test_min_keep_equals_min_tokens_to_keep_of_transformers(name: str) -> None:
    torch, process = pytest.importorskip("torch"), pytest.importorskip("transformers.generation.logits_process")
    kind, values = WARPERS[name]
    for x in rows(8, 50, seed=3):
        for value in values:
            for least in (1, 2, 5, 20):
                warper = getattr(process, name)(value, min_tokens_to_keep=least)
                theirs = warper(None, torch.tensor(x[None], dtype=torch.float64))[0]
                kept = reference.survivors(x, (kind(value, min_keep=least),)).ids_N
                assert sorted(kept.tolist()) == torch.nonzero(theirs > -torch.inf)[:, 0].tolist()


def test_encoder_repetition_penalty_equals_that_of_transformers() -> None:
    torch, process = pytest.importorskip("torch"), pytest.importorskip("transformers.generation.logits_process")
    prompt = [3, 7, 7, 20]
    for x in rows(5, 50, seed=4):
        for r in (0.5, 1.3, 4.0):
            theirs = process.EncoderRepetitionPenaltyLogitsProcessor(r, torch.tensor([prompt]))
            expected = theirs(None, torch.tensor(x[None], dtype=torch.float64))[0].numpy()
            kept = reference.survivors(x, (EncoderRepetition(r),), History(prompt, [1, 2, 3]))
            assert kept.x_N == pytest.approx(expected[kept.ids_N])


@pytest.mark.slow
@pytest.mark.parametrize("size", [3000, 60_000])
def test_sorted_scores_of_long_rows_equal_those_of_the_reference(size: int) -> None:
    """Listed by the maxima of the groups, after scales, truncations and edits, and by a slice on torch."""
    pipelines = [
        (MirostatV1(6.0), Gumbel(1)),
        (Temperature(0.3), MirostatV1(6.0), Gumbel(1)),
        (TopK(70), MirostatV1(6.0, min_keep=3), Gumbel(1)),
        (MinP(1e-4), Quadratic(0.2), MirostatV1(4.0), Gumbel(1)),
        (LogitBias({5: 9.0, 17: -4.0}), MirostatV1(9.0), TopP(0.9), Gumbel(1)),
    ]
    backends = ["reference", "cpu", *(["torch"] if find_spec("torch") else [])]
    for stages in pipelines:
        found = []
        for backend in backends:
            sampler = nc.Sampler(size, backend=backend)
            for _ in range(3):
                sampler.add(stages, seed=7)
            found.append([sampler(rows(3, size, step)).token_ids.tolist() for step in range(4)])
        assert found == [found[0]] * len(backends)


def test_mirostat_1_on_extreme_rows_equals_the_reference_on_every_backend() -> None:
    wide = np.linspace(-3e38, 3e38, 40, dtype=np.float32)
    x = np.stack([wide, wide[::-1], np.where(np.arange(40) < 2, wide, -np.inf), np.zeros(40)]).astype(np.float32)
    for stages in ((MirostatV1(3.0), Gumbel(1)), (Temperature(1e-300), MirostatV1(3.0), Gumbel(1))):
        found = []
        for backend in ["reference", "cpu", *(["torch"] if find_spec("torch") else [])]:
            sampler = nc.Sampler(40, backend=backend)
            for _ in x:
                sampler.add(stages, seed=2)
            found.append(sampler(x).token_ids.tolist())
        assert found == [found[0]] * len(found)
        assert -1 not in found[0]
