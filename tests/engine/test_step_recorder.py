"""Given output tokens, and the recorded steps of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiers import count
from toy_requests import drive

import nucleate as nc
from nucleate.engine.request import RecordedStep, Request
from nucleate.parameters.parameter import ParameterError
from nucleate.speculative.config import Speculation
from nucleate.structured_output import StructuredOutputs

LETTERS = StructuredOutputs(regex=r" [A-Z][a-z]{2,9} (is|was) [a-z ]{10,60}\.")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, dry_multiplier=0.8),
    "xtc": dict(xtc_probability=0.5, xtc_threshold=0.05, top_k=40),
    "grammar": dict(structured_outputs=LETTERS),
    "guidance": dict(guidance_scale=1.5, negative_prompt="A sad story"),
    "stop": dict(stop=["."], min_tokens=3),
    "categorical": dict(draw="categorical", top_p=0.9),
}


class Recorder:
    """Keeps everything."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self.drafts: list[tuple[int, int, int, tuple[int, ...]]] = []

    def record(self, step: RecordedStep) -> None:
        self.steps.append(step)

    def record_draft(self, output_index: int, position: int, accepted: int, rejected: Sequence[int]) -> None:
        self.drafts.append((output_index, position, accepted, tuple(rejected)))


def run(llm: nc.LLM, request: Request, **options: Any) -> list[nc.CompletionChunk]:
    [outputs] = drive(llm.new_engine(**options), [request])
    return [output.chunk for output in outputs]


def tokens(chunks: Sequence[nc.CompletionChunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def text(chunks: Sequence[nc.CompletionChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"speculative_config": "ngram"}], ids=["plain", "ngram"])
def test_an_output_that_begins_with_its_own_tokens_is_the_same(llm: nc.LLM, name: str, options: dict[str, Any]) -> None:
    params = nc.SamplingParams(seed=3, max_tokens=30, **CASES[name])
    request = Request(llm.encode("Once upon a time"), params)
    whole = run(llm, request)
    for kept in (1, 7, len(tokens(whole)) - 1):
        again = run(llm, dataclasses.replace(request, output_ids=tokens(whole)[:kept]), **options)
        assert (tokens(again), text(again), again[-1].finish_reason) == (
            tokens(whole),
            text(whole),
            whole[-1].finish_reason,
        )


def test_several_outputs_begin_with_the_given_tokens(llm: nc.LLM) -> None:
    given = llm.tokenizer.encode(" there was a", False)
    request = Request(llm.encode("Once upon a time"), nc.SamplingParams(n=3, seed=5, max_tokens=12), output_ids=given)
    chunks = run(llm, request, max_num_seqs=2)
    outputs = [tokens(chunks, index) for index in range(3)]
    assert all(output[: len(given)] == given for output in outputs)
    assert len({tuple(output) for output in outputs}) == 3


def test_a_stop_string_may_span_given_and_sampled_tokens(llm: nc.LLM) -> None:
    prompt = llm.encode("Once upon a time")
    whole = run(llm, Request(prompt, nc.SamplingParams(temperature=0, max_tokens=12)))
    found = text(whole)
    stop = found[len(found) // 2 - 3 : len(found) // 2 + 3]
    params = nc.SamplingParams(temperature=0, max_tokens=12, stop=[stop])
    for kept in range(1, 11):
        again = run(llm, Request(prompt, params, output_ids=tokens(whole)[:kept]))
        assert text(again) == found[: found.index(stop)]
        assert again[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        ({"max_tokens": 3}, [1, 2, 3], "output_ids has 3 tokens, but the output has room for 3 tokens"),
        ({}, [4096], "output_ids holds token ids outside the vocabulary"),
        (
            {"structured_outputs": StructuredOutputs(choice=["yes", "no"])},
            [16],
            "token 0 of output_ids .* does not match",
        ),
    ],
)
def test_output_ids_that_are_not_allowed(llm: nc.LLM, values: dict[str, Any], given: list[int], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run(llm, Request([1, 2], nc.SamplingParams(**values), output_ids=given))


@pytest.mark.parametrize("given", ["text", [True], [1.5]])
def test_output_ids_must_be_token_ids(given: Any) -> None:
    with pytest.raises(ParameterError, match="output_ids"):
        Request([1], output_ids=given)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", [None, "ngram", "rejection"])
def test_a_trace_of_each_recorded_step_samples_its_token(llm: nc.LLM, name: str, method: str | None) -> None:
    prompt, params = (
        llm.encode("Tom saw a cat. Tom saw a cat. Tom saw a"),
        nc.SamplingParams(seed=11, max_tokens=count(20, 60), temperature=0.7, **CASES[name]),
    )
    config = Speculation("ngram", adaptive=False, acceptance_rule="rejection") if method == "rejection" else method
    recorder = Recorder()
    chunks = run(llm, Request(prompt, params, recorder=recorder), speculative_config=config)
    output = tokens(chunks)
    assert [step.token_id for step in recorder.steps[: len(output)]] == output
    assert [step.position for step in recorder.steps] == [*range(len(recorder.steps))]
    for step in recorder.steps[: len(output)] if method != "rejection" else []:
        if step.origin == "forced":
            continue
        assert step.inputs is not None
        logits, given, mask = step.inputs
        stages = (*given[:-1], dataclasses.replace(given[-1], seed=11))
        past = output[: step.position]
        trace = nc.trace(logits, stages, prompt_ids=prompt, output_ids=past, step=step.position, mask=mask)
        assert trace.token_id == step.token_id


def test_stateful_stages_are_recorded_with_their_state(llm: nc.LLM) -> None:
    recorder = Recorder()
    params = nc.SamplingParams(seed=1, max_tokens=10, mirostat_tau=4.0)
    run(llm, Request(llm.encode("Once upon a time"), params, recorder=recorder))
    states = {step.inputs.stages[0].mu for step in recorder.steps if step.inputs}  # type: ignore[attr-defined]
    assert len(states) > 5


def test_drafts_are_recorded(llm: nc.LLM) -> None:
    recorder = Recorder()
    prompt = llm.encode("Row, row, row the boat, Tom, down the river. " * 5)
    params = nc.SamplingParams(temperature=0, max_tokens=40)
    config = Speculation("ngram", adaptive=False)
    output = tokens(run(llm, Request(prompt, params, recorder=recorder), speculative_config=config))
    assert recorder.drafts
    for _, position, accepted, rejected in recorder.drafts:
        assert position + accepted <= len(output)
        assert position + accepted == len(output) or output[position + accepted] not in rejected


def test_recorded_logits_are_copies_and_given_tokens_have_none(llm: nc.LLM) -> None:
    recorder, prompt = Recorder(), llm.encode("Once upon a time")
    run(llm, Request(prompt, nc.SamplingParams(max_tokens=6, seed=1), output_ids=[16, 411], recorder=recorder))
    assert [step.origin for step in recorder.steps[:3]] == ["given", "given", "sampled"]
    assert recorder.steps[0].inputs is None
    rows = [step.inputs.logits for step in recorder.steps[2:] if step.inputs is not None]
    assert len(rows) > 1
    assert not np.shares_memory(rows[0], rows[1])
    assert rows[0].dtype == np.float32
