"""Models sharded over two processes: the tokens of one process, for every kind of request and of model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import random_models

import nucleate as nc
from nucleate.llm.shared_engine import SharedEngine
from nucleate.models.loader import runner_of
from nucleate.models.runner import ModelInput
from nucleate.models.transformers.sharded_model import check_shardable
from nucleate.sampling.stage import Scale
from nucleate.sampling.stages import Gumbel

PROMPTS = [[7, 8, 9, 10, 7, 8], [*range(20, 60)]]
DRAFTED = nc.SamplingParams(temperature=0.3, max_tokens=24, allowed_token_ids=[7, 8, 9])
Pair = tuple[nc.LLM, nc.LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    """A model on two processes, and on one."""
    with closing(nc.LLM(folder, tensor_parallel=2, device="cpu", max_num_seqs=8)) as sharded:
        yield sharded, nc.LLM(folder, device="cpu", runtime="torch", max_num_seqs=8)


def check_mixed_requests(sharded: nc.LLM, one: nc.LLM) -> None:
    params = random_models.MIXED * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in random_models.MIXED]
    random_models.assert_same(sharded.generate(prompts, params), one.generate(prompts, params))


@pytest.mark.slow
def test_mixed_requests_get_the_tokens_of_one_process(pair: Pair) -> None:
    check_mixed_requests(*pair)
    assert "2 ranks" in pair[0].model.runtime


@pytest.mark.slow
def test_structured_output_and_stop_criteria(pair: Pair) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
    requests = [
        nc.SamplingParams(
            structured_outputs=nc.StructuredOutputs(json_schema=json.dumps(schema)), seed=1, max_tokens=40
        ),
        nc.SamplingParams(structured_outputs=nc.StructuredOutputs(regex="[ab]{3,9}c"), seed=2, max_tokens=40),
        nc.SamplingParams(stop=["e", "a"], seed=3, max_tokens=40),
        nc.SamplingParams(stop_token_ids=[*range(0, 300, 7)], temperature=0, max_tokens=40),
    ]
    found, expected = [model.generate([PROMPTS[0]] * 4, requests) for model in pair]
    random_models.assert_same(found, expected)


@pytest.mark.slow
def test_beams(pair: Pair) -> None:
    found, expected = [
        model.beam_search(PROMPTS, num_beams=3, max_tokens=12, num_return_sequences=2, ignore_eos=True)
        for model in pair
    ]
    for one, other in zip(found, expected, strict=True):
        assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("tree_width", [1, 2])
def test_drafts(pair: Pair, rule: str, tree_width: int) -> None:
    method = "ngram" if tree_width == 1 else "suffix"
    config = nc.Speculation(method, acceptance_rule=rule, tree_width=tree_width, adaptive=False)
    results = []
    for model in pair:
        engine = SharedEngine(lambda model=model: model.new_engine(speculative_config=config))
        requests = [nc.Request(prompt, DRAFTED.replace(seed=seed)) for seed in range(3) for prompt in PROMPTS]
        tokens: list[list[int]] = [[] for _ in requests]
        for place, output in engine.run(requests):
            tokens[place] += output.chunk.token_ids
        stats = engine._engine.stats.speculative
        results.append((tokens, stats.draft_tokens, stats.accepted_tokens))
    assert results[0] == results[1]
    assert results[0][2] > 0


@pytest.mark.slow
def test_an_aborted_stream_leaves_the_others(pair: Pair) -> None:
    sharded, one = pair
    stream = sharded.stream(PROMPTS[1], max_tokens=30, seed=1)
    next(stream)
    stream.close()
    params = nc.SamplingParams(seed=2, max_tokens=8)
    random_models.assert_same(sharded.generate(PROMPTS, params), one.generate(PROMPTS, params))


@pytest.mark.slow
def test_hidden_states_and_rows_of_logits(pair: Pair) -> None:
    runners = [pair[0].model.new_runner(1 << 20), runner_of(pair[1].model, 1 << 20)]
    ids, results = [*range(5, 45)], []
    for runner in runners:
        runner.capture_hidden_states((0, 2))
        runner.forward([ModelInput(1, ids, 0, 30, [0, 1], 0)])
        logits_LV = runner.forward([ModelInput(1, ids, 30, 34, [0, 1, 2], 4), ModelInput(2, ids, 0, 2, [3], 1)])
        assert (len(logits_LV), logits_LV.shape, logits_LV.ndim) == (5, (5, 301), 2)
        rows = logits_LV[1:4][[2, 0]], logits_LV[-1][None], logits_LV[::2], logits_LV[3]
        results.append([np.asarray(each) for each in (runner.hidden_states, logits_LV, *rows)])
        with pytest.raises(nc.ModelError, match="the KV cache needs at least"):
            pair[0].model.new_runner(10)
        with pytest.raises((ValueError, nc.ModelError), match="the layers must be in"):
            runner.capture_hidden_states((7,))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_recorded_steps(pair: Pair) -> None:
    recorded: list[list[Any]] = []
    for model in pair:
        steps = SimpleNamespace(record=(found := []).append, record_draft=lambda *_: None)
        list(model.shared_engine.run([nc.Request(PROMPTS[0], DRAFTED.replace(seed=3), recorder=steps)]))
        recorded.append(found)
    for step, expected in zip(*recorded, strict=True):
        assert step.token_id == expected.token_id
        np.testing.assert_allclose(step.inputs.logits, expected.inputs.logits, atol=1e-4)
        assert step.inputs.stages == expected.inputs.stages


@pytest.mark.slow
def test_messages_do_not_grow_with_the_sequences(pair: Pair) -> None:
    sharded, _ = pair
    channel = sharded.model._group.rank.channel
    counts = []
    for length in (8, 100):
        before = channel.messages, channel.bytes
        sharded.generate([[*range(3, 3 + length)]], temperature=0, max_tokens=10)
        counts.append((channel.messages - before[0], channel.bytes - before[1]))
    assert counts[1][0] <= counts[0][0] + 1  # one more chunk of the prompt
    assert counts[1][1] / counts[1][0] == counts[0][1] / counts[0][0]


@pytest.mark.slow
def test_a_stage_that_other_processes_cannot_import_is_an_error(pair: Pair) -> None:
    sharded, one = pair

    class Halved(Scale):
        def apply(self, x: Any, row: Any) -> Any:
            return x / 2

    with pytest.raises(nc.ParameterError, match="stages must be defined in an importable module"):
        sharded.generate([PROMPTS[0]], (Halved(), Gumbel()), max_tokens=2)
    params = nc.SamplingParams(seed=2, max_tokens=8)
    random_models.assert_same(sharded.generate(PROMPTS, params), one.generate(PROMPTS, params))


def test_invalid_arguments(tmp_path: Path, folder: Path) -> None:
    for value in (0, -1, 1.5, True, "2"):
        with pytest.raises(nc.ParameterError, match="tensor_parallel must be"):
            nc.LLM(folder, tensor_parallel=value)  # type: ignore[arg-type]
    for arguments, text in (
        ({"runtime": "numpy"}, "tensor_parallel needs runtime 'auto' or 'torch'"),
        ({"device": "cuda:1"}, "device"),
        ({"speculative_config": "medusa"}, "with tensor_parallel, the methods are ngram, suffix or a proposer"),
    ):
        with pytest.raises(nc.ParameterError, match=text):
            nc.LLM(folder, tensor_parallel=2, **arguments)
    with pytest.raises(nc.ModelError, match=r"has 4 and 2 heads .* which 4 ranks cannot share; .* may be 1, 2$"):
        nc.LLM(folder, tensor_parallel=4, device="cpu")
    with pytest.raises(nc.ModelError, match="GPT2LMHeadModel has no tensor-parallel plan in Transformers"):
        nc.LLM(random_models.save(tmp_path, "gpt2"), tensor_parallel=2, device="cpu")
    check_shardable(folder, 2)


def test_a_model_in_memory_or_in_gguf_is_an_error(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match=r"tensor_parallel needs a model folder .*, got a model in memory"):
        nc.LLM(llm.model, llm.tokenizer, tensor_parallel=2)
