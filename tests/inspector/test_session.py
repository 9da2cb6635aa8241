"""Inspected requests: their events, and what is answered about their steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.inspector.protocol import slider
from nucleate.inspector.session import InspectorSession
from nucleate.inspector.store import InspectionStore, InspectorError
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS

PARAMS: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def session(llm: nc.LLM) -> InspectorSession:
    return InspectorSession(llm)


class Answer:
    """The events of a request."""

    def __init__(self, session: InspectorSession, **body: Any) -> None:
        events = json.loads(json.dumps([*session.generate(body)], allow_nan=False))
        assert events[0]["type"] == "start"
        assert events[-1]["type"] == "end"
        assert all(event["type"] == "tokens" for event in events[1:-1])
        self.start, self.end = events[0], events[-1]
        self.tokens = [token for event in events[1:-1] for token in event["tokens"]]
        self.ids = [token["id"] for token in self.tokens]
        self.run = self.start["run"]


@pytest.fixture(scope="module")
def answer(session: InspectorSession) -> Answer:
    return Answer(session, prompt="Once upon a time", params=PARAMS)


def test_an_inspected_answer_is_the_same_as_any_other(llm: nc.LLM, answer: Answer) -> None:
    [completion] = llm.generate("Once upon a time", **PARAMS)
    assert answer.ids == list(completion.outputs[0].token_ids)
    assert answer.end["text"] == completion.text
    assert answer.end["finish_reason"] == completion.outputs[0].finish_reason
    assert answer.end["usage"] == {"prompt_tokens": 5, "completion_tokens": len(answer.ids)}
    assert "".join(token["released"] for token in answer.tokens) == completion.text
    assert [token["step"] for token in answer.tokens] == [*range(len(answer.ids))]


def test_the_statistics_of_a_token_are_those_of_its_trace(session: InspectorSession, answer: Answer) -> None:
    for token in answer.tokens:
        view = session.trace({"run": answer.run, "step": token["step"], "top": 5})
        assert view["picked"] == view["sampled"] == {"id": token["id"], "text": token["text"]}
        place = next(i for i, each in enumerate(view["tokens"]) if each["id"] == token["id"])
        logits, last = view["stages"][0], view["stages"][-2]
        assert token["rank"] == view["tokens"][place]["rank"]
        assert token["model_probability"] == pytest.approx(logits["p"][place], rel=1e-5)
        assert token["surprisal"] == pytest.approx(-np.log(logits["p"][place]), abs=1e-5)
        assert token["entropy"] == pytest.approx(logits["entropy"], abs=1e-5)
        assert token["probability"] == pytest.approx(last["p"][place], rel=1e-6)
        assert token["kept"] == last["kept"]


def test_origins_tell_defaults_of_the_model_from_given_parameters(session: InspectorSession) -> None:
    start = Answer(session, prompt="Once", params={"temperature": 0.5, "max_tokens": 2}).start
    assert start["params"]["top_k"] == 50
    assert start["origins"] == {
        "temperature": "request",
        "max_tokens": "request",
        **dict.fromkeys(session.settings()["origins"].keys() - {"temperature"}, "generation_config"),
    }
    assert start["params"]["seed"] == start["seed"] < 2**53
    assert [stage["name"] for stage in start["stages"]][-1] == "gumbel"


def test_other_settings_are_applied_to_the_recorded_logits(session: InspectorSession, answer: Answer) -> None:
    view = session.trace({"run": answer.run, "step": 7, "params": {"temperature": 0}})
    assert view["picked"]["id"] == view["tokens"][0]["id"]
    assert view["sampled"]["id"] == answer.ids[7]
    assert view["seed"] == 3
    order = ["top_p", "temperature"]
    view = session.trace({"run": answer.run, "step": 7, "params": {"temperature": 2.0, "top_p": 0.9, "order": order}})
    assert [stage["name"] for stage in view["stages"]][:3] == ["logits", "top_p", "temperature"]


def test_trace_and_nc_trace_agree(llm: nc.LLM, session: InspectorSession, answer: Answer) -> None:
    step, params = 5, {**PARAMS, "min_p": 0.03, "repetition_penalty": 1.2}
    view = session.trace({"run": answer.run, "step": step, "params": params, "top": 64})
    ids, kept = llm.encode("Once upon a time"), answer.ids[:step]
    found = nc.trace(
        llm.model.begin().forward([*ids, *kept]),
        nc.SamplingParams(**{name: value for name, value in params.items() if name != "max_tokens"}),
        prompt_ids=ids,
        output_ids=kept,
        step=step,
    )
    assert [stage["why"] for stage in view["stages"]] == [each.why for each in found.steps]
    assert [stage["kept"] for stage in view["stages"]] == [each.left for each in found.steps]
    assert view["picked"]["id"] == found.token_id
    for stage, each in zip(view["stages"], found.steps, strict=True):
        for token, p in zip(view["tokens"], stage["p"], strict=True):
            assert (p or 0.0) == pytest.approx(each.probabilities[token["id"]], abs=1e-5)  # float32


def test_a_branch_keeps_the_tokens_before_it_and_the_noise_after_it(session: InspectorSession, answer: Answer) -> None:
    parent = {"run": answer.run, "step": 6, "token": answer.ids[6]}
    same = Answer(session, parent=parent, params=PARAMS)
    assert same.ids == answer.ids
    assert [token["origin"] for token in same.tokens] == ["given"] * 7 + ["sampled"] * (len(same.ids) - 7)
    assert same.start["given"] == 7
    other = Answer(session, parent={"run": answer.run, "step": 6, "token": 402}, params=PARAMS)
    assert other.ids[:7] == [*answer.ids[:6], 402]
    assert other.end["text"].startswith("".join(token["text"] for token in answer.tokens[:6]))
    text = Answer(session, parent={"run": other.run, "step": 9, "text": " and a cat"}, params={"max_tokens": 20})
    assert text.end["text"].startswith("".join(token["text"] for token in other.tokens[:9]) + " and a cat")
    assert text.start["seed"] == 3
    with pytest.raises(InspectorError, match="step 3 was given, not sampled"):
        session.trace({"run": other.run, "step": 3})


def test_text_that_a_stop_string_cuts_is_not_released(session: InspectorSession, answer: Answer) -> None:
    text = answer.end["text"]
    stop = text[20:26]
    found = Answer(session, prompt="Once upon a time", params={**PARAMS, "stop": [stop]})
    assert found.end["text"] == text[: text.index(stop)]
    assert found.end["finish_reason"] == "stop"
    assert found.end["stop_reason"] == stop
    assert "".join(token["released"] for token in found.tokens) == found.end["text"]


def test_tokens_that_a_grammar_forces_are_marked(session: InspectorSession) -> None:
    params = {**PARAMS, "structured_outputs": {"regex": " the little (dog|cat) was happy\\."}}
    found = Answer(session, prompt="Once", params=params)
    assert {token["origin"] for token in found.tokens} == {"sampled", "forced"}
    forced = next(token for token in found.tokens if token["origin"] == "forced")
    assert forced["probability"] is None
    with pytest.raises(InspectorError, match="was forced, not sampled"):
        session.trace({"run": found.run, "step": forced["step"]})


def test_a_grammar_may_be_changed_for_a_recorded_step(session: InspectorSession, answer: Answer) -> None:
    constraint = {"regex": ".{10,200}!"}
    view = session.trace({"run": answer.run, "step": 2, "params": {**PARAMS, "structured_outputs": constraint}})
    assert "mask" in [stage["name"] for stage in view["stages"]]
    constraint = {"choice": ["yes", "no"]}
    with pytest.raises(ParameterError, match="does not allow the tokens before this step"):
        session.trace({"run": answer.run, "step": 2, "params": {**PARAMS, "structured_outputs": constraint}})


def test_mirostat_keeps_its_state(session: InspectorSession) -> None:
    found = Answer(session, prompt="Once upon a time", params={"mirostat_tau": 4.0, "seed": 1, "max_tokens": 12})
    for token in found.tokens:
        assert session.trace({"run": found.run, "step": token["step"]})["picked"]["id"] == token["id"]


def test_an_order_brings_its_variants_of_the_stages(session: InspectorSession, answer: Answer) -> None:
    """The top-p of the order akunu refers to the distribution before top-k, which no parameter of a request says."""
    changed = {"top_k": 50, "top_p": 0.95}
    kept = {}
    for order in ("canonical", "akunu"):
        view = session.trace({"run": answer.run, "step": 3, "params": {**PARAMS, **changed, "order": order}})
        kept[order] = {stage["name"]: stage["label"] for stage in view["stages"]}["top_p"]
    assert kept == {"canonical": "TopP(0.95)", "akunu": "TopP(p=0.95, of_full_mass=True)"}


def test_guidance_is_part_of_the_recorded_logits(session: InspectorSession) -> None:
    params = {"guidance_scale": 1.5, "negative_prompt": "A sad story", "seed": 2, "max_tokens": 8}
    found = Answer(session, prompt="Once upon a time", params=params)
    for token in found.tokens:
        assert session.trace({"run": found.run, "step": token["step"]})["picked"]["id"] == token["id"]
    with pytest.raises(ParameterError, match="guidance_scale cannot be changed"):
        session.trace({"run": found.run, "step": 1, "params": {**params, "guidance_scale": 2.0}})


def test_draws_are_counted(session: InspectorSession, answer: Answer) -> None:
    found = session.draws({"run": answer.run, "step": 3, "count": 500})
    assert found["count"] == 500
    assert found["drawn"] == 500
    assert sum(token["count"] for token in found["tokens"]) + found["rest"]["count"] == 500
    assert sum(token["probability"] for token in found["tokens"]) + found["rest"]["probability"] == pytest.approx(1)


def test_a_conversation_uses_the_chat_template(llm: nc.LLM, session: InspectorSession) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]
    found = Answer(session, messages=messages, params={"seed": 1, "max_tokens": 10})
    assert found.end["text"] == llm.chat(messages, seed=1, max_tokens=10).text


def test_an_unknown_run_and_steps_beyond_its_end(session: InspectorSession, answer: Answer) -> None:
    with pytest.raises(InspectorError, match="no such run"):
        session.trace({"run": "00", "step": 0})
    with pytest.raises(InspectorError, match="not a step 999"):
        session.trace({"run": answer.run, "step": 999})
    with pytest.raises(InspectorError, match="tokens, not 999"):
        [*session.generate({"parent": {"run": answer.run, "step": 999, "token": 1}})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "^body must be a JSON object"),
        ({}, "give one of prompt, messages and parent, got none"),
        ({"prompt": "a", "messages": []}, "give one of prompt, messages and parent, got prompt and messages"),
        ({"prompt": 5}, "prompt must be a text"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"parent": {"run": 5}}, "parent.run must be the id of a run"),
        ({"parent": {"run": "a", "step": 0}}, "parent needs a token or a text"),
        ({"parent": {"run": "a", "step": 0, "token": 1, "text": "b"}}, "parent needs a token or a text"),
        ({"parent": {"run": "a", "step": True, "token": 1}}, "step must be an integer"),
        ({"parent": {"run": "a", "step": 0, "token": -1}}, "parent.token must be a token id"),
        ({"parent": {"run": "a", "step": 0, "text": 1}}, "parent.text must be a text"),
        ({"prompt": "a", "params": []}, "params must be an object"),
        ({"prompt": "a", "params": {"n": 2}}, "n cannot be set here"),
        ({"prompt": "a", "params": {"logprobs": 2}}, "logprobs cannot be set here"),
        ({"prompt": "a", "params": {"temprature": 2}}, "did you mean temperature"),
        ({"prompt": "a", "params": {"temperature": -2}}, "temperature must be"),
        ({"prompt": "a", "params": {"max_tokens": 100000}}, "max_tokens must be at most"),
        ({"prompt": "a", "param": {}}, "unknown field .*did you mean params"),
        ({"prompt": "a" * 20_000}, "the context holds"),
    ],
)
def test_bodies_of_generate_that_are_not_allowed(session: InspectorSession, body: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        [*session.generate(body)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": None}, "run must be the id of a run"),
        ({"step": -1}, "step must be an integer from 0"),
        ({"step": 1.0}, "step must be an integer from 0"),
        ({"top": 0}, "top must be an integer from 1 to 512"),
        ({"top": 513}, "top must be an integer from 1 to 512"),
        ({"include": [-1]}, "include must be a list"),
        ({"include": [5000]}, "include"),
        ({"count": 10_001}, "count must be an integer from 1 to 10000"),
        ({"params": "x"}, "params must be an object"),
        ({"params": {"top_k": "many"}}, "top_k must be"),
    ],
)
def test_bodies_of_questions_that_are_not_allowed(
    session: InspectorSession, answer: Answer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        session.trace({"run": answer.run, "step": 1, **changes})


def test_logits_that_are_no_longer_stored(llm: nc.LLM) -> None:
    small = InspectorSession(llm, store=InspectionStore(max_bytes=3 * 4096 * 4))
    found = Answer(small, prompt="Once upon a time", params=PARAMS)
    assert small.trace({"run": found.run, "step": len(found.ids) - 1})["picked"]["id"] == found.ids[-1]
    with pytest.raises(InspectorError, match="the logits of step 0 are no longer stored"):
        small.trace({"run": found.run, "step": 0})


def test_invalid_logits_end_the_answer_with_an_error(llm: nc.LLM) -> None:
    session = InspectorSession(llm)
    params = {"suppress_token_ids": [16], "allowed_token_ids": [16]}
    found = Answer(session, prompt="Once upon a time", params=params)
    assert found.tokens == []
    assert found.end["finish_reason"] == "error"
    view = session.trace({"run": found.run, "step": 0})
    assert view["picked"] is None
    assert view["error"] is not None
    with pytest.raises(ParameterError, match="no token can be sampled in this step"):
        session.draws({"run": found.run, "step": 0})


def test_the_settings_describe_every_parameter_of_the_stages(session: InspectorSession) -> None:
    found = json.loads(json.dumps(session.settings(), allow_nan=False))
    assert found["model"] == {"name": "embedded", "vocab_size": 4096, "context_length": 1024, "chat": True}
    names = [each["name"] for stage in found["stages"] for each in stage["parameters"]]
    assert {"temperature", "top_p", "xtc_probability", "dry_multiplier"} <= {*names}
    for stage in found["stages"]:
        assert stage["name"] in found["orders"]["canonical"]
        for each in stage["parameters"]:
            assert each["allowed"]
            assert each["help"]
            if each["slider"] is not None:
                assert each["slider"]["min"] < each["slider"]["max"]
    assert found["orders"]["vllm"][-1] == "top_p"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.kind in ("float", "int")])
def test_the_ends_of_a_slider_are_allowed_values(name: str) -> None:
    field = FIELDS[name]
    found = slider(field, 4096)
    assert found is not None
    field.check(found["max"])
    if not field.open_low:
        field.check(found["min"])
