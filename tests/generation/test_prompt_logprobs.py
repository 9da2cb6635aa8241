"""Logprobs of the prompt tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toy_models import Toy

import nucleate as nc
from nucleate.generation.loop import generate, read_prompt
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama

TEXT = "Once upon a time, there was a little dog"


def test_they_equal_those_of_the_model_logits(llm: nc.LLM) -> None:
    params = nc.SamplingParams(prompt_logprobs=3, max_tokens=1, logprob_token_ids=[7])
    [completion] = llm.generate(TEXT, params)
    ids = completion.prompt_token_ids
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(ids)
    assert completion.prompt_logprobs[0] is None
    for position, logprobs in enumerate(completion.prompt_logprobs[1:], 1):
        x = llm.model.begin().forward(ids[:position]).astype(np.float64)
        log_p = x - x.max() - math.log(np.exp(x - x.max()).sum())
        order = np.argsort(-x, kind="stable")
        assert logprobs is not None
        assert logprobs.chosen.token_id == ids[position]
        assert logprobs.chosen.logprob == pytest.approx(log_p[ids[position]], abs=1e-4)
        assert [one.token_id for one in logprobs.top] == order[:3].tolist()
        assert [one.rank for one in logprobs.top] == [1, 2, 3]
        assert logprobs.chosen.rank == 1 + order.tolist().index(ids[position])
        assert logprobs.requested[0].logprob == pytest.approx(log_p[7], abs=1e-4)


def test_they_do_not_change_the_output(llm: nc.LLM) -> None:
    plain = nc.SamplingParams(seed=3, max_tokens=20, temperature=1.3)
    with_logprobs = plain.replace(prompt_logprobs=0)
    assert llm.generate(TEXT, plain)[0].outputs == llm.generate(TEXT, with_logprobs)[0].outputs
    assert llm.generate(TEXT, plain)[0].prompt_logprobs is None


def test_they_are_in_the_first_chunk_of_the_first_output(llm: nc.LLM) -> None:
    chunks = list(llm.stream(TEXT, nc.SamplingParams(prompt_logprobs=1, n=2, max_tokens=3, seed=1, ignore_eos=True)))
    assert [chunk.prompt_logprobs is not None for chunk in chunks] == [True] + [False] * 5


def test_a_prompt_of_one_token_has_none(llm: nc.LLM) -> None:
    [completion] = llm.generate([[5]], nc.SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert completion.prompt_logprobs == (None,)


@pytest.mark.parametrize("most", [1, 4096, 3 * 4096, 1 << 26])
def test_chunked_prefill_gives_the_same(llm: nc.LLM, most: int) -> None:
    ids = tuple(llm.encode(TEXT))
    params = nc.SamplingParams(prompt_logprobs=2)
    logits, logprobs = read_prompt(llm.model.begin(), ids, params, most)
    assert logits == pytest.approx(llm.model.begin().forward(ids), abs=1e-4)
    expected = llm.generate([list(ids)], params.replace(max_tokens=1))[0].prompt_logprobs
    assert expected is not None
    found = [[one.chosen.logprob for one in each if one is not None] for each in (logprobs, expected)]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert len(found[0]) == len(ids) - 1


def test_invalid_logits_within_the_prompt_have_no_logprobs(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(4096, np.nan if len(seen) == 2 else 0.0, np.float32)

    chunks = list(
        generate(Toy(rule, 4096), llm.tokenizer, [1, 2, 3, 4], nc.SamplingParams(prompt_logprobs=0, max_tokens=1))
    )
    logprobs = chunks[0].prompt_logprobs
    assert logprobs is not None
    assert [one is None for one in logprobs] == [True, False, True, False]
    assert logprobs[1].chosen.logprob == pytest.approx(-math.log(4096))  # type: ignore[union-attr]


def test_an_output_that_fails_at_once_has_them(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(4096, np.nan if len(seen) == 3 else 0.0, np.float32)

    chunks = list(generate(Toy(rule, 4096), llm.tokenizer, [1, 2, 3], nc.SamplingParams(prompt_logprobs=0)))
    assert chunks[-1].finish_reason == "error"
    assert chunks[0].prompt_logprobs is not None


def test_forward_all_is_bit_equal_to_forward() -> None:
    ids = [5, 9, 300, 7, 4000]
    every = Llama(EMBEDDED).begin().forward_all(ids)
    assert every.shape == (5, 4096)
    assert np.array_equal(every[-1], Llama(EMBEDDED).begin().forward(ids))
    assert every[1] == pytest.approx(Llama(EMBEDDED).begin().forward(ids[:2]), abs=1e-4)
