"""Logprobs of the prompt tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toy_models import Toy

import nucleate as nc
from nucleate.generation.loop import generate, read_prompt
from nucleate.models.llama.numpy_llama import Llama
from nucleate.models.loader import EMBEDDED

TEXT = "Once upon a time, there was a little dog"


def test_they_are_those_of_the_models_own_logits(llm: nc.LLM) -> None:
    params = nc.SamplingParams(prompt_logprobs=3, max_tokens=1, logprob_token_ids=[7])
    [completion] = llm.generate(TEXT, params)
    ids = completion.prompt_token_ids
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(ids)
    assert completion.prompt_logprobs[0] is None
    for place, told in enumerate(completion.prompt_logprobs[1:], 1):
        x = llm.model.begin().forward(ids[:place]).astype(np.float64)
        log_p = x - x.max() - math.log(np.exp(x - x.max()).sum())
        order = np.argsort(-x, kind="stable")
        assert told is not None
        assert told.chosen.token_id == ids[place]
        assert told.chosen.logprob == pytest.approx(log_p[ids[place]], abs=1e-4)
        assert [one.token_id for one in told.top] == order[:3].tolist()
        assert [one.rank for one in told.top] == [1, 2, 3]
        assert told.chosen.rank == 1 + order.tolist().index(ids[place])
        assert told.requested[0].logprob == pytest.approx(log_p[7], abs=1e-4)


def test_asking_for_them_changes_no_answer(llm: nc.LLM) -> None:
    plain = nc.SamplingParams(seed=3, max_tokens=20, temperature=1.3)
    asked = plain.replace(prompt_logprobs=0)
    assert llm.generate(TEXT, plain)[0].outputs == llm.generate(TEXT, asked)[0].outputs
    assert llm.generate(TEXT, plain)[0].prompt_logprobs is None


def test_they_come_once_with_the_first_piece_of_the_first_answer(llm: nc.LLM) -> None:
    pieces = list(llm.stream(TEXT, nc.SamplingParams(prompt_logprobs=1, n=2, max_tokens=3, seed=1, ignore_eos=True)))
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * 5


def test_a_prompt_of_one_token_has_none(llm: nc.LLM) -> None:
    [completion] = llm.generate([[5]], nc.SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert completion.prompt_logprobs == (None,)


@pytest.mark.parametrize("most", [1, 4096, 3 * 4096, 1 << 26])
def test_reading_in_parts_gives_the_same(llm: nc.LLM, most: int) -> None:
    ids = tuple(llm.encode(TEXT))
    params = nc.SamplingParams(prompt_logprobs=2)
    logits, told = read_prompt(llm.model.begin(), ids, params, most)
    assert logits == pytest.approx(llm.model.begin().forward(ids), abs=1e-4)
    for place, one in enumerate(told[1:], 1):
        expected = llm.generate([list(ids)], nc.SamplingParams(prompt_logprobs=2, max_tokens=1))[0].prompt_logprobs
        assert expected is not None
        assert one is not None
        assert one.chosen.logprob == pytest.approx(expected[place].chosen.logprob, abs=1e-4)  # type: ignore[union-attr]


def test_invalid_logits_inside_the_prompt_are_no_numbers(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(4096, np.nan if len(seen) == 2 else 0.0, np.float32)

    pieces = list(
        generate(Toy(rule, 4096), llm.tokenizer, [1, 2, 3, 4], nc.SamplingParams(prompt_logprobs=0, max_tokens=1))
    )
    told = pieces[0].prompt_logprobs
    assert told is not None
    assert [one is None for one in told] == [True, False, True, False]
    assert told[1].chosen.logprob == pytest.approx(-math.log(4096))  # type: ignore[union-attr]


def test_an_answer_that_fails_at_once_still_has_them(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(4096, np.nan if len(seen) == 3 else 0.0, np.float32)

    pieces = list(generate(Toy(rule, 4096), llm.tokenizer, [1, 2, 3], nc.SamplingParams(prompt_logprobs=0)))
    assert pieces[-1].finish_reason == "error"
    assert pieces[0].prompt_logprobs is not None


def test_all_logits_are_bit_equal_to_those_of_the_last_token() -> None:
    ids = [5, 9, 300, 7, 4000]
    every = Llama(EMBEDDED).begin().forward_all(ids)
    assert every.shape == (5, 4096)
    assert np.array_equal(every[-1], Llama(EMBEDDED).begin().forward(ids))
    assert every[1] == pytest.approx(Llama(EMBEDDED).begin().forward(ids[:2]), abs=1e-4)


def test_torch_gives_all_logits_too() -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    ids = [5, 9, 300, 7, 4000]
    context = nc.LLM(runtime="torch").model.begin()
    first, rest = context.forward_all(ids[:2]), context.forward_all(ids[2:])
    assert np.concatenate((first, rest)) == pytest.approx(Llama(EMBEDDED).begin().forward_all(ids), abs=1e-3)
