"""Arguments and results of a Sampler: engine-only fields, EOS ids, tokens sampled elsewhere, tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.stages import Greedy, Gumbel, Logprobs, MinTokens, Mirostat, Suppress, TopK, Xtc
from nucleate.sampling_params import ENGINE_ONLY, FIELDS

V = 300
TORCH = importlib.util.find_spec("torch") is not None
BACKENDS = ["auto", "reference", "cpu", *(["torch"] if TORCH else [])]
ENGINE_VALUES: dict[str, Any] = {
    "max_tokens": 5,
    "stop": ("x",),
    "stop_regex": ("x",),
    "stop_json": True,
    "stop_token_ids": (3,),
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a+"},
    "n": 2,
    "prompt_logprobs": 1,
    "max_reasoning_tokens": 3,
}


def logits(rows: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32)


# ---- fields that only an engine can honour


@pytest.mark.parametrize("name", ENGINE_ONLY)
def test_an_engine_only_field_is_rejected_by_name(name: str) -> None:
    params = nc.SamplingParams(seed=1, **{name: ENGINE_VALUES[name]})
    sampler = nc.Sampler(V)
    with pytest.raises(ParameterError, match=f"^{name} is for LLM and Engine, but a Sampler only samples") as caught:
        sampler.add(params)
    assert caught.value.field == name
    assert ENGINE_ONLY[name] in str(caught.value)
    assert sampler.rows == ()
    sampler.add(params.build_pipeline())  # the pipeline alone is supported


def test_every_field_is_used_rejected_or_without_effect() -> None:
    from nucleate.sampling_params import REQUEST_PARAMETERS

    assert ENGINE_ONLY.keys() <= REQUEST_PARAMETERS.keys() <= FIELDS.keys()
    assert REQUEST_PARAMETERS.keys() - ENGINE_ONLY.keys() == {"ignore_eos", "logprobs_mode", "pipeline"}
    nc.Sampler(V).add(nc.SamplingParams(ignore_eos=True, logprobs=1, logprobs_mode="processed"))


def test_min_tokens_bans_the_eos_ids() -> None:
    x = np.zeros((1, V), np.float32)
    x[0, [7, 9]] = 50.0, 40.0
    with pytest.raises(ParameterError, match="min_tokens needs the ids that end the output") as caught:
        nc.Sampler(V).add(nc.SamplingParams(min_tokens=2))
    assert caught.value.field == "min_tokens"
    for params, ends in (
        (nc.SamplingParams(min_tokens=2, temperature=0), [7]),
        (nc.SamplingParams(min_tokens=2, temperature=0, stop_token_ids=(7,)), []),
        (nc.SamplingParams(min_tokens=2, temperature=0, stop_token_ids=(11,)), np.array([7])),
    ):
        sampler = nc.Sampler(V)
        row = sampler.add(params, eos_token_ids=ends)
        assert [sampler(x).token_ids.tolist()[0] for _ in range(4)] == [9, 9, 7, 7]
        assert isinstance(sampler.stages(row)[0], MinTokens)
    sampler = nc.Sampler(V)
    sampler.add(nc.SamplingParams(min_tokens=2, temperature=0, ignore_eos=True), eos_token_ids=[7])
    assert sampler(x).token_ids.tolist() == [7]


def test_eos_ids_are_checked() -> None:
    with pytest.raises(ValueError, match=r"eos_token_ids holds token ids outside the vocabulary \(0..299\)"):
        nc.Sampler(V).add(nc.SamplingParams(), eos_token_ids=[V])
    with pytest.raises(TypeError, match="eos_token_ids must be a list of token ids"):
        nc.Sampler(V).add(nc.SamplingParams(), eos_token_ids=7)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"in a pipeline, use MinTokens\(n, ids\)"):
        nc.Sampler(V).add((Gumbel(1),), eos_token_ids=[7])


# ---- tokens that were sampled elsewhere


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [3.5, True, "3", None, -1, V, 2**70, np.float32(3), [3]])
def test_a_token_is_an_id_of_the_vocabulary(backend: str, wrong: Any) -> None:
    sampler = nc.Sampler(V, backend)
    row = sampler.add((Gumbel(1),))
    for call in (sampler.accept, lambda row, token: sampler.accept(row, token, logits()[0])):
        with pytest.raises(ParameterError, match=r"token must be an integer in 0..299, got"):
            call(row, wrong)
    sampler.accept(row, np.int32(3))  # type: ignore[arg-type]
    assert sampler.output_ids(row) == (3,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stages",
    [
        (TopK(5), Gumbel(1)),
        (Greedy(),),
        (TopK(5), Mirostat(3.0), Gumbel(1)),
        (Logprobs(2), TopK(5), Gumbel(1)),
        (Suppress((0, 1, 2)), Xtc(1.0, 0.01), Gumbel(1)),
    ],
    ids=repr,
)
def test_a_token_with_probability_0_is_not_accepted(backend: str, stages: Pipeline) -> None:
    sampler, x = nc.Sampler(V, backend), logits()
    row = sampler.add(stages, [1, 2])
    p_V = nc.probabilities(x, stages, prompt_ids=[[1, 2]])[0]
    before = sampler.stages(row)
    for token in np.flatnonzero(p_V == 0)[:3].tolist():
        with pytest.raises(ValueError, match=f"token {token} cannot be sampled from row {row}: its probability is 0"):
            sampler.accept(row, token, x[0])
        with pytest.raises(ValueError, match=f"token {token} cannot be sampled"):
            sampler.accept(row, token, x[0], distribution=p_V)
    assert (sampler.output_ids(row), sampler.stages(row)) == ((), before)
    good = int(p_V.argmax())
    report = sampler.accept(row, good, x[0])
    assert (report is not None) == isinstance(stages[0], Logprobs)
    assert sampler.output_ids(row) == (good,)
    sampler.accept(row, good, x[0], distribution=p_V)
    assert sampler.output_ids(row) == (good, good)


def test_a_masked_token_is_not_accepted() -> None:
    sampler, x, mask_W = nc.Sampler(V), logits(), np.zeros(-(-V // 32), np.int32)
    row = sampler.add((Gumbel(1),))
    mask_W[0] = 0b110
    with pytest.raises(ValueError, match="token 0 cannot be sampled"):
        sampler.accept(row, 0, x[0], mask_W)
    sampler.accept(row, 1, x[0], mask_W)


def test_a_token_of_either_xtc_outcome_is_accepted() -> None:
    x = np.full((1, V), -9.0, np.float32)
    x[0, [3, 4]] = 1.0, 0.9
    for token in (3, 4):  # with XTC active only the second survives
        sampler = nc.Sampler(V)
        row = sampler.add((Logprobs(1), Xtc(0.3, 0.1), Gumbel(1)))
        report = sampler.accept(row, token, x[0])
        assert report is not None
        assert report.chosen.token_id == token


def test_invalid_logits_and_logits_of_another_size_are_rejected() -> None:
    sampler = nc.Sampler(V)
    row = sampler.add((Gumbel(1),))
    with pytest.raises(ValueError, match="NaN at token 0"):
        sampler.accept(row, 0, np.full(V, np.nan, np.float32))
    with pytest.raises(ValueError, match=r"logits must have the shape \[300\], got \[10\]"):
        sampler.accept(row, 0, np.zeros(10, np.float32))
    sampler.accept(row, 5, [0.0] * V)
    assert sampler.output_ids(row) == (5,)


# ---- tensors in, tensors out


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_tensors_give_tensors(backend: str, kind: str) -> None:
    import torch

    x, params = logits(3), [nc.SamplingParams(seed=1, top_k=9), nc.SamplingParams(seed=2, typical_p=0.9), (Greedy(),)]
    tensor = torch.from_numpy(x).to(getattr(torch, kind))
    same = tensor.float().numpy()
    tokens = nc.sample(tensor, params, backend=backend)
    assert (type(tokens), tokens.dtype, tokens.device) == (torch.Tensor, torch.int64, tensor.device)
    assert tokens.tolist() == nc.sample(same, params, backend=backend).tolist()
    p = nc.probabilities(tensor, params, backend=backend)
    assert (type(p), p.dtype) == (torch.Tensor, torch.float64)
    assert (p.numpy() == nc.probabilities(same, params, backend=backend)).all()
    one, other = nc.Sampler(V, backend), nc.Sampler(V, backend)
    for each in params:
        one.add(each)
        other.add(each)
    for _ in range(3):
        given, expected = one(tensor).token_ids, other(same).token_ids
        assert (type(given), given.dtype) == (torch.Tensor, torch.int64)
        assert type(expected) is np.ndarray
        assert given.tolist() == expected.tolist()
    x[1, 3] = np.nan
    with pytest.raises(nc.LogitsError) as caught:
        nc.sample(torch.from_numpy(x), params, backend=backend)
    assert isinstance(caught.value.token_ids, torch.Tensor)
    assert caught.value.token_ids[1] == -1
    assert nc.sample(torch.zeros(0, 7), params[0], backend=backend).shape == (0,)


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
def test_rows_of_the_fused_kernel_give_tensors_at_once() -> None:
    import torch

    sampler = nc.Sampler(V, "cpu")
    for seed in range(4):
        sampler.add(nc.SamplingParams(top_p=0.9, seed=seed))
    for step in range(3):
        x = logits(4, step)
        tokens = sampler(torch.from_numpy(x)).token_ids
        assert isinstance(tokens, torch.Tensor)
        expected = [nc.sample(x[i : i + 1], nc.SamplingParams(top_p=0.9, seed=i), step=step)[0] for i in range(4)]
        assert tokens.tolist() == expected


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_logits_without_rows_are_explained(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    sampler = nc.Sampler(4, backend)
    with pytest.raises(
        ValueError, match=r"^there are no rows to sample, but the logits have the shape \[2, 4\]: "
    ) as caught:
        sampler(np.zeros((2, 4), np.float32))
    assert "Sampler(4) sets the vocabulary size, and sampler.add(params) adds a row" in str(caught.value)
    sampler.add(nc.SamplingParams())
    with pytest.raises(ValueError, match=r"the shape \[1, 4\], one row per row of the sampler, got \[2, 4\]$"):
        sampler(np.zeros((2, 4), np.float32))
