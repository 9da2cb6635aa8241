"""nucleate inside mlx-lm: the tokens of LLM, seed for seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (the extra 'mlx-lm')")

import mlx.core as mx  # noqa: E402

from nucleate.integrations.mlx_lm import SamplingLogitsProcessor, TokenSampler  # noqa: E402

COUNT = 20
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0},
    {"logit_bias": {300: 5.0}, "min_p": 0.05, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"repetition_penalty": 1.3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"mirostat_tau": 3.0, "bad_words": [" was"]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    model, tokenizer = mlx_lm.load(str(EMBEDDED))
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def sampler() -> nc.Sampler:
    return nc.load_sampler()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_the_tokens_are_those_of_llm(model: Any, sampler: nc.Sampler, fields: dict[str, Any]) -> None:
    llm = nc.LLM()
    prompt = llm.tokenizer.encode("Once upon a time")
    params = nc.SamplingParams(**fields, seed=5)
    wanted = list(llm.generate([prompt], params.replace(max_tokens=COUNT, ignore_eos=True))[0].token_ids)
    forms = [{"logits_processors": [SamplingLogitsProcessor(sampler, params)]}]
    if not {"repetition_penalty", "bad_words"} & {*fields}:
        forms.append({"sampler": TokenSampler(sampler, params)})
    for form in forms:
        steps = mlx_lm.generate.__globals__["generate_step"](mx.array(prompt), model[0], max_tokens=COUNT, **form)
        assert [token for token, _ in steps] == wanted


def test_text_ends_where_mlx_lm_ends_it(model: Any, sampler: nc.Sampler) -> None:
    processor = SamplingLogitsProcessor(sampler, nc.SamplingParams(temperature=0))
    text = mlx_lm.generate(*model, "Once upon a time", max_tokens=12, logits_processors=[processor])
    assert text == nc.LLM().generate("Once upon a time", temperature=0, max_tokens=12)[0].text


def test_what_does_not_fit_is_refused(sampler: nc.Sampler) -> None:
    before = len(sampler)
    for fields, name in (
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"frequency_penalty": 1.2}, "frequency_penalty"),
        ({"dry_multiplier": 1.2}, "dry_multiplier"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"bad_words": [" was"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
    ):
        with pytest.raises(nc.ParameterError, match=f"{name} needs the tokens so far, .* use SamplingLogitsProcessor"):
            TokenSampler(sampler, nc.SamplingParams(**fields))
    for form in (TokenSampler, SamplingLogitsProcessor):
        with pytest.raises(nc.ParameterError, match="max_tokens is for LLM"):
            form(sampler, nc.SamplingParams(max_tokens=3))
    assert len(sampler) == before
    processor = SamplingLogitsProcessor(sampler, nc.SamplingParams(temperature=0))
    logits = np.zeros((1, sampler.vocab_size), np.float32)
    logits[0, 9] = 2
    out = np.array(processor(mx.array([1, 2]), mx.array(logits).astype(mx.bfloat16)))
    assert np.flatnonzero(out > -np.inf).tolist() == [9]
    with pytest.raises(nc.ParameterError, match="make a new SamplingLogitsProcessor for each call"):
        processor(mx.array([1, 2, 8]), mx.array(logits))
    logits[0, 4] = np.nan
    with pytest.raises(nc.LogitsError, match="NaN at token 4"):
        processor(mx.array([1, 2, 9]), mx.array(logits))
