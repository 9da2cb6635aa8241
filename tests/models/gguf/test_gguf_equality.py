"""llama.cpp gives the tokens of the other runtimes: the embedded model in float32, and random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import EXACT, random_folder, write_gguf
from toy_requests import check_prefix_to_the_token, run_tokens

import nucleate as nc
from nucleate.engine.request import Request
from nucleate.generation.loop import generate
from nucleate.models.runner import BLOCK

PROMPTS = ("Once upon a time", "The little dog", "Tom and his friend went to the park. They saw a", "Mom said")
LOGITS = 3e-5
"""The largest difference of logits in float32; they are up to 30."""


def params(count: int, **values: Any) -> list[nc.SamplingParams]:
    values = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 100, "ignore_eos": True, **values}
    return [nc.SamplingParams(**values, seed=seed) for seed in range(count)]


def prompts(count: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


def tokens(llm: nc.LLM, given: list[str], params: list[nc.SamplingParams]) -> list[tuple[int, ...]]:
    return [one.outputs[0].token_ids for one in llm.generate(given, params)]


def engine_tokens(engine: Any, llm: nc.LLM, given: list[str], params: list[nc.SamplingParams]) -> list[tuple[int, ...]]:
    requests = [Request(llm.encode(prompt), one) for prompt, one in zip(given, params, strict=True)]
    return [tuple(ids) for ids in run_tokens(engine, requests)]


def test_logits_differ_by_rounding_only(llm: nc.LLM, exact: nc.LLM) -> None:
    ids = llm.encode(PROMPTS[2])
    expected = llm.model.begin().forward_all(ids)
    assert np.abs(exact.model.begin().forward_all(ids) - expected).max() < LOGITS
    context = exact.model.begin()
    rows = [context.forward([token]).copy() for token in ids]
    assert np.abs(np.stack(rows) - expected).max() < LOGITS


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("count", [1, 8, 24])
def test_answers_equal_those_of_the_numpy_runtime(llm: nc.LLM, exact: nc.LLM, count: int, temperature: float) -> None:
    given = params(count, temperature=temperature, max_tokens=100 if count < 8 else 40)
    assert tokens(exact, prompts(count), given) == tokens(llm, prompts(count), given)


@pytest.mark.slow
def test_preemption_and_shared_prefixes(llm: nc.LLM, exact: nc.LLM) -> None:
    story = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog."
    given = [f"{story} One day, {name}" for name in ("she", "Lily", "the dog", "her mom", "a boy", "Tom", "it", "he")]
    wanted = params(8, max_tokens=60)
    expected = tokens(llm, given, wanted)
    engine = exact.new_engine(kv_cache_memory=16 * BLOCK * exact.model.token_bytes, max_num_seqs=8)
    for _ in range(2):
        assert engine_tokens(engine, exact, given, wanted) == expected
    assert engine.stats.num_preemptions
    assert engine.stats.prefix_cache_hit_rate > 0.2


@pytest.mark.slow
def test_a_prefix_may_end_within_a_block(exact: nc.LLM) -> None:
    check_prefix_to_the_token(exact)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.05},
        {"mirostat_tau": 3.0},
        {"structured_outputs": {"regex": '\\{"name": "[a-z]{3,9}", "age": [0-9]{1,3}\\}'}, "ignore_eos": False},
        {"guidance_scale": 1.5, "negative_prompt": "The bad dog"},
        {"n": 3},
    ],
    ids=["penalties", "mirostat", "regex", "guidance", "n"],
)
def test_features(llm: nc.LLM, exact: nc.LLM, fields: dict[str, Any]) -> None:
    given = params(4, max_tokens=40, **fields)
    found = [
        [[output.token_ids for output in one.outputs] for one in each.generate(prompts(4), given)]
        for each in (llm, exact)
    ]
    assert found[0] == found[1]


def test_beam_search(llm: nc.LLM, exact: nc.LLM) -> None:
    found = [
        [beam.token_ids for beam in each.beam_search(PROMPTS[0], num_beams=4, max_tokens=30)[0].outputs]
        for each in (llm, exact)
    ]
    assert found[0] == found[1]


def test_logprobs_of_the_prompt_and_the_output(llm: nc.LLM, exact: nc.LLM) -> None:
    one = nc.SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=3)
    [expected], [found] = llm.generate(PROMPTS[2], one), exact.generate(PROMPTS[2], one)
    for ours, theirs in (
        (found.prompt_logprobs[1:], expected.prompt_logprobs[1:]),
        (found.outputs[0].logprobs, expected.outputs[0].logprobs),
    ):
        values = [[step.chosen.logprob for step in side] for side in (ours, theirs)]
        assert np.abs(np.subtract(*values)).max() < LOGITS
        assert [step.chosen.token_id for step in ours] == [step.chosen.token_id for step in theirs]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
def test_speculation_gives_the_same_tokens(exact: nc.LLM, files: dict[str, Path], method: str) -> None:
    model = {"model": files["q8_0"]} if method == "draft" else {}
    given = ["The dog ran to the big tree. The dog ran to the big tree. The dog ran to"] * 3
    wanted = params(3, temperature=0.3, max_tokens=60)
    expected = tokens(exact, given, wanted)
    llm = nc.LLM(files["f32"], gguf_options=EXACT, speculative_config={"method": method, "adaptive": False, **model})
    engine = llm.new_engine()
    assert engine_tokens(engine, llm, given, wanted) == expected
    assert engine.stats.speculative.accepted_tokens > 20


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_other_types_are_close(llm: nc.LLM, files: dict[str, Path], kind: str) -> None:
    """The most likely tokens are mostly the same; the logits differ by what the type rounds."""
    ids = llm.encode(PROMPTS[2])
    expected = llm.model.begin().forward_all(ids)
    model = nc.LLM(files[kind]).model
    assert kind.upper() in model.runtime
    found = model.begin().forward_all(ids)
    assert np.abs(found - expected).max() < {"f16": 0.05, "q8_0": 1.0}[kind]
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["gemma2", "mamba", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("llama", "qwen2", "phi3"))],
)
def test_random_models_equal_transformers(llm: nc.LLM, tmp_path: Path, kind: str) -> None:
    import torch

    model = random_folder(kind, tmp_path / "model")
    write_gguf().write(tmp_path / "model", tmp_path / "model.gguf")
    other = nc.LLM(tmp_path / "model.gguf", llm.tokenizer, gguf_options={**EXACT, "n_ctx": 2048})
    ids = np.random.default_rng(0).integers(3, 4096, 50).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = other.model.begin().forward_all(ids)
    tolerance = 5e-4 if kind == "gemma2" else 5e-6  # llama.cpp looks GELU up in a table of half precision
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    given = [ids[: 5 + 6 * i] for i in range(6)]
    wanted = params(6, temperature=0, max_tokens=40)
    outputs = other.generate(given, wanted)
    for prompt, one in zip(given, outputs, strict=True):
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert list(one.outputs[0].token_ids) == whole[0, len(prompt) :].tolist()
    assert tokens(other, given, params(6, max_tokens=30)) == [
        tuple(token for chunk in generate(other.model, llm.tokenizer, prompt, one) for token in chunk.token_ids)
        for prompt, one in zip(given, params(6, max_tokens=30), strict=True)
    ]
