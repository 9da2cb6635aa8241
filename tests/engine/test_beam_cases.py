"""Beam searches in the engine, single cases: parameters, errors, text, logprobs and callers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from beam_searches import expected_beams, found_beams
from toy_models import PagedToy
from toy_requests import SIZE, drive, is_empty, rule, runner, toy

import nucleate as nc
from nucleate.engine.beam_params import BeamCompletion, BeamParams, BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.runner import ModelInput


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_beams", 0, "num_beams must be an integer >= 1 and <= 1024, got 0"),
        ("num_beams", 2.0, "num_beams must be an integer >= 1 and <= 1024, got 2.0"),
        ("num_beams", 5000, "num_beams must be an integer >= 1 and <= 1024, got 5000"),
        ("num_beams", True, "num_beams must be an integer >= 1 and <= 1024, got True"),
        ("max_tokens", 0, "max_tokens must be an integer >= 1 or none, got 0"),
        ("length_penalty", math.inf, "length_penalty must be a number, got inf"),
        ("length_penalty", math.nan, "length_penalty must be a number, got nan"),
        ("length_penalty", "1", "length_penalty must be a number"),
        ("length_penalty", -1e4, "length_penalty must leave max_tokens"),
        ("early_stopping", "always", "early_stopping must be true, false or 'never'"),
        ("early_stopping", 1, "early_stopping must be true, false or 'never'"),
        ("early_stopping", np.array(["never"] * 2), "early_stopping must be true, false or 'never', got"),
        ("num_return_sequences", 5, r"num_return_sequences must be at most num_beams \(4\), got 5"),
        ("num_beam_groups", 3, r"num_beam_groups must divide num_beams \(4\), got 3"),
        ("diversity_penalty", -1.0, "diversity_penalty must be a number >= 0 and <= 1e\\+06, got -1.0"),
        ("structured_outputs", {"regex": 5}, "regex"),
        ("stop_token_ids", [-1], "stop_token_ids must be a list of integers >= 0"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
        ("logprobs", -1, "logprobs must be an integer >= 0 or none"),
        ("skip_special_tokens", "no", "skip_special_tokens must be true or false"),
    ],
)
def test_errors_name_the_field_and_the_allowed_values(field: str, value: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message) as error:
        BeamParams(**{"max_tokens": 5, field: value})
    assert error.value.field in (field, "regex")


def test_parameters_are_frozen_values() -> None:
    params = BeamParams(num_beams=np.int64(3), stop_token_ids=[4, 5], length_penalty=1)
    assert params == BeamParams(num_beams=3, stop_token_ids=(4, 5), length_penalty=1.0)
    assert hash(params) == hash(BeamParams(num_beams=3, stop_token_ids=(4, 5)))
    assert type(params.num_beams) is int
    assert (params.n, BeamParams(num_beams=9, num_return_sequences=2).n) == (3, 2)
    assert dataclasses.replace(params, num_beams=4).num_beams == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.num_beams = 2
    assert list(BeamParams.PARAMETERS) == [f.name for f in dataclasses.fields(BeamParams) if f.name != "early_stopping"]
    assert all(parameter.help for parameter in BeamParams.PARAMETERS.values())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: BeamRequest("ab"), "prompt_ids are token ids, not text"),
        (lambda: BeamRequest([0.5]), "prompt_ids must be token ids"),
        (lambda: BeamRequest([1], id=7), "id must be a string or None"),
        (lambda: BeamRequest([1], priority=True), "priority must be an integer"),
        (lambda: BeamRequest([1], nc.SamplingParams()), "params must be a BeamParams, got SamplingParams"),
        (lambda: BeamRequest([1], None), "params must be a BeamParams, got None"),
    ],
)
def test_invalid_requests(request_: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        request_()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (BeamRequest([]), "the prompt is empty"),
        (BeamRequest([SIZE]), "outside the vocabulary"),
        (BeamRequest([1] * 256), "the context holds 256, output included"),
        (BeamRequest([1], BeamParams(stop_token_ids=(SIZE,))), f"stop_token_ids names token {SIZE}"),
        (BeamRequest([1], BeamParams(length_penalty=200.0)), r"length_penalty must leave max_tokens \*\* length"),
        (BeamRequest([1], id="in-use"), "there is a request 'in-use' already"),
    ],
)
def test_requests_rejected_by_the_engine(llm: nc.LLM, request_: BeamRequest, message: str) -> None:
    engine = Engine(runner("paged", toy(), 64), llm.tokenizer, backend="reference")
    engine.add(BeamRequest([1], id="in-use"))
    with pytest.raises(nc.ParameterError, match=message):
        engine.add(request_)
    assert len(engine) == 1
    engine.abort("in-use")
    assert is_empty(engine)


def test_the_context_limits_the_length_by_default(llm: nc.LLM) -> None:
    model = toy(context_length=20)
    engine = Engine(runner("paged", model, 64), llm.tokenizer, backend="reference")
    request = BeamRequest([1, 2, 3], BeamParams(num_beams=2, ignore_eos=True))
    [events] = drive(engine, [request])
    assert found_beams(events) == expected_beams(model, request, ())
    assert {len(event.chunk.token_ids) for event in events} == {17}
    assert {event.chunk.finish_reason for event in events} == {"length"}


def test_stop_tokens_are_reported_but_not_in_the_text(llm: nc.LLM) -> None:
    def ends(ids: tuple[int, ...]) -> np.ndarray:
        logits = np.full(SIZE, -30.0, np.float32)
        logits[[300, 301, 302, 0]] = [3.0, 2.9, 2.8, 2.7] if len(ids) == 2 else [0.0, -9.0, -9.0, -9.0]
        return logits

    engine = Engine(runner("paged", toy(of=ends)), llm.tokenizer, backend="reference")
    params = BeamParams(num_beams=4, max_tokens=1, stop_token_ids=(301, 302), skip_special_tokens=False)
    [events] = drive(engine, [BeamRequest([260, 261], params)])
    reported = {e.chunk.token_ids: (e.chunk.text, e.chunk.finish_reason, e.chunk.stop_reason) for e in events}
    shown = llm.tokenizer.decode([260, 261, 300]).removeprefix(llm.tokenizer.decode([260, 261]))
    assert reported == {
        (300,): (shown, "length", None),
        (301,): ("", "stop", 301),
        (302,): ("", "stop", 302),
        (0,): ("", "stop", None),
    }
    params = BeamParams(num_beams=4, max_tokens=1, ignore_eos=True, stop_token_ids=(0,))
    [events] = drive(engine, [BeamRequest([260, 261], params)])
    assert {e.chunk.stop_reason for e in events if e.chunk.token_ids == (0,)} == {0}


def test_logprobs_cover_every_token(llm: nc.LLM) -> None:
    [completion] = llm.beam_search("Once upon a time", num_beams=3, max_tokens=8, logprobs=2)
    for beam in completion.outputs:
        assert beam.logprobs is not None
        assert [step.chosen.token_id for step in beam.logprobs] == list(beam.token_ids)
        assert math.fsum(step.chosen.logprob for step in beam.logprobs) == pytest.approx(beam.logprob, abs=1e-9)
        assert all(len(step.top) == 2 for step in beam.logprobs)
        assert all(step.top[0].logprob >= step.chosen.logprob for step in beam.logprobs)
        assert all(step.chosen.rank >= 1 for step in beam.logprobs)
    [plain] = llm.beam_search("Once upon a time", num_beams=3, max_tokens=8)
    assert [beam.logprobs for beam in plain.outputs] == [None] * 3
    assert [beam.token_ids for beam in plain.outputs] == [beam.token_ids for beam in completion.outputs]


def test_texts_are_decoded_after_the_prompt(llm: nc.LLM) -> None:
    prompts = ["Tom and Lily went to", llm.encode("The")]
    for prompt, completion in zip(
        prompts, llm.beam_search(prompts, BeamParams(num_beams=3, max_tokens=9)), strict=True
    ):
        ids = llm.encode(prompt)
        assert completion.prompt_token_ids == tuple(ids)
        assert completion.text == completion.outputs[0].text
        assert completion.usage.completion_tokens == sum(len(beam.token_ids) for beam in completion.outputs)
        for beam in completion.outputs:
            assert llm.tokenizer.decode([*ids, *beam.token_ids]) == llm.tokenizer.decode(ids) + beam.text


def test_parameters_as_an_object_or_as_fields(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    one = llm.beam_search("Tom", BeamParams(num_beams=2, max_tokens=4))
    assert llm.beam_search("Tom", num_beams=2, max_tokens=4) == one
    assert llm.beam_search(["Tom"], num_beams=2, max_tokens=4, use_tqdm=True) == one
    assert "1/1" in capsys.readouterr().err
    assert llm.beam_search([]) == []
    with pytest.raises(nc.ParameterError, match="unknown parameter 'num_beans'; did you mean num_beams") as error:
        llm.beam_search("Tom", num_beans=2)
    assert error.value.field == "num_beans"
    assert llm.beam_search("Tom", BeamParams(num_beams=3, max_tokens=4), num_beams=2) == one
    with pytest.raises(nc.ParameterError, match="unknown parameter 'num_beans'"):
        llm.beam_search("Tom", BeamParams(), num_beans=2)
    with pytest.raises(nc.ParameterError, match="params must be a BeamParams, got SamplingParams"):
        llm.beam_search("Tom", nc.SamplingParams())
    with pytest.raises(nc.ParameterError, match="such as"):
        llm.beam_search([1, 2])
    with pytest.raises(nc.ParameterError, match="the prompt is empty"):
        llm.beam_search(["Tom", []])


def test_failed_searches_return_a_completion_with_the_reason(llm: nc.LLM) -> None:
    engine = Engine(runner("paged", toy(of=lambda ids: np.full(SIZE, np.nan, np.float32))), llm.tokenizer)
    [events] = drive(engine, [BeamRequest([1, 2])])
    completion = BeamCompletion.from_chunks([1, 2], [event.chunk for event in events])
    [beam] = completion.outputs
    assert (beam.finish_reason, beam.token_ids, completion.text) == ("error", (), "")
    assert beam.stop_reason == "invalid logits: NaN at token 0"
    assert (beam.score, beam.logprob) == (-math.inf, -math.inf)
    assert completion.usage == nc.Usage(2, 0)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.fast_cases(0)
def test_logits_may_be_tensors(llm: nc.LLM, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

    def rounded(ids: tuple[int, ...]) -> np.ndarray:
        return torch.from_numpy(rule(ids)).to(getattr(torch, kind)).float().numpy()

    class Tensors(PagedToy):
        def forward(self, parts: Sequence[ModelInput]) -> object:
            return torch.from_numpy(super().forward(parts)).to(getattr(torch, kind))

    model = toy(of=rounded)
    engine = Engine(Tensors(model, 20, 4), llm.tokenizer, max_num_seqs=3, backend="reference")
    requests = [BeamRequest([1, 2, at], BeamParams(num_beams=3, max_tokens=8)) for at in range(3)]
    sampled = Request([1, 2], nc.SamplingParams(temperature=0.0, max_tokens=5))
    *events, greedy = drive(engine, [*requests, sampled])
    for request, own in zip(requests, events, strict=True):
        assert found_beams(own) == expected_beams(model, request, llm.tokenizer.eos_token_ids)
    assert greedy[-1].finished


def test_searches_run_by_priority(llm: nc.LLM) -> None:
    engine = Engine(runner("paged", toy(), 20), llm.tokenizer, max_num_seqs=2, backend="reference")
    params = BeamParams(num_beams=2, max_tokens=12, ignore_eos=True)
    later = engine.add(BeamRequest([1, 2, 3], params, priority=1))
    engine.step()
    sooner = engine.add(BeamRequest([4, 5, 6], params))
    order = []
    while len(engine):
        order += [event.request_id for event in engine.step() if event.finished]
    assert order == [sooner, later]
