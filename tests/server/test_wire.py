"""The wire: what OpenAI's bodies mean to us, and what our values look like to OpenAI's clients."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.core.event import Completion, Output, StepLogprobs, TokenLogprob, Usage
from nucleate.core.parameter import ParameterError
from nucleate.core.values import shown
from nucleate.params import FIELDS
from nucleate.server.wire.requests import CHAT, COMPLETIONS, PLAIN, Endpoint, read_body
from nucleate.server.wire.responses import Head, chat_body, completion_body, error_body, refusal_body
from nucleate.server.wire.strict import read_json

DEFAULTS = nc.SamplingParams(top_k=50, temperature=0.7)
HEAD = Head("x-1", 1700000000, "tiny")
HELLO = [{"role": "user", "content": "Hello"}]
KINDS = pytest.mark.parametrize("kind", [COMPLETIONS, CHAT, PLAIN], ids=lambda kind: kind.url or "plain")

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 3), st.floats(), st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def body(kind: Endpoint, **fields: Any) -> dict[str, Any]:
    """A body that asks for something, and these fields."""
    return {**({"messages": HELLO} if kind is CHAT else {"prompt": "Hello"}), **fields}


def read(kind: Endpoint, **fields: Any) -> nc.SamplingParams:
    return read_body(kind, body(kind, **fields), DEFAULTS).params


def refusal(kind: Endpoint, given: Any) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        read_body(kind, given, DEFAULTS)
    assert isinstance(caught.value.field, str)
    return caught.value


@KINDS
@settings(max_examples=100)
@given(data=st.data())
def test_no_body_is_more_than_a_parameter_error(kind: Endpoint, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.known)) | st.text(max_size=6)
    fields = data.draw(st.dictionaries(names, VALUES, max_size=4))
    asked_for = {} if data.draw(st.booleans()) else body(kind)
    try:
        asked = read_body(kind, {**asked_for, **fields}, DEFAULTS)
    except ParameterError as caught:
        error = caught
    else:
        assert fields.keys() <= kind.known
        assert (asked.messages is None) == bool(asked.prompts)
        return
    assert isinstance(error.field, str)
    assert json.dumps(refusal_body(error))


@KINDS
@settings(max_examples=30)
@given(value=VALUES)
def test_a_body_that_is_no_object(kind: Endpoint, value: Any) -> None:
    if not isinstance(value, dict):
        assert refusal(kind, value).field == "body"


@KINDS
@settings(max_examples=50)
@given(name=st.text(max_size=30), value=VALUES)
def test_an_unknown_field_is_named_whatever_it_says(kind: Endpoint, name: str, value: Any) -> None:
    if name not in kind.known:
        error = refusal(kind, body(kind, **{name: value}))
        assert error.field == name
        assert f"unknown field {shown(name)}" in str(error)


@KINDS
def test_a_near_miss_is_told_what_was_meant(kind: Endpoint) -> None:
    assert "did you mean temperature?" in str(refusal(kind, body(kind, temprature=1)))


def one(name: str) -> st.SearchStrategy[Any]:
    """Values of a field, most of them allowed."""
    field = FIELDS[name]
    low = 0 if field.low is None else field.low
    ids = st.lists(st.integers(0, 99), max_size=3)
    words = st.lists(st.text(min_size=1, max_size=3), max_size=2)
    if field.choices:
        return st.sampled_from(field.choices)
    return {
        "float": st.floats(low, low + 1 if field.high is None else field.high),
        "int": st.integers(int(low), int(low) + 60),
        "bool": st.booleans(),
        "tuple[int, ...]": ids,
        "Mapping[int, float]": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    }.get(field.kind, words)


@settings(max_examples=100)
@given(data=st.data())
def test_the_parameters_of_any_request_come_through(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=6))
    values = {name: data.draw(one(name), label=name) for name in names}
    try:
        expected = DEFAULTS.replace(**values)
    except ParameterError:
        for kind in (COMPLETIONS, PLAIN):
            refusal(kind, body(kind, **values))
        return
    plain = json.loads(json.dumps({name: expected.to_dict().get(name, values[name]) for name in values}))
    assert read(PLAIN, **plain) == expected
    short = {} if "max_tokens" in values else {"max_tokens": 16}
    if expected.min_tokens <= 16 or not short:
        assert read(COMPLETIONS, **plain) == expected.replace(**short)
    plain.pop("logprobs", None)
    assert read(CHAT, **plain) == expected.replace(logprobs=None)


@KINDS
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_null_is_as_if_a_field_were_not_there(kind: Endpoint, name: str) -> None:
    assert read(kind, **{name: None}) == read(kind)


def test_the_defaults_are_the_models_but_for_the_length() -> None:
    assert read(COMPLETIONS) == DEFAULTS.replace(max_tokens=16)
    assert read(CHAT) == read(PLAIN) == DEFAULTS
    assert read(COMPLETIONS, temperature=1) == DEFAULTS.replace(temperature=1.0, max_tokens=16)
    longer = DEFAULTS.replace(max_tokens=99)
    assert read_body(COMPLETIONS, body(COMPLETIONS), longer).params.max_tokens == 99


def test_openais_names() -> None:
    assert read(CHAT, max_completion_tokens=5).max_tokens == 5
    assert read(CHAT, max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refusal(CHAT, body(CHAT, max_completion_tokens=5, max_tokens=6)).field == "max_completion_tokens"
    assert refusal(CHAT, body(CHAT, max_completion_tokens=0)).field == "max_completion_tokens"
    assert refusal(COMPLETIONS, body(COMPLETIONS, max_completion_tokens=5)).field == "max_completion_tokens"
    assert read(COMPLETIONS, stop="x").stop == read(COMPLETIONS, stop=["x"]).stop == ("x",)
    assert dict(read(COMPLETIONS, logit_bias={"7": -100}).logit_bias) == {7: -100.0}
    assert read(COMPLETIONS, logprobs=3).logprobs == 3
    assert refusal(COMPLETIONS, body(COMPLETIONS, logprobs=True)).field == "logprobs"


def test_logprobs_of_a_chat() -> None:
    assert read(CHAT, logprobs=True).logprobs == 0
    assert read(CHAT, logprobs=True, top_logprobs=4).logprobs == 4
    assert read(CHAT, logprobs=False).logprobs is None
    asked = read_body(CHAT, body(CHAT, logprobs=False), DEFAULTS.replace(logprobs=2))
    assert asked.params.logprobs is None
    assert refusal(CHAT, body(CHAT, logprobs=3)).field == "logprobs"
    assert refusal(CHAT, body(CHAT, top_logprobs=3)).field == "top_logprobs"
    assert refusal(CHAT, body(CHAT, logprobs=False, top_logprobs=3)).field == "top_logprobs"
    assert refusal(CHAT, body(CHAT, logprobs=True, top_logprobs=-1)).field == "top_logprobs"


@pytest.mark.parametrize(
    ("kind", "name", "idle", "busy"),
    [
        (COMPLETIONS, "echo", False, [True, 0, "no"]),
        (COMPLETIONS, "suffix", "", ["x", False]),
        (COMPLETIONS, "best_of", 1, [2, True, "1"]),
        (CHAT, "tools", [], [[{"type": "function"}], {}]),
        (CHAT, "tool_choice", "none", ["required", {"type": "function"}]),
        (CHAT, "response_format", {"type": "text"}, [{"type": "json_object"}, "text"]),
        (CHAT, "modalities", ["text"], [["text", "audio"]]),
        (CHAT, "reasoning_effort", None, ["low"]),
    ],
)
def test_what_is_not_there_yet_is_refused_unless_it_asks_for_nothing(
    kind: Endpoint, name: str, idle: Any, busy: list[Any]
) -> None:
    assert read(kind, **{name: idle}) == read(kind)
    for value in busy:
        error = refusal(kind, body(kind, **{name: value}))
        assert (error.field, "not supported yet" in str(error)) == (name, True)


def test_best_of_may_be_n() -> None:
    assert read(COMPLETIONS, best_of=3, n=3).n == 3
    assert refusal(COMPLETIONS, body(COMPLETIONS, best_of=1, n=3)).field == "best_of"


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_what_cannot_change_an_answer_is_ignored(kind: Endpoint) -> None:
    assert read(kind, user="me", metadata={"a": "b"}, store=True, service_tier="flex") == read(kind)


def test_streams() -> None:
    asked = read_body(CHAT, body(CHAT, stream=True, stream_options={"include_usage": True}), DEFAULTS)
    assert (asked.stream, asked.include_usage) == (True, True)
    assert not read_body(CHAT, body(CHAT, stream=False), DEFAULTS).stream
    for wrong in ({"stream": 1}, {"stream": "yes"}):
        assert refusal(CHAT, body(CHAT, **wrong)).field == "stream"
    for options in ({"include_usage": True}, {}):
        assert refusal(CHAT, body(CHAT, stream_options=options)).field == "stream_options"
    assert refusal(CHAT, body(CHAT, stream=True, stream_options={"usage": True})).field == "usage"
    assert "include_usage" in refusal(CHAT, body(CHAT, stream=True, stream_options={"include_usage": 1})).field


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),  # the model says whether it can begin with nothing
    ],
)
def test_prompts(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert read_body(COMPLETIONS, {"prompt": prompt}, DEFAULTS).prompts == expected
    if prompt in ("a", [1, 2], ""):
        assert read_body(PLAIN, {"prompt": prompt}, DEFAULTS).prompts == expected
    else:
        assert refusal(PLAIN, {"prompt": prompt}).field == "prompt"


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "a"], ["a", [1]], [True], [1.0], {"a": 1}, 5, [[1], []]])
def test_what_is_no_prompt(prompt: Any) -> None:
    for kind in (COMPLETIONS, PLAIN):
        assert refusal(kind, {"prompt": prompt}).field == "prompt"


def test_a_prompt_or_messages_and_not_both() -> None:
    assert read_body(PLAIN, {"messages": HELLO}, DEFAULTS).messages == HELLO
    assert "not both" in str(refusal(PLAIN, {"messages": HELLO, "prompt": "x"}))
    assert refusal(PLAIN, {}).field == "prompt"
    assert refusal(CHAT, {}).field == "messages"
    assert refusal(CHAT, body(CHAT, prompt="x")).field == "prompt"
    assert refusal(COMPLETIONS, body(COMPLETIONS, messages=HELLO)).field == "messages"
    assert refusal(PLAIN, body(PLAIN, model="x")).field == "model"  # OpenAI's fields are for its own endpoints


def test_the_parts_of_a_message_are_joined_and_its_empty_fields_forgotten() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": None},
    ]
    assert read_body(CHAT, {"messages": messages}, DEFAULTS).messages == [
        {"content": "Hello", "role": "user", "name": "Ann"},
        {"content": "", "role": "assistant"},
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "rolle": 1}, "'rolle'; did you mean role?"),
    ],
)
def test_a_message_that_is_wrong_is_named(message: Any, named: str) -> None:
    error = refusal(CHAT, {"messages": [message]})
    assert error.field == "messages"
    assert named in str(error)


def test_a_deep_value_is_an_error_of_one_line() -> None:
    for kind in (COMPLETIONS, CHAT, PLAIN):
        deep: Any = []
        for _ in range(5000):  # repr cannot write so many
            deep = [deep]
        for name in ("temperature", "prompt", "messages", "nothing", "metadata", "echo"):
            assert "\n" not in str(refusal(kind, {name: deep}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN"),
        ("[Infinity]", "Infinity"),
        ("-Infinity", "-Infinity"),
        ('{"a": 1, "b": {"a": 2, "a": 3}}', "'a' is there twice"),
        ("[" * 100_000, "deep"),
        ('{"a":' * 100_000, "deep"),
        ("1" * 5000, "digits"),
        ("", "Expecting value"),
        ("{'a': 1}", "property name"),
        ("[1] [2]", "Extra data"),
    ],
)
def test_json_is_read_strictly(text: str, why: str) -> None:
    with pytest.raises(ParameterError, match="not valid JSON: ") as caught:
        read_json(text)
    assert why in str(caught.value)
    assert caught.value.field == "body"


def told(token: int, logprob: float = -1.0, rank: int | None = 1) -> TokenLogprob:
    return TokenLogprob(token, logprob, rank)


def completion(llm: nc.LLM, ids: list[int], prompt: str = "Once", steps: bool = True, **changes: Any) -> Completion:
    """A completion as if the model had said these tokens."""
    prompt_ids = llm.encode(prompt)
    text = llm.tokenizer.decode(prompt_ids + ids)[len(prompt) :]
    logprobs = tuple(StepLogprobs(told(token), (told(token), told(0, -2.0, 2)), ()) for token in ids) if steps else None
    output = Output(**{**dict(index=0, text=text, token_ids=tuple(ids), finish_reason="stop", stop_reason=None, seed=7,
                              logprobs=logprobs), **changes})  # fmt: skip
    return Completion(tuple(prompt_ids), (output,), Usage(len(prompt_ids), len(ids)))


def test_a_completion_as_openai_has_it(llm: nc.LLM) -> None:
    first, second = (llm.generate(p, nc.SamplingParams(n=2, seed=1, max_tokens=5))[0] for p in ("The fox", "A"))
    made = completion_body(HEAD, [first, second], llm.tokenizer)
    assert {**made, "choices": 0} == {
        "id": "x-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": 0,
        "usage": {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25},
    }
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["seed"] for choice in made["choices"]] == [1, 2, 1, 2]
    outputs = (*first.outputs, *second.outputs)
    assert [choice["text"] for choice in made["choices"]] == [output.text for output in outputs]
    assert made["choices"][3] == {
        "index": 3,
        "text": second.outputs[1].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "seed": 2,
        "token_ids": list(second.outputs[1].token_ids),
    }


def test_a_chat_completion_as_openai_has_it(llm: nc.LLM) -> None:
    answer = llm.chat(HELLO, nc.SamplingParams(n=2, seed=1, max_tokens=3, logprobs=2, logprob_token_ids=[5]))
    made = chat_body(HEAD, answer, llm.tokenizer)
    assert made["object"] == "chat.completion"
    choice = made["choices"][1]
    assert choice["message"] == {"role": "assistant", "content": answer.outputs[1].text, "refusal": None}
    assert choice["logprobs"]["refusal"] is None
    assert len(choice["logprobs"]["content"]) == 3
    for entry, token in zip(choice["logprobs"]["content"], answer.outputs[1].token_ids, strict=True):
        assert set(entry) == {"token", "logprob", "bytes", "token_id", "rank", "top_logprobs", "asked_logprobs"}
        assert (entry["token_id"], bytes(entry["bytes"]).decode()) == (token, entry["token"])
        assert [one["rank"] for one in entry["top_logprobs"]] == [1, 2]
        assert [one["token_id"] for one in entry["asked_logprobs"]] == [5]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == answer.outputs[1].text
    assert json.dumps(made, allow_nan=False)


def test_logprobs_of_the_prompt_come_with_its_first_answer(llm: nc.LLM) -> None:
    params = nc.SamplingParams(n=2, max_tokens=1, prompt_logprobs=1)
    answers = llm.generate(["The fox", "A dog"], params)
    choices = completion_body(HEAD, answers, llm.tokenizer)["choices"]
    assert [choice.get("prompt_logprobs") is not None for choice in choices] == [True, False, True, False]
    first, second, _ = choices[0]["prompt_logprobs"]
    assert first is None
    assert second["token_id"] == answers[0].prompt_token_ids[1]
    assert "prompt_logprobs" in chat_body(HEAD, answers[0], llm.tokenizer)["choices"][0]


@pytest.mark.parametrize("text", [" a fox.", " 🦊🥁 né", "日本語", "a", ""])
def test_offsets_of_tokens_are_those_of_their_text(llm: nc.LLM, text: str) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    made = completion_body(HEAD, [completion(llm, ids)], llm.tokenizer)["choices"][0]
    assert made["text"] == text
    whole = [len(llm.tokenizer.decode(ids[:place]).rstrip("\ufffd")) for place in range(len(ids))]
    assert made["logprobs"]["text_offset"] == whole
    said = [name.removeprefix("bytes:") for name in made["logprobs"]["tokens"]]
    data = b"".join(
        bytes.fromhex(name.replace("\\x", "")) if name.startswith("\\x") else name.encode() for name in said
    )
    assert data.decode() == text


def test_offsets_stay_in_a_text_that_was_cut(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode(" the fox and the drum", add_special_tokens=False)
    made = completion_body(HEAD, [completion(llm, ids, text=" the")], llm.tokenizer)["choices"][0]
    assert made["logprobs"]["text_offset"] == [0] + [4] * (len(ids) - 1)


def test_what_json_cannot_write_is_openais_number(llm: nc.LLM) -> None:
    steps = (StepLogprobs(told(70, -math.inf, None), (told(71), told(70, -math.inf, None)), (told(3, -math.inf),)),)
    answer = completion(llm, [70], logprobs=steps)
    chat = chat_body(HEAD, answer, llm.tokenizer)["choices"][0]["logprobs"]["content"][0]
    assert (chat["logprob"], chat["rank"], chat["top_logprobs"][1]["logprob"]) == (-9999.0, None, -9999.0)
    legacy = completion_body(HEAD, [answer], llm.tokenizer)["choices"][0]["logprobs"]
    assert legacy["token_logprobs"] == [-9999.0]
    assert sorted(legacy["top_logprobs"][0].values()) == [-9999.0, -1.0]
    assert legacy["asked_logprobs"][0][0]["logprob"] == -9999.0
    assert json.dumps([chat, legacy], allow_nan=False)


def test_ids_without_a_token_have_no_text(llm: nc.LLM) -> None:
    size = llm.tokenizer.vocab_size
    tokenizer = type(llm.tokenizer)(llm.folder, padded_size=size + 8)
    answer = Output(0, "", (size + 1,), "length", None, 1, (StepLogprobs(told(size + 1), (), ()),))
    made = chat_body(HEAD, Completion((1,), (answer,), Usage(1, 1)), tokenizer)
    assert made["choices"][0]["logprobs"]["content"][0]["bytes"] == []
    completion_body(HEAD, [Completion((1,), (answer,), Usage(1, 1))], tokenizer)


def test_errors_as_openai_has_them() -> None:
    error = refusal(CHAT, body(CHAT, temperature=-1))
    assert refusal_body(error) == {
        "error": {
            "message": "temperature must be a number >= 0, got -1",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }
    assert error_body("x", None, "y", "server_error")["error"]["type"] == "server_error"
