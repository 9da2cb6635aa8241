"""The limits of cumulative truncations: top_p, top_h and typical_p of 0 keep one token, on every backend."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from stage_examples import on_every_engine

import nucleate as nc
from nucleate.sampling.pipeline_format import GREEDY
from nucleate.sampling.stages import Gumbel, LogitBias, TopH, TopK, TopP, Typical, Xtc

EDGES: dict[str, list[float]] = {
    "ties": [1.0, 3.0, 3.0, 3.0, -2.0],
    "masked": [-np.inf, -np.inf, 0.5, 0.5, -np.inf],
    "one": [-np.inf, 0.0, -np.inf, -np.inf, -np.inf],
    "flat": [0.0] * 5,
    "huge": [3e38, -3e38, 3e38, 0.0, -np.inf],
    "peaked": [0.0, -800.0, -900.0, 700.0, -800.0],
}
KINDS = {"top_p": TopP, "top_h": TopH, "typical_p": Typical}


@on_every_engine
@pytest.mark.parametrize("row", EDGES)
@pytest.mark.parametrize("field", KINDS)
def test_one_token_survives(engine: Any, row: str, field: str) -> None:
    logits = np.array(EDGES[row], np.float32)
    for seed in range(5):
        kept = engine.survivors(logits, (KINDS[field](0.0), Gumbel(seed)))
        assert len(kept.ids_N) == 1
        if field != "typical_p":
            assert engine.draw(logits, (KINDS[field](0.0), Gumbel(seed)), seed, 0) == np.argmax(logits)


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu", "torch"])
def test_a_sampler_selects_the_most_likely_token(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    logits = np.round(rng.normal(0, 2, (6, 700)), 1).astype(np.float32)  # with ties
    given: list[Any] = [
        nc.SamplingParams(top_p=0),
        nc.SamplingParams(top_p=-0.0, temperature=1.7, seed=4),
        nc.SamplingParams(top_h=0, repetition_penalty=1.3),
        (TopP(0), LogitBias({3: 2.0})),
        (TopP(0, min_keep=1), Gumbel(5)),
        nc.SamplingParams(top_p=0, top_k=50, min_p=0.1, order="llama.cpp", draw="categorical"),
    ]
    if backend == "torch":
        import torch

        logits_BV: Any = torch.tensor(logits)
    else:
        logits_BV = logits
    sampler = nc.Sampler(700, backend=backend)
    for params in given:
        sampler.add(params)
    found = [int(token) for token in sampler(logits_BV).token_ids]
    assert found == logits.argmax(1).tolist()


@pytest.mark.slow
def test_the_limit_is_that_of_a_tiny_value() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (40, 90)).astype(np.float32)
    for kind in KINDS.values():
        for before in ((), (TopK(7),), (Xtc(0.5, 0.1),)):
            tiny, zero = ((*before, kind(p), Gumbel(2)) for p in (1e-12, 0.0))
            assert nc.sample(logits, tiny).tolist() == nc.sample(logits, zero).tolist(), (kind, before)


def test_min_keep_is_kept() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (1, 90)).astype(np.float32)
    for kind in KINDS.values():
        for backend in ("reference", "cpu"):
            p = nc.probabilities(logits, (kind(0.0, min_keep=4),), backend=backend)
            assert np.count_nonzero(p) == 4
        assert not kind(0.0, min_keep=4).greedy
    p = nc.probabilities(logits, nc.SamplingParams(top_p=0, min_keep=3))
    assert set(np.flatnonzero(p[0])) == set(np.argsort(-logits[0])[:3])


def test_a_trace_says_greedy() -> None:
    found = nc.trace(np.arange(9.0, dtype=np.float32), nc.SamplingParams(top_p=0, seed=1))
    assert found.token_id == 8
    assert "greedy" in str(found)


def test_as_any_greedy_request_it_replaces_a_default_mirostat() -> None:
    defaults = nc.SamplingParams(mirostat_tau=5.0)
    assert "top_p" in GREEDY
    for values in ({"top_p": 0}, {"top_p": 0.0, "min_keep": 1}, {"top_h": 0}):
        assert defaults.override(**values).mirostat_tau == 0
        with pytest.raises(nc.ParameterError, match="mirostat_tau=5 needs random sampling"):
            nc.SamplingParams(mirostat_tau=5.0, **values)
    kept = defaults.override(top_p=0, min_keep=3)
    assert (kept.mirostat_tau, kept.top_p) == (5.0, 0.0)
    assert nc.SamplingParams(top_p=0, min_keep=3).override(mirostat_tau=5).top_p == 1.0
    assert pickle.loads(pickle.dumps(kept)) == kept


@pytest.mark.parametrize("value", [-1e-9, -1, 1.0000001, float("nan"), True, "0", None])
@pytest.mark.parametrize("field", ["top_p", "typical_p"])
def test_the_range(field: str, value: Any) -> None:
    with pytest.raises(nc.ParameterError, match=f"{field} must be a number >= 0 and <= 1, got"):
        nc.SamplingParams(**{field: value})
