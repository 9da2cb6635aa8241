"""Basic properties of a sampler, checked on a real model: the bundled one."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

import nucleate as nc
from nucleate.sampling_params import FIELDS

PROMPT = "Once upon a time"
STEPS = 20


class Cached:
    """The model's logits after any tokens, cached."""

    def __init__(self, llm: nc.LLM) -> None:
        self.prompt = tuple(llm.encode(PROMPT))
        self.size = llm.model.vocab_size

        @cache
        def context(output: tuple[int, ...]) -> NDArray[np.float32]:
            return llm.model.begin().forward((*self.prompt, *output))

        self.logits = context


@pytest.fixture(scope="module")
def llm() -> nc.LLM:
    """The embedded model without its recommended parameters."""
    return nc.LLM(generation_config="none")


@pytest.fixture(scope="module")
def model(llm: nc.LLM) -> Cached:
    return Cached(llm)


def sample_tokens(model: Cached, params: nc.SamplingParams | tuple, steps: int = STEPS) -> list[int]:
    """Tokens sampled one after the other by a Sampler."""
    sampler = nc.Sampler(model.size)
    row = sampler.add(params, model.prompt)
    for _ in range(steps):
        sampler(model.logits(sampler.output_ids(row))[None])
    return list(sampler.output_ids(row))


# ---- greedy


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"draw": "greedy"}], ids=str)
def test_greedy_is_the_argmax_of_the_models_logits(llm: nc.LLM, greedy: dict[str, object]) -> None:
    context, tokens = llm.model.begin(), []
    logits_V = context.forward(llm.encode(PROMPT))
    for _ in range(STEPS):
        tokens.append(int(np.argmax(logits_V)))
        logits_V = context.forward((tokens[-1],))
    params = nc.SamplingParams(max_tokens=STEPS, ignore_eos=True, **greedy)
    [output] = llm.generate(PROMPT, params)[0].outputs
    assert list(output.token_ids) == tokens


# ---- disabled fields


TYPICAL_PARAMS = nc.SamplingParams(seed=11, temperature=0.8, top_p=0.95, top_k=5, repetition_penalty=1.1)


def disabling_values(name: str) -> list[object]:
    """Every value that disables a field."""
    field = FIELDS[name]
    neutral = [] if field.neutral is dataclasses.MISSING else [field.neutral]
    return [field.default, *field.off, *(value for value in neutral if value != field.default)]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "seed"])
def test_a_disabled_field_changes_no_token_and_no_bit(model: Cached, name: str) -> None:
    plain = TYPICAL_PARAMS.replace(**{name: FIELDS[name].default})
    if getattr(TYPICAL_PARAMS, name) != FIELDS[name].default:
        assert sample_tokens(model, plain) != sample_tokens(model, TYPICAL_PARAMS)  # it has an effect
    tokens = sample_tokens(model, plain)
    logits_V, past = model.logits(tuple(tokens[:5])), {"prompt_ids": [model.prompt], "output_ids": [tokens[:5]]}
    expected = nc.probabilities(logits_V[None], plain, **past)
    for value in disabling_values(name):
        params = plain.replace(**{name: value})
        assert sample_tokens(model, params) == tokens
        assert (nc.probabilities(logits_V[None], params, **past) == expected).all()


# ---- coherence


def known_words(llm: nc.LLM) -> set[str]:
    """The words that occurred often enough in the tokenizer's training data to become one token."""
    texts = (llm.tokenizer.decode([token]) for token in range(llm.tokenizer.vocab_size))
    return {text.strip().lower() for text in texts if text.startswith(" ")} | {"s", "t", "m", "re", "ve", "ll", "d"}


def measures(llm: nc.LLM, params: nc.SamplingParams) -> tuple[float, float, float]:
    """Over 64 tokens for each of four seeds: the mean raw logprob, the worst mean, the share of known words."""
    known, words, logprobs = known_words(llm), [], []
    for seed in range(4):
        seeded = params.replace(seed=seed, max_tokens=64, ignore_eos=True, logprobs=0, logprobs_mode="raw")
        [output] = llm.generate(PROMPT, seeded)[0].outputs
        assert output.cumulative_logprob is not None
        logprobs.append(output.cumulative_logprob / len(output.token_ids))
        words += re.findall(r"[^\W\d_]+|\ufffd", output.text.lower())
    return float(np.mean(logprobs)), min(logprobs), sum(word in known for word in words) / len(words)


def coherent(mean: float, worst: float, known: float) -> bool:
    return mean > -1.2 and worst > -1.6 and known >= 0.95


@pytest.mark.slow
def test_text_is_coherent_at_the_usual_setting_and_not_at_a_high_temperature(llm: nc.LLM) -> None:
    """The model's own text has about -0.7 nats per token, any other order of the same tokens about -9."""
    assert coherent(*measures(llm, nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50)))
    mean, worst, known = measures(llm, nc.SamplingParams(temperature=5.0))
    assert not coherent(mean, worst, known)
    assert mean < -8
    assert known < 0.9


def test_shuffled_tokens_are_not_coherent(llm: nc.LLM) -> None:
    params = nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=1, max_tokens=64, ignore_eos=True)
    ids = list(llm.generate(PROMPT, params)[0].outputs[0].token_ids)
    np.random.default_rng(0).shuffle(ids)
    reported = llm.generate([[*llm.encode(PROMPT), *ids]], nc.SamplingParams(max_tokens=1, prompt_logprobs=0))[
        0
    ].prompt_logprobs
    assert reported is not None
    assert np.mean([step.chosen.logprob for step in reported[-64:] if step is not None]) < -5
