"""Rows of logits combined with those of companions: ``sample``, ``probabilities``, ``trace`` and ``Sampler``."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.companion import combine, combined_rows
from nucleate.sampling.stage import Combine
from nucleate.sampling.stages import Contrastive, Guidance, Gumbel, Logprobs, Temperature, TopK

X, Y = np.random.default_rng(0).normal(0, 3, (2, 4, 60)).astype(np.float32)
STAGES = (Guidance(2.0), Guidance(-0.5), Guidance(0.0), Contrastive(1.0), Contrastive(0.5, 0.01, 0.5))


def log_softmax(row):
    row = [float(value) for value in row]
    top = max(row)
    total = math.fsum(math.exp(value - top) for value in row)
    return [value - top - math.log(total) for value in row]


def naive(stage, x_V, y_V):
    """The definitions in docs/semantics.md, token by token in float64."""
    own, other = log_softmax(x_V), log_softmax(y_V)
    if isinstance(stage, Guidance):
        return [b + stage.scale * (a - b) for a, b in zip(own, other, strict=True)]
    weaker, best = log_softmax([b / stage.tau for b in other]), max(own)
    return [
        a - stage.beta * b if math.exp(a) >= stage.alpha * math.exp(best) * (1 - 1e-5) else -math.inf
        for a, b in zip(own, weaker, strict=True)
    ]


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_a_combined_row_follows_its_definition(stage: Combine) -> None:
    for x_V, y_V in zip(X, Y, strict=True):
        np.testing.assert_allclose(combine(stage, x_V, y_V), naive(stage, x_V, y_V), rtol=1e-4, atol=1e-4)
        assert combine(stage, x_V, y_V).dtype == np.float32


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_numpy_and_torch_give_the_same_rows(stage: Combine) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    for x_V, y_V in zip(X, Y, strict=True):
        got = combine(stage, torch.from_numpy(x_V), torch.from_numpy(y_V))
        np.testing.assert_allclose(got.numpy(), combine(stage, x_V, y_V), rtol=1e-4, atol=1e-4)
    tokens = nc.sample(torch.from_numpy(X), (stage, Gumbel(3)), companion=torch.from_numpy(Y))
    assert tokens.tolist() == nc.sample(X, (stage, Gumbel(3)), companion=Y).tolist()


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_masked_tokens_stay_masked_and_invalid_rows_invalid(stage: Combine) -> None:
    x_V, y_V = X[0].copy(), Y[0].copy()
    x_V[3], y_V[7] = -np.inf, -np.inf
    row = combine(stage, x_V, y_V)
    assert (row[[3, 7]] == -np.inf).all()
    assert np.isfinite(row).any()
    for bad in (np.nan, np.inf):
        for own, other in ((x_V, np.append(y_V[:-1], bad)), (np.append(x_V[:-1], bad), y_V)):
            with pytest.raises(nc.LogitsError, match="NaN"):
                nc.sample(own[None], (stage, Gumbel(1)), companion=np.asarray(other, np.float32)[None])
    with pytest.raises(nc.LogitsError):
        nc.sample(x_V[None], (stage, Gumbel(1)), companion=np.full((1, 60), -np.inf, np.float32))


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    for stage in STAGES:
        moved = combine(stage, X[0] + np.float32(17), Y[0] - np.float32(5))
        np.testing.assert_allclose(moved, combine(stage, X[0], Y[0]), atol=1e-4)


def test_every_function_samples_from_combined_rows() -> None:
    params = nc.SamplingParams(guidance_scale=2.0, negative_prompt=[1], temperature=0.8, top_k=9, seed=5, logprobs=2)
    rows = combined_rows([Guidance(2.0)] * 4, X, Y)
    plain = params.replace(guidance_scale=1.0)
    tokens = nc.sample(rows, plain).tolist()
    assert nc.sample(X, params, companion=Y).tolist() == tokens
    assert np.array_equal(nc.probabilities(X, params, companion=Y), nc.probabilities(rows, plain))
    found = nc.trace(X[0], params, companion=Y[0])
    assert found.token_id == tokens[0]
    assert found.steps[0].why == "combined by Guidance(scale=2.0, negative_prompt=(1,))"
    sampler, other = nc.Sampler(60), nc.Sampler(60)
    numbers = [sampler.add(params) for _ in range(4)]
    others = [other.add(plain) for _ in range(4)]
    for step in range(3):
        x, y = np.roll(X, step, 1), np.roll(Y, step, 1)
        one, two = sampler(x, companion=y), other(combined_rows([Guidance(2.0)] * 4, x, y))
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.logprobs == two.logprobs
    targets = sampler.distributions(numbers[0], X[:2], [5], companion=Y[:2])
    expected = other.distributions(others[0], rows[:2], [5])
    assert all(np.array_equal(targets[at], expected[at]) for at in range(2))
    assert "before the backend" in str(nc.explain(params))


def test_rows_with_and_without_companions_share_a_batch() -> None:
    pipelines = [(Guidance(2.0), Gumbel(1)), (Gumbel(1),), (Contrastive(1.0), TopK(3), Gumbel(1)), (Guidance(1.0),)]
    others = Y.copy()
    others[[1, 3]] = np.nan  # not read
    pipelines[3] = (*pipelines[3], Gumbel(1))
    tokens = nc.sample(X, [*pipelines], companion=others).tolist()
    for row, pipeline in enumerate(pipelines):
        one = nc.sample(X[row : row + 1], pipeline, companion=Y[row : row + 1])
        assert one.tolist() == tokens[row : row + 1]
    assert nc.sample(X[1:2], pipelines[1]).tolist() == tokens[1:2]
    sampler = nc.Sampler(60)
    numbers = [sampler.add(pipeline) for pipeline in pipelines]
    assert sampler(X, companion=others).token_ids.tolist() == tokens
    sampler.remove(numbers[0])
    sampler.remove(numbers[2])
    sampler(X[[1, 3]])  # needs none


def test_errors_name_the_field() -> None:
    params = nc.SamplingParams(guidance_scale=2.0)
    sampler = nc.Sampler(60)
    sampler.add(params)
    for call in (
        lambda: nc.sample(X, params),
        lambda: nc.probabilities(X, params),
        lambda: nc.trace(X[0], params),
        lambda: sampler(X[:1]),
    ):
        with pytest.raises(ParameterError, match="guidance_scale needs the logits of a companion") as caught:
            call()
        assert caught.value.field == "companion"
    with pytest.raises(ValueError, match=r"companion must have the shape \[4, 60\], like the logits, got \[4, 59\]"):
        nc.sample(X, params, companion=Y[:, 1:])
    with pytest.raises(ParameterError, match="contrastive_beta cannot be set with guidance_scale"):
        nc.SamplingParams(guidance_scale=2.0, contrastive_beta=1.0)
    with pytest.raises(ValueError, match=r"at most one Combine, its first stage, got \([^,]*, [^,]*\)$"):
        nc.sample(X, (Temperature(0.5), Guidance(2.0)), companion=Y)
    with pytest.raises(ParameterError, match=r"pipeline\[1\] guidance combines the logits of two sequences"):
        nc.SamplingParams(pipeline=(Guidance(2.0), Guidance(2.0)))


def test_a_combine_is_first_in_every_order() -> None:
    for order in ("canonical", "vllm", "llama.cpp", ("top_k", "temperature")):
        for mode in ("raw", "processed"):
            params = nc.SamplingParams(
                guidance_scale=2.0, order=order, logprobs=1, logprobs_mode=mode, top_k=3, min_tokens=0
            )
            first, second, *_ = params.build_pipeline()
            assert first == Guidance(2.0)
            assert (second == Logprobs(1)) == (mode == "raw")
    pipeline = nc.SamplingParams(pipeline=(Guidance(2.0), TopK(3)), min_tokens=2).build_pipeline((5,))
    assert [stage.name for stage in pipeline] == ["guidance", "min_tokens", "top_k", "gumbel"]


def test_a_text_needs_a_tokenizer(llm: nc.LLM) -> None:
    stage = Guidance(2.0, "A sad story")
    with pytest.raises(ParameterError, match="negative_prompt needs a tokenizer for the text 'A sad story'"):
        stage.companion_prompt([1, 2])
    encoded = stage.encode_text(llm.tokenizer)
    assert list(encoded.companion_prompt([1, 2])) == llm.encode("A sad story")
    assert list(Guidance(2.0).companion_prompt([1, 2])) == [2]
