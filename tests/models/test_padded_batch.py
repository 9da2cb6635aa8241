"""Sequences in padded batches of the model's own cache: the tokens of ``generate``, whatever comes and goes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import runner_of
from nucleate.models.runner import Fork, ModelInput, SequentialRunner
from nucleate.models.transformers import padded_batch
from nucleate.models.transformers.padded_batch import PaddedRunner
from nucleate.models.transformers.transformers_model import TransformersModel

SIZES = {"vocab_size": 512, "hidden_size": 32}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, **HEADS, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"num_hidden_layers": 2, "state_size": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3_next": {
        "num_hidden_layers": 2, **HEADS, **LINEAR, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]
    },
    "llama4_text": {
        "num_hidden_layers": 4, **HEADS, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 32
    },
}  # fmt: skip


def model_of(name: str) -> Any:
    """A random Transformers model."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():  # far from ties
        torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else None
    return model


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "lfm2" else pytest.mark.slow) for name in MODELS]
)
def stock(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def runner_for(stock: Any) -> PaddedRunner:
    runner = runner_of(TransformersModel.of(stock), 16 << 20)
    assert isinstance(runner, PaddedRunner)
    assert not runner.unbatched_reason
    return runner


def generated(stock: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def test_requests_that_come_and_go_have_the_tokens_of_generate(stock: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(length)] for length in (1, 30, 3, 17, 9)]
    counts = [25, 3, 12, 8, 20]
    engine = Engine(runner_for(stock), nc.LLM().tokenizer)
    waiting = [
        Request(prompt, nc.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    names, tokens = [], {}
    while waiting or len(engine):
        if waiting:
            names.append(engine.add(waiting.pop(0)))
        for output in engine.step():
            tokens[output.request_id] = [*tokens.get(output.request_id, ()), *output.chunk.token_ids]
    expected = [generated(stock, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert [tokens[name] for name in names] == expected


def test_long_prompts_and_chats_have_the_tokens_of_generate(stock: Any) -> None:
    """In chunks, beside a sequence that decodes; continued from saved states."""
    rng = random.Random(2)
    runner = runner_for(stock)
    engine = Engine(runner, nc.LLM().tokenizer, max_num_seqs=4, max_num_batched_tokens=24)
    system, short = [rng.randrange(512) for _ in range(50)], [1, 2, 3]
    chat = [*system, 7, 8]

    def start(prompt: list[int], count: int) -> str:
        return engine.add(Request(prompt, nc.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))

    expected = {start(short, 60): generated(stock, short, 60)}
    tokens: dict[str, list[int]] = {}
    for end in (9, 10, 11):
        turns = [[*chat, end], [*system, end, 4, 5]]
        names = [start(turn, 6) for turn in turns]
        expected |= {name: generated(stock, turn, 6) for name, turn in zip(names, turns, strict=True)}
        while any(len(tokens.get(name, ())) < 6 for name in names):
            for output in engine.step():
                tokens[output.request_id] = [*tokens.get(output.request_id, ()), *output.chunk.token_ids]
        chat = [*turns[0], *tokens[names[0]]]
    while len(engine):
        for output in engine.step():
            tokens[output.request_id] += output.chunk.token_ids
    assert tokens == expected
    if runner.saves_states:
        assert engine.stats.prefix_cache_hits > 200
    else:
        assert stock.config.model_type == "mamba"


@pytest.mark.slow
def test_logits_are_those_of_single_sequences(stock: Any) -> None:
    """Any inputs in any order: new sequences, several tokens at once, forks, recomputed ones, ones that end."""
    runner, rng = runner_for(stock), random.Random(1)
    single = SequentialRunner(runner.model, 64)
    ids: dict[int, list[int]] = {}
    done: dict[int, int] = {}
    joined = 0
    for step in range(60):
        if len(ids) < 2 or rng.random() < 0.15:
            ids[step], done[step] = [rng.randrange(512) for _ in range(rng.randint(1, 20))], 0
        elif rng.random() < 0.1:
            key = rng.choice(list(ids))
            del ids[key], done[key]
            runner.forget(key)
        elif rng.random() < 0.1:
            key = rng.choice(list(ids))
            ids[step], done[step] = [*ids[key]], done[key]
            runner.fork([Fork(key, step, None)])
        elif rng.random() < 0.2 and (saved := runner.save(key := rng.choice(list(ids)))) is not None:
            assert (saved.length, runner.save(key)) == (done[key], None)
            ids[step], done[step] = [*ids[key]], done[key]
            runner.restore(step, saved)
            if rng.random() < 0.5:
                runner.restore(key, saved)
            else:
                del ids[key], done[key]
        keys = rng.sample(list(ids), rng.randint(1, len(ids)))
        inputs = []
        for key in keys:
            if done[key] and rng.random() < 0.05:
                done[key] = 0  # preempted
            elif done[key]:
                ids[key] += [rng.randrange(512) for _ in range(rng.choice((1, 1, 1, 1, 3)))]
            elif key in runner._open:
                ids[key].append(rng.randrange(512))
            wanted = rng.randint(0, 2) if len(ids[key]) - done[key] > 1 else 1
            inputs.append(ModelInput(key, ids[key], done[key], len(ids[key]), (), wanted))
            done[key] = len(ids[key])
        joined += sum(runner._can_join(each) for each in inputs) > 1
        logits = runner.forward(inputs)
        expected = [
            single.forward([ModelInput(-1, each.token_ids, 0, each.stop, (), each.num_logits)]) for each in inputs
        ]
        np.testing.assert_allclose(logits, np.concatenate(expected), rtol=1e-3, atol=1e-3)
    assert joined > 10


def test_a_failed_step_is_computed_again(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_for(stock)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    runner.forward([ModelInput(key, ids, 0, len(ids), (), 1) for key, ids in enumerate(prompts)])
    inputs = [ModelInput(key, [*ids, 8], len(ids), len(ids) + 1, (), 1) for key, ids in enumerate(prompts)]
    with monkeypatch.context() as patch:
        patch.setattr(runner.model.model, "forward", lambda **_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            runner.forward(inputs)
    expected = [SequentialRunner(runner.model, 64).forward([each._replace(start=0)]) for each in inputs]
    np.testing.assert_allclose(runner.forward(inputs), np.concatenate(expected), rtol=1e-3, atol=1e-3)


def test_other_logits_in_batches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded row that sees its padding."""
    monkeypatch.setattr(padded_batch, "_padded", lambda value, dimension, size: value.new_ones(
        [size if i == dimension else length for i, length in enumerate(value.shape)]
    ))  # fmt: skip
    runner = runner_of(TransformersModel.of(model_of("lfm2")), 16 << 20)
    assert not isinstance(runner, PaddedRunner)
    assert "its logits differ" in runner.unbatched_reason
