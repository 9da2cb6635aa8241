"""Parsing of request bodies in OpenAI's format."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
import tiers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.app import read_detokenize, read_tokenize
from nucleate.server.http_errors import http_error
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, PLAIN, Endpoint
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.responses import error_body
from nucleate.tokenization.chat_template import DEFAULT_OPTIONS, ChatTemplateOptions

DEFAULTS = nc.SamplingParams(top_k=50, temperature=0.7)
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
    """A minimal valid body, with these fields added."""
    return {**({"messages": HELLO} if kind is CHAT else {"prompt": "Hello"}), **fields}


def read(kind: Endpoint, **fields: Any) -> nc.SamplingParams:
    return read_body(kind, body(kind, **fields), DEFAULTS).params


def refusal(kind: Endpoint, given: Any) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        read_body(kind, given, DEFAULTS)
    assert isinstance(caught.value.field, str)
    return caught.value


@KINDS
@settings(max_examples=tiers.count(25, 100))
@given(data=st.data())
def test_any_body_is_parsed_or_a_parameter_error(kind: Endpoint, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.field_names)) | st.text(max_size=6)
    fields = data.draw(st.dictionaries(names, VALUES, max_size=4))
    base = {} if data.draw(st.booleans()) else body(kind)
    try:
        request = read_body(kind, {**base, **fields}, DEFAULTS)
    except ParameterError as caught:
        error = caught
    else:
        assert {name for name, value in fields.items() if value is not None} <= kind.field_names
        assert (request.messages is None) == bool(request.prompts)
        return
    assert isinstance(error.field, str)
    assert_short(http_error(error).body)


def assert_short(error_response: dict[str, Any]) -> None:
    """Check that an error is short and can be serialized."""
    error = error_response["error"]
    assert len(error["message"]) <= 2000
    assert len(error["param"]) <= 100
    assert json.dumps(error_response, ensure_ascii=False).encode()


@KINDS
@settings(max_examples=30)
@given(value=VALUES)
def test_a_body_that_is_not_an_object(kind: Endpoint, value: Any) -> None:
    if not isinstance(value, dict):
        assert refusal(kind, value).field == "body"


@KINDS
@settings(max_examples=tiers.count(12, 50))
@given(name=st.text(max_size=30), value=VALUES)
def test_an_unknown_field_is_named_unless_it_is_null(kind: Endpoint, name: str, value: Any) -> None:
    if name not in kind.field_names:
        assert read(kind, **{name: None}) == read(kind)
    if name not in kind.field_names and value is not None:
        error = refusal(kind, body(kind, **{name: value}))
        assert error.field == name
        assert f"unknown field {shown(name)}" in str(error)


@KINDS
def test_a_misspelled_field_gets_a_suggestion(kind: Endpoint) -> None:
    assert "did you mean temperature" in str(refusal(kind, body(kind, temprature=1)))


CONSTRAINTS = [{"regex": "a+"}, {"json_object": True, "whitespace": "none"}, {"choice": ["a"]}, {"regex": ""}, {}]


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
        "StructuredOutputs": st.sampled_from(CONSTRAINTS),
        "Mapping[int, float]": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    }.get(field.kind, words)


@settings(max_examples=tiers.count(25, 100))
@given(data=st.data())
def test_valid_parameters_are_parsed(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=6))
    values = {name: data.draw(one(name), label=name) for name in names}
    try:
        assume(values.get("stop_regex") != [])
        expected = DEFAULTS.override(**values)
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
def test_null_equals_an_absent_field(kind: Endpoint, name: str) -> None:
    assert read(kind, **{name: None}) == read(kind)


def test_the_defaults_are_the_models_except_max_tokens() -> None:
    assert read(COMPLETIONS) == DEFAULTS.replace(max_tokens=16)
    assert read(CHAT) == read(PLAIN) == DEFAULTS
    assert read(COMPLETIONS, temperature=1) == DEFAULTS.replace(temperature=1.0, max_tokens=16)
    longer = DEFAULTS.replace(max_tokens=99)
    assert read_body(COMPLETIONS, body(COMPLETIONS), longer).params.max_tokens == 99


def test_field_names_of_openai() -> None:
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
    request = read_body(CHAT, body(CHAT, logprobs=False), DEFAULTS.replace(logprobs=2))
    assert request.params.logprobs is None
    assert refusal(CHAT, body(CHAT, logprobs=3)).field == "logprobs"
    assert refusal(CHAT, body(CHAT, top_logprobs=3)).field == "top_logprobs"
    assert refusal(CHAT, body(CHAT, logprobs=False, top_logprobs=3)).field == "top_logprobs"
    assert refusal(CHAT, body(CHAT, logprobs=True, top_logprobs=-1)).field == "top_logprobs"


@pytest.mark.parametrize(
    ("name", "idle", "busy"),
    [
        ("functions", [], [[{"name": "f"}], {}]),
        ("function_call", "none", ["required", {"name": "f"}]),
        ("modalities", ["text"], [["text", "audio"]]),
    ],
)
def test_unsupported_fields_are_rejected_unless_they_have_no_effect(name: str, idle: Any, busy: list[Any]) -> None:
    assert read(CHAT, **{name: idle}) == read(CHAT)
    for value in busy:
        error = refusal(CHAT, body(CHAT, **{name: value}))
        assert (error.field, "not supported" in str(error)) == (name, True)


def parse(kind: Endpoint, **fields: Any) -> ParsedRequest:
    return read_body(kind, body(kind, **fields), DEFAULTS)


def test_best_of_is_at_least_n() -> None:
    for fields, best_of in (({"best_of": 3, "n": 3}, 3), ({"best_of": 128, "n": 2}, 128), ({"n": 4}, 4), ({}, 1)):
        request = parse(COMPLETIONS, **fields)
        assert (request.params.n, request.best_of) == (fields.get("n", 1), best_of)
    for value in (1, 2, 129, 0, True, 3.0, "3"):
        error = refusal(COMPLETIONS, body(COMPLETIONS, best_of=value, n=3))
        assert (error.field, str(error)[:16]) == ("best_of", "best_of must be ")
    assert "at least n (3), got 2" in str(refusal(COMPLETIONS, body(COMPLETIONS, best_of=2, n=3)))
    assert parse(COMPLETIONS, best_of=3, n=3, stream=True).best_of == 3
    assert "in a stream" in str(refusal(COMPLETIONS, body(COMPLETIONS, best_of=4, n=3, stream=True)))
    assert refusal(CHAT, body(CHAT, best_of=1)).field == "best_of"


def test_the_engine_may_compute_more_than_is_returned() -> None:
    plain = parse(COMPLETIONS, n=2)
    assert plain.engine_params is plain.params
    best = parse(COMPLETIONS, n=2, best_of=5)
    assert best.engine_params == best.params.replace(n=5, logprobs=0)
    assert parse(COMPLETIONS, best_of=5, logprobs=3).engine_params.logprobs == 3
    assert parse(COMPLETIONS, best_of=5, logprob_token_ids=[3]).engine_params.logprobs is None
    assert parse(COMPLETIONS, echo=True).engine_params.prompt_logprobs is None
    assert parse(COMPLETIONS, logprobs=2).engine_params.prompt_logprobs is None
    for own, of_prompt, expected in ((2, None, 2), (0, None, 0), (2, 5, 5), (3, 1, 3)):
        request = parse(COMPLETIONS, echo=True, logprobs=own, prompt_logprobs=of_prompt)
        assert (request.engine_params.logprobs, request.engine_params.prompt_logprobs) == (own, expected)
        assert request.params.prompt_logprobs == of_prompt
    assert parse(COMPLETIONS, echo=True, logprob_token_ids=[3]).engine_params.prompt_logprobs == 0


def test_prompt_only_requests() -> None:
    request = parse(COMPLETIONS, echo=True, max_tokens=0, logprobs=1)
    assert (request.prompt_only, request.echo, request.engine_params.max_tokens) == (True, True, 1)
    assert not parse(COMPLETIONS, echo=True, max_tokens=1).prompt_only
    for fields in ({}, {"echo": False}, {"echo": None}):
        error = refusal(COMPLETIONS, body(COMPLETIONS, max_tokens=0, **fields))
        assert (error.field, "or 0 with echo" in str(error)) == ("max_tokens", True)
    for value in (-1, False, 0.0, "0"):
        assert refusal(COMPLETIONS, body(COMPLETIONS, max_tokens=value, echo=True)).field == "max_tokens"
    for least in (1, 2, -1, "x"):
        error = refusal(COMPLETIONS, body(COMPLETIONS, max_tokens=0, echo=True, min_tokens=least))
        assert error.field == "min_tokens"
    fields = body(COMPLETIONS, max_tokens=0, echo=True)
    assert read_body(COMPLETIONS, fields, DEFAULTS.replace(min_tokens=5)).params.min_tokens == 0
    for kind in (CHAT, PLAIN):
        error = refusal(kind, body(kind, max_tokens=0))
        assert (error.field, "echo" in str(error)) == ("max_tokens", False)
    for value in (0, "no", []):
        assert refusal(COMPLETIONS, body(COMPLETIONS, echo=value)).field == "echo"


def test_valid_chat_template_arguments() -> None:
    arguments = {"enable_thinking": False, "x": None, "list": [1, {"a": [2.5, "b"]}], "größe": {"k-k": 1}}
    assert parse(CHAT, chat_template_kwargs=arguments).template_options.variables == arguments
    assert parse(CHAT).template_options == parse(CHAT, chat_template_kwargs={}).template_options == DEFAULT_OPTIONS
    for kind in (COMPLETIONS, PLAIN):
        assert refusal(kind, body(kind, chat_template_kwargs={})).field == "chat_template_kwargs"
    assert refusal(CHAT, body(CHAT, chat_template="x")).field == "chat_template"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *((value, "must be an object") for value in ([], "x")),
        *(({name: 1}, f"'{name}' is not a valid variable name") for name in ("a b", "", "enable-thinking")),
        ({"a": [[[[[[[[[1]]]]]]]]]}, "chat_template_kwargs.a is nested deeper than"),
        ({"a": {"b": math.inf}}, "chat_template_kwargs.a must have finite numbers, got inf"),
        *(
            ({"fine": 1, name: None}, f"cannot set '{name}'")
            for name in (
                *("messages", "add_generation_prompt", "tools", "documents", "chat_template", "bos_token", "self"),
                *("eos_token", "image_token", "additional_special_tokens", "raise_exception", "continue_final_message"),
            )
        ),
    ],
)
def test_invalid_chat_template_arguments(arguments: Any, named: str) -> None:
    error = refusal(CHAT, body(CHAT, chat_template_kwargs=arguments))
    assert (error.field, named in str(error)) == ("chat_template_kwargs", True), str(error)
    with pytest.raises(ParameterError, match="chat_template_kwargs"):
        read_tokenize({"messages": HELLO, "chat_template_kwargs": arguments})


def test_clients_cannot_set_reserved_template_arguments(llm: nc.LLM) -> None:
    assert parse(CHAT, chat_template_kwargs={"a": [[[[[[[{"b": 1}]]]]]]]}).template_options.variables
    for name in llm.tokenizer.special_tokens:
        assert refusal(CHAT, body(CHAT, chat_template_kwargs={name: "x"})).field == "chat_template_kwargs"


def test_token_ids_are_requested_with_vllms_field() -> None:
    request = read_tokenize({"model": "m", "prompt": "Hello"})
    assert (request.model, request.prompt, request.messages) == ("m", "Hello", None)
    assert (request.template_options.add_special_tokens, request.return_token_strs) == (True, False)
    assert read_tokenize({"prompt": ""}).prompt == ""
    request = read_tokenize({"messages": HELLO, "prompt": None, "chat_template_kwargs": {"a": 1}})
    assert (request.messages, request.template_options) == (HELLO, ChatTemplateOptions(variables={"a": 1}))
    request = read_tokenize({"messages": HELLO, "add_special_tokens": True, "return_token_strs": True})
    assert (request.template_options.add_special_tokens, request.return_token_strs) == (True, True)
    assert not read_tokenize({"prompt": "a", "add_special_tokens": False}).template_options.add_special_tokens
    assert read_detokenize({"tokens": [1, 2], "model": None}) == ([1, 2], None)
    assert (read_detokenize({"tokens": [], "model": "m"}), read_detokenize({"tokens": [1]})) == (([], "m"), ([1], None))


def test_fields_of_the_chat_template() -> None:
    for read in (
        lambda body: parse(CHAT, **body).template_options,
        lambda body: read_tokenize({"messages": HELLO, **body}).template_options,
    ):
        assert read({"add_generation_prompt": False}) == ChatTemplateOptions(add_generation_prompt=False)
        continued = ChatTemplateOptions(add_generation_prompt=False, continue_final_message=True)
        assert read({"continue_final_message": True}) == continued
        assert read({"continue_final_message": True, "add_generation_prompt": False}) == continued
        assert read({"add_special_tokens": True}) == ChatTemplateOptions(add_special_tokens=True)
        with pytest.raises(ParameterError, match="cannot both be true"):
            read({"continue_final_message": True, "add_generation_prompt": True})
        for name in ("add_generation_prompt", "continue_final_message", "add_special_tokens"):
            with pytest.raises(ParameterError, match=f"{name} must be true or false, got 1"):
                read({name: 1})


INVALID_TOKENIZE: list[tuple[Any, str]] = [
    *(({"messages": HELLO, name: value}, name) for name, value in (("tools", {}), ("tool_choice", "none"))),
    *(({"messages": value}, "messages") for value in ([], "a")),
    *(({"prompt": value}, "prompt") for value in (["a"], 5)),
    *(
        ({"prompt": "a", name: value}, name)
        for name, value in {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": [],
            "chat_template_kwargs": {},
            "add_special_tokens": 1,
            "return_token_strs": "yes",
            "model": "",
            "promt": "b",
        }.items()
    ),
    ({"prompt": "a", "messages": HELLO}, "prompt"),
    *(({}, "prompt"), ([], "body"), (None, "body")),
]
INVALID_DETOKENIZE: list[tuple[Any, str]] = [
    *(({"tokens": value}, "tokens") for value in (None, [-1], [1, True], [1.0], "12", {"1": 1})),
    *(
        ({}, "tokens"),
        ({"tokens": [1], "prompt": "a"}, "prompt"),
        ({"tokens": [1], "model": 5}, "model"),
        ("x", "body"),
    ),
]


@pytest.mark.parametrize(
    ("read_it", "given", "field"),
    [
        *((read_tokenize, *one) for one in INVALID_TOKENIZE),
        *((read_detokenize, *one) for one in INVALID_DETOKENIZE),
    ],
)
def test_invalid_bodies_for_tokenize_and_detokenize(read_it: Any, given: Any, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        read_it(given)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_fields_without_effect_on_the_output_are_ignored(kind: Endpoint) -> None:
    assert read(kind, user="me", metadata={"a": "b"}, store=True, service_tier="flex") == read(kind)


def test_stream_options() -> None:
    request = read_body(CHAT, body(CHAT, stream=True, stream_options={"include_usage": True}), DEFAULTS)
    assert (request.stream, request.include_usage) == (True, True)
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
        ("", ("",)),  # the model decides whether an empty prompt is valid
    ],
)
def test_prompts(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert read_body(COMPLETIONS, {"prompt": prompt}, DEFAULTS).prompts == expected
    if prompt in ("a", [1, 2], ""):
        assert read_body(PLAIN, {"prompt": prompt}, DEFAULTS).prompts == expected
    else:
        assert refusal(PLAIN, {"prompt": prompt}).field == "prompt"


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "a"], ["a", [1]], [True], [1.0], {"a": 1}, 5, [[1], []]])
def test_invalid_prompts(prompt: Any) -> None:
    for kind in (COMPLETIONS, PLAIN):
        assert refusal(kind, {"prompt": prompt}).field == "prompt"


def test_a_body_has_either_a_prompt_or_messages() -> None:
    assert read_body(PLAIN, {"messages": HELLO}, DEFAULTS).messages == HELLO
    assert "not both" in str(refusal(PLAIN, {"messages": HELLO, "prompt": "x"}))
    assert refusal(PLAIN, {}).field == "prompt"
    assert refusal(CHAT, {}).field == "messages"
    assert refusal(CHAT, body(CHAT, prompt="x")).field == "prompt"
    assert refusal(COMPLETIONS, body(COMPLETIONS, messages=HELLO)).field == "messages"
    # each of OpenAI's fields is valid only for its endpoint
    assert refusal(PLAIN, body(PLAIN, model="x")).field == "model"


def test_text_parts_of_a_message_are_joined_and_its_empty_fields_dropped() -> None:
    parts = [{"type": "text", "text": "Hel", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": None},
    ]
    assert read_body(CHAT, {"messages": messages}, DEFAULTS).messages == [
        {"content": "Hello", "role": "user", "name": "Ann"},
        {"content": "", "role": "assistant"},
    ]
    refused = [
        {"role": "assistant", **one}
        for one in ({"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]})
    ]
    assert read_body(CHAT, {"messages": refused}, DEFAULTS).messages == [{"content": "No.", "role": "assistant"}] * 2


def test_a_json_object_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = read(CHAT, response_format={"type": "json_object", "schema": schema})
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert found.structured_outputs == read(CHAT, response_format=whole).structured_outputs is not None
    for wrong in ({"type": "text", "schema": schema}, {"type": "json_object", "schema": 5}):
        assert refusal(CHAT, body(CHAT, response_format=wrong)).field == "response_format"


def test_verbosity_is_a_variable_of_the_chat_template() -> None:
    options = parse(CHAT, verbosity="low", reasoning_effort="high").template_options
    assert dict(options.variables) == {"verbosity": "low", "reasoning_effort": "high"}
    assert refusal(CHAT, body(CHAT, verbosity="loud")).field == "verbosity"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hello", "messages[0]"),
        *(({**role, "content": "x"}, "messages[0].role") for role in ({}, {"role": ""})),
        *(({"role": "user", **content}, "messages[0].content") for content in ({}, {"content": None})),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        *(
            ({"role": "user", "content": [part]}, "messages[0].content[0]")
            for part in ({"type": "image_url", "image_url": {}}, {"type": "input_text", "text": "x"})
        ),
        ({"role": "user", "refusal": "No."}, "messages[0].refusal"),
        ({"role": "assistant", "content": "x", "refusal": "No."}, "messages[0].refusal"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "rolle": 1}, "'rolle'; did you mean role?"),
    ],
)
def test_an_invalid_message_is_named(message: Any, named: str) -> None:
    error = refusal(CHAT, {"messages": [message]})
    assert error.field == "messages"
    assert named in str(error)


def test_a_deeply_nested_value_is_an_error_of_one_line() -> None:
    for kind in (COMPLETIONS, CHAT, PLAIN):
        deep: Any = []
        for _ in range(5000):  # repr recurses too deeply for it
            deep = [deep]
        for name in ("temperature", "prompt", "messages", "nothing", "metadata", "echo", "chat_template_kwargs"):
            assert "\n" not in str(refusal(kind, {name: deep}))
    for name in ("prompt", "messages", "tokens"):
        for read_it in (read_tokenize, read_detokenize):
            with pytest.raises(ParameterError) as caught:
                read_it({name: deep})
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        *({"x" * 1_000_000: 1}, {"temperature" * 100_000: 1}, {"\ud800": 1}, {"n": 10**4299}),
        *({"temperature": value} for value in ("y" * 1_000_000, [1] * 300_000)),
        *({"model": value} for value in (["m"] * 300_000, "\ud800")),
        {"stop": [""] * 300_000},
        {"messages": [{"role": "user", "content": "x", "z" * 1_000_000: 1}]},
        {"messages": [{"role": "user", "content": [{"type": "z" * 1_000_000}]}]},
        *(
            {"messages": HELLO, "chat_template_kwargs": {name: value}}
            for name, value in [("z" * 1_000_000, math.inf), ("z" * 1_000_000 + "_token", 1), ("-" * 1_000_000, 1)]
        ),
        *({"stream": True, "stream_options": {name: True}} for name in ("z" * 1_000_000, "\ud800")),
    ],
)
def test_errors_are_short_and_fast_for_any_body(given: dict[str, Any]) -> None:
    for kind in (COMPLETIONS, CHAT, PLAIN):
        start = time.process_time()
        error = refusal(kind, given)
        assert len(error.field) <= 100
        assert_short(http_error(error).body)
        assert time.process_time() - start < 0.5


def test_long_error_messages_are_truncated() -> None:
    truncated = error_body("\ud800" + "é" * 5000, "p" * 5000 + "\udfff")["error"]
    assert (len(truncated["message"]), truncated["message"][:3], truncated["message"][-4:]) == (2000, "?éé", "é...")
    assert truncated["param"] == "p" * 97 + "..."
    assert error_body("m" * 2000, "p" * 100)["error"] == {**truncated, "message": "m" * 2000, "param": "p" * 100}
    assert error_body("x")["error"]["param"] is None


def test_error_bodies_of_openai() -> None:
    error = http_error(refusal(CHAT, body(CHAT, temperature=-1))).body["error"]
    message = "temperature must be a number >= 0, got -1"
    assert error == {"message": message, "type": "invalid_request_error", "param": "temperature", "code": None}
    assert error_body("x", None, "y", "server_error")["error"]["type"] == "server_error"
