"""Rows sampled with NumPy, before the kernels are loaded, get the tokens of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu.fused_runner import NOT_DRAWN, draw_with_numpy
from nucleate.sampling.history import History
from nucleate.sampling.pipeline import FusedPipeline, prepared

CASES = tiers.count(300, 3000)


def random_params(rng: Any) -> nc.SamplingParams:
    values = {
        "temperature": float(rng.choice([0, 0.3, 0.8, 1.0, 1.7, 20.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, 40, 300, 100_000])),
        "top_p": float(rng.choice([1.0, 1.0, 0.95, 0.7, 0.1, 0.0])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
        "top_n_sigma": float(rng.choice([0.0, 0.0, 0.5, 1.5])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3, 0.7])),
        "frequency_penalty": float(rng.choice([0.0, 0.5, -1.0])),
        "presence_penalty": float(rng.choice([0.0, 0.5, -1.0])),
        "logit_bias": {3: 2.5, 7: -100.0} if rng.random() < 0.3 else {},
        "bad_words": ((4,), (1, 5)) if rng.random() < 0.3 else (),
        "allowed_token_ids": tuple(range(2, 11)) if rng.random() < 0.2 else None,
        "order": str(rng.choice(["canonical", "vllm", "llama.cpp"])),
    }
    if values["order"] == "vllm":
        del values["top_n_sigma"]
    if values["order"] == "llama.cpp":
        values["penalty_last_n"] = 3
    return nc.SamplingParams(**values)


def random_row(rng: Any) -> Any:
    size = int(rng.choice([11, 12, 256, 257, 1000, 4096]))
    x = rng.normal(0, rng.choice([0.01, 1.0, 5.0, 60.0]), size)
    if (kind := rng.integers(6)) == 0:
        x = np.round(x)  # ties
    elif kind == 1:
        x[rng.random(size) < 0.7] = -np.inf
        x[5] = 1.0
    elif kind == 2:
        x *= 1e4
    elif kind == 3:
        x[rng.integers(size)] = rng.choice([np.nan, np.inf, -np.inf, 3.4e38])
    elif kind == 4:
        x[:] = x[0]
    return x.astype(np.float32)


def test_tokens_are_those_of_the_reference() -> None:
    rng, left = np.random.default_rng(5), 0
    for case in range(CASES):
        one = prepared(random_params(rng))
        if not isinstance(one.fused, FusedPipeline):
            continue
        x = random_row(rng)
        mask = None
        if case % 5 == 0:
            mask = rng.integers(-(2**31), 2**31, -(-len(x) // 32)).astype(np.int32)
        past = History(rng.integers(0, 11, 6), rng.integers(0, 11, int(rng.integers(8))), mask)
        stages = one.stages if mask is None else nc.sampling.presets.with_mask(one.stages)
        token = draw_with_numpy(x, one.fused, past, case, case // 3)
        try:
            expected = reference.run(x, stages, case, case // 3, past).token
        except ValueError:
            assert token == NOT_DRAWN, (case, stages)
            continue
        left += token == NOT_DRAWN
        assert token in (expected, NOT_DRAWN), (case, stages)
    assert left < 0.05 * CASES


@pytest.mark.parametrize("field", ["top_p", "min_p", "top_n_sigma"])
def test_decisions_at_a_threshold_are_left_to_the_reference(field: str) -> None:
    """Scores within rounding of the threshold, which another order of summation could put on the other side."""
    x = np.zeros(300, np.float32)
    if field == "top_p":
        params, past = nc.SamplingParams(top_p=min(1.0, 0.5 / (1 - 1e-6))), History()
    elif field == "min_p":
        x[1:] = np.float32(-1.0)
        params, past = nc.SamplingParams(min_p=float(np.exp(-1.0 + 1e-6))), History()
    else:
        x[1::2] = -1.0
        params, past = nc.SamplingParams(top_n_sigma=(1 - 1e-6) / 0.5), History()
    fused = prepared(params).fused
    assert isinstance(fused, FusedPipeline)
    assert draw_with_numpy(x, fused, past, 1, 2) == NOT_DRAWN


def test_a_sampler_uses_it_only_until_kernels_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from nucleate.jit.kernel_libraries import KERNELS
    from nucleate.sampling import host_batch

    calls = []
    draw = host_batch.draw_with_numpy
    monkeypatch.setattr(host_batch, "draw_with_numpy", lambda *given: calls.append(1) or draw(*given))
    monkeypatch.setattr(KERNELS, "_ready", False)
    monkeypatch.setattr(type(KERNELS), "ready", property(lambda self: False))
    rng = np.random.default_rng(0)
    params = [nc.SamplingParams(seed=seed, top_p=0.9, repetition_penalty=1.2, bad_words=((3, 4),)) for seed in range(3)]
    cold, twin = nc.Sampler(500), nc.Sampler(500, "reference")
    for one in params:
        cold.add(one, [1, 2]), twin.add(one, [1, 2])
    for _ in range(20):
        logits = rng.normal(0, 2, (3, 500)).astype(np.float32)
        assert cold.peek(logits).token_ids.tolist() == twin.peek(logits).token_ids.tolist()
        assert cold(logits).token_ids.tolist() == twin(logits).token_ids.tolist()
    assert len(calls) == 120
    monkeypatch.undo()
    nc.warm()
    logits = rng.normal(0, 2, (3, 500)).astype(np.float32)
    assert cold(logits).token_ids.tolist() == twin(logits).token_ids.tolist()


def test_draws_follow_the_distribution() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05] * 100, np.float32) / 100)
    fused = prepared(nc.SamplingParams()).fused
    assert isinstance(fused, FusedPipeline)
    tokens = [draw_with_numpy(x, fused, History(), seed, 0) % 4 for seed in range(4000)]
    counts, expected = np.bincount(tokens, minlength=4), 4000 * np.array([0.5, 0.3, 0.15, 0.05])
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-square with 3 degrees of freedom, p < 2e-6
