"""``LLM.chat`` with tools: calls as values, guaranteed where they are required."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any, Literal

import chat_models
import jsonschema
import pytest
import tiers

import nucleate as nc
from nucleate.chat.chat_format import TOOL_FORMATS, ChatFormat, RenderedChat
from nucleate.chat.constraint import ChatConstraint
from nucleate.chat.output_parser import ChunkParser
from nucleate.chat.reasoning import FORMATS as REASONING
from nucleate.chat.reasoning import ReasoningFormat
from nucleate.chat.tools import ToolUse
from nucleate.llm.chat_request import chat_request

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
Unit = Literal["celsius", "kelvin"]


def get_weather(city: Literal["Paris", "Rome"], unit: Unit = "celsius") -> str:
    """Return the weather."""
    return f"{city}{unit}"


def wait(days: Literal[1, 2, 3]) -> None:
    """Wait for some days."""


TOOLS = [get_weather, wait]
SCHEMAS = {tool.name: tool.schema for tool in map(nc.Tool.from_function, TOOLS)}
UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a).*$"}}, "required": ["a"]}


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def outputs_of(llm: nc.LLM, request: nc.Request, parser: ChunkParser | None) -> tuple[nc.CompletionOutput, ...]:
    """Run a request, and parse its outputs."""
    assert parser is not None
    chunks = [parser.parse(chunk) for chunk in chat_models.run(llm, request)]
    return nc.Completion.from_chunks(request.prompt_ids, chunks).outputs


def check_arguments(output: nc.CompletionOutput) -> None:
    """Check that the arguments of calls obey their schemas, of all but a call that a limit has cut."""
    for call in output.tool_calls:
        if call.complete or output.finish_reason != "length":
            jsonschema.validate(call.arguments, SCHEMAS[call.name])


def check(completion: nc.Completion, names: tuple[str, ...] = ("get_weather", "wait"), most: int | None = None) -> None:
    """Check that each complete output has calls only, which obey their schemas."""
    for output in completion.outputs:
        assert output.finish_reason in ("tool_calls", "length")
        if output.finish_reason == "tool_calls":
            assert output.text == ""
            assert 1 <= len(output.tool_calls) <= (most or 99)
        for call in output.tool_calls:
            assert call.name in names
            assert call.id.startswith("call_")
            assert call.complete or (output.finish_reason == "length" and call is output.tool_calls[-1])
            if not call.complete:
                with pytest.raises(ValueError, match=r"the call of .* is incomplete"):
                    _ = call.arguments
        check_arguments(output)
        assert len({call.id for call in output.tool_calls}) == len(output.tool_calls)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("values", [{}, {"temperature": 2.0}, {"temperature": 0}, {"temperature": 2.0, "top_k": 3}])
def test_required_calls_are_guaranteed(llm: nc.LLM, values: dict[str, Any]) -> None:
    complete = 0
    for seed in range(0, tiers.count(8, 200), 8):
        shared = {**values, "max_tokens": 250, "seed": seed, "n": 8}
        for choice, names in (("required", ("get_weather", "wait")), ("wait", ("wait",))):
            found = llm.chat(ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **shared)
            check(found, names, most=1)
            complete += sum(output.finish_reason == "tool_calls" for output in found.outputs)
        check(llm.chat(ASK, tools=TOOLS, tool_choice="required", **{**shared, "n": 2}))
    assert complete > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": None},
        {"parameters": {"type": "object", "properties": {}}},
        {"parameters": {"type": "object", "properties": {}, "required": [], "title": "ping"}},
    ],
)
def test_a_tool_without_parameters_takes_no_arguments(llm: nc.LLM, function: dict[str, Any]) -> None:
    """As OpenAI defines it. The schema that the chat template shows is as given."""
    tool = {"type": "function", "function": {"name": "ping", **function}}
    shown = nc.Tool.from_dict(tool).to_dict()["function"]["parameters"]
    assert shown == (function.get("parameters") or {"type": "object", "properties": {}})
    for choice in ("required", "ping"):
        values = {"tools": [tool], "tool_choice": choice, "max_tokens": 60, "temperature": 1.5, "n": 4, "seed": 1}
        for output in llm.chat(ASK, parallel_tool_calls=False, **values).outputs:
            assert output.finish_reason == "tool_calls"
            [call] = output.tool_calls
            assert (call.name, call.arguments) == ("ping", {})


def test_a_tool_whose_parameters_are_any_object_may_get_some(llm: nc.LLM) -> None:
    for parameters in ({}, {"type": "object"}, {"properties": {}, "additionalProperties": True}):
        tool = nc.Tool.from_dict({"type": "function", "function": {"name": "f", "parameters": parameters}})
        assert tool.enforced_schema == tool.schema


def without_ids(found: nc.Completion | nc.CompletionOutput) -> list[nc.ToolCall]:
    return [dataclasses.replace(call, id="") for call in found.tool_calls]


@pytest.mark.slow
def test_the_calls_are_those_without_speculation(llm: nc.LLM) -> None:
    drafting = nc.LLM(speculative_config="ngram")
    for seed in range(3):
        values = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120, "seed": seed}
        first, second = llm.chat(ASK, **values), drafting.chat(ASK, **values)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert without_ids(first) == without_ids(second)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_no_calls(llm: nc.LLM, choice: str) -> None:
    found = llm.chat(ASK, tools=TOOLS, tool_choice=choice, max_tokens=30, seed=1)
    assert found.tool_calls == ()
    assert found.text
    assert found.prompt is not None
    assert "get_weather" in found.prompt


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("parallel", [False, True])
def test_an_optional_call_obeys_its_schema_once_it_has_begun(llm: nc.LLM, parallel: bool) -> None:
    """The bundled model begins no call by itself: its outputs are given the beginning of one."""
    request, parser = llm.chat_request(
        ASK, tools=TOOLS, max_tokens=300, seed=1, n=6, temperature=1.5, parallel_tool_calls=parallel
    )
    begin = llm.tokenizer.encode("Let me see.\n<tool_call>", add_special_tokens=False)
    complete = 0
    for output in outputs_of(llm, dataclasses.replace(request, output_ids=begin), parser):
        assert output.text.startswith("Let me see.")
        if output.finish_reason != "length":
            complete += 1
            assert output.finish_reason == "tool_calls"
            assert parallel or (len(output.tool_calls), output.text) == (1, "Let me see.")
        check_arguments(output)
    assert complete


@pytest.mark.slow
def test_a_stream_adds_up(llm: nc.LLM) -> None:
    values = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 5, "temperature": 2.0, "n": 2}
    whole = llm.chat(ASK, **values)
    chunks = list(llm.stream_chat(ASK, **values))
    for output in whole.outputs:
        own = [chunk for chunk in chunks if chunk.index == output.index]
        streamed = nc.CompletionOutput.from_chunks(own)
        assert (streamed.text, streamed.finish_reason) == (output.text, output.finish_reason)
        assert without_ids(streamed) == without_ids(output)
        deltas = [delta for chunk in own for delta in chunk.tool_calls]
        starts = [delta for delta in deltas if delta.name is not None]
        assert [delta.index for delta in starts] == list(range(len(starts)))
        assert all(delta.arguments == "" and delta.id for delta in starts)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("choice", ["required", "wait", "auto"])
def test_an_output_cut_within_a_call_has_no_markup_in_its_text(llm: nc.LLM, choice: str) -> None:
    """Whatever ``max_tokens`` is: the arguments are as far as they came, and the chunks add up to the whole."""
    values: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": 5, "ignore_eos": True, "temperature": 1.2}
    given = llm.tokenizer.encode("Hm.\n<tool_call>", False) if choice == "auto" else []
    request, parser = llm.chat_request(ASK, max_tokens=160, **values)
    assert parser is not None
    whole = list(chat_models.run(llm, dataclasses.replace(request, output_ids=given)))
    before: tuple[nc.ToolCall, ...] = ()
    for count in range(1, len(whole)):
        _, parser = llm.chat_request(ASK, **values)
        assert parser is not None
        cut = [*whole[: count - 1], dataclasses.replace(whole[count - 1], finish_reason="length", stop_reason=None)]
        output = nc.CompletionOutput.from_chunks([parser.parse(chunk) for chunk in cut])
        assert output.finish_reason == "length"
        assert not any(markup in output.text for markup in ("<", '"name"', "tool_call"))
        assert given or not output.text
        calls = output.tool_calls
        for old, new in zip(before, calls, strict=False):
            assert new.name == old.name
            assert new.arguments_json.startswith(old.arguments_json)
            assert new.complete or not old.complete
        assert all(call.complete for call in calls[:-1])
        before = calls
    assert any(call.complete for call in before)


def test_a_stop_string_within_a_call_leaves_it_incomplete(llm: nc.LLM) -> None:
    found = llm.chat(ASK, tools=TOOLS, tool_choice="wait", stop=["days"], max_tokens=90, seed=1)
    (output,), (call,) = found.outputs, found.tool_calls
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "days", "")
    assert (call.name, call.complete) == ("wait", False)
    assert '{"days'.startswith(call.arguments_json.replace(" ", "").replace("\n", ""))


def test_a_conversation_continues_with_results(llm: nc.LLM) -> None:
    call = llm.chat(ASK, tools=TOOLS, tool_choice="wait", max_tokens=250, seed=3, max_reasoning_tokens=5).tool_calls[0]
    made = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [made]}
    messages = [*ASK, assistant, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    found = llm.chat(messages, tools=TOOLS, max_tokens=10)
    assert found.prompt is not None
    assert "Result of wait:\ndone" in found.prompt
    several = llm.chat([ASK, messages], tools=TOOLS, tool_choice="wait", max_tokens=10)
    assert len(several) == 2


@pytest.mark.slow
def test_a_schema_that_cannot_be_enforced(llm: nc.LLM) -> None:
    loose = {"type": "function", "function": {"name": "loose", "parameters": UNENFORCEABLE}}
    strict = {"type": "function", "function": {**loose["function"], "strict": True}}
    with pytest.raises(nc.ParameterError, match=r"strict tool loose: json_schema.*pattern") as caught:
        llm.chat(ASK, tools=[strict, wait], max_tokens=5)
    assert caught.value.field == "tools"
    found = llm.chat(ASK, tools=[loose, wait], tool_choice="loose", max_tokens=300, seed=1, temperature=0.1)
    for call in found.tool_calls:
        assert not call.complete or isinstance(call.arguments, dict)
    check(llm.chat(ASK, tools=[loose, wait], tool_choice="wait", max_tokens=250, seed=1), ("wait",))


@pytest.mark.slow
def test_a_keyword_that_cannot_be_enforced_leaves_the_others_enforced(llm: nc.LLM) -> None:
    """And the output says so."""
    city = {"enum": ["Paris", "Rome"]}
    parameters = {
        "type": "object",
        "properties": {"city": city, "note": {"type": "string", "pattern": "^(?=a).*$", "maxLength": 3}},
        "required": ["city"],
        "additionalProperties": False,
    }
    loose = {"type": "function", "function": {"name": "loose", "parameters": parameters}}
    complete = 0
    for choice in ("loose", "required"):
        values = {"tools": [loose, wait], "tool_choice": choice, "max_tokens": 200, "n": 4, "seed": 1}
        for output in llm.chat(ASK, **values).outputs:
            assert output.validation is not None
            assert any("pattern" in text and "/properties/note" in text for text in output.validation.ignored)
            for call in output.tool_calls:
                if call.complete and call.name == "loose":
                    complete += 1
                    assert call.arguments["city"] in ("Paris", "Rome")
                    assert {*call.arguments} <= {"city", "note"}
    assert complete
    either = {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "string", "maxLength": 2}]}
    strict_parameters = closed(n=either)
    strict = {"type": "function", "function": {"name": "strict", "parameters": strict_parameters, "strict": True}}
    for output in llm.chat(ASK, tools=[loose, strict], tool_choice="strict", max_tokens=90, n=4, seed=1).outputs:
        for call in output.tool_calls:  # relaxing the other tool has not relaxed this one
            if call.complete:
                jsonschema.validate(call.arguments, strict_parameters)
    given = {"json_schema": {"pattern": "^(?=a)"}}
    with pytest.raises(nc.ParameterError, match="cannot enforce"):  # what was given is not relaxed
        llm.chat(ASK, tools=[loose], structured_outputs=given)


def test_structured_output_or_calls(llm: nc.LLM) -> None:
    """With optional calls, an output is either calls or an answer with the given structure."""
    for seed in range(3):
        values = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 200, "seed": seed, "temperature": 2.0}
        for output in llm.chat(ASK, tools=TOOLS, n=4, **values).outputs:
            assert output.tool_calls or output.finish_reason == "length" or output.text in ("yes", "no")
    with pytest.raises(nc.ParameterError, match="cannot be combined with required tool calls") as caught:
        llm.chat(ASK, tools=TOOLS, tool_choice="required", structured_outputs={"regex": "a"})
    assert caught.value.field == "structured_outputs"


def test_both_forms_of_structural_tags_can_follow_a_reasoning_section(llm: nc.LLM) -> None:
    chat_format = ChatFormat(llm.tokenizer, TOOL_FORMATS["hermes"], ReasoningFormat("<think>", "</think>"))
    schema = closed(a={"enum": [1]})
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    older = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}}
    chat, found = RenderedChat("<think>", chat_format), []
    for form in (older, newer):
        given = nc.StructuredOutputs(structural_tag={"type": "structural_tag", **form})
        params = nc.SamplingParams(structured_outputs=given, max_tokens=40, seed=1)
        request = chat_request(chat, llm.encode("Hi"), params, llm.new_engine().prepare)
        ids = llm.tokenizer.encode("hm</think>Well <a>", False)
        chunks = chat_models.run(llm, dataclasses.replace(request, output_ids=ids))
        found.append("".join(chunk.text for chunk in chunks))
    assert found[0] == found[1]
    assert found[0].startswith("hm</think>Well <a>{")


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_constraint_of_every_format_compiles_and_is_parsed(llm: nc.LLM, name: str) -> None:
    """Outputs under the constraint of a format are calls for its parser."""
    reasoning = REASONING["gpt_oss"] if name == "openai" else None
    chat_format = ChatFormat(llm.tokenizer, TOOL_FORMATS[name], reasoning)
    complete = 0
    for parallel in (False, True):
        use = ToolUse.read(TOOLS, "required", parallel)
        spec = ChatConstraint(use, None, chat_format.tool_format, None, False).spec()
        params = nc.SamplingParams(structured_outputs=spec, max_tokens=400, n=4, seed=1)
        parser = RenderedChat("", chat_format, use).chunk_parser()
        for output in outputs_of(llm, nc.Request(llm.encode("Weather"), params), parser):
            if output.finish_reason == "length":
                continue
            complete += 1
            assert (output.finish_reason, output.text) == ("tool_calls", "")
            assert len(output.tool_calls) == 1 or parallel
            check_arguments(output)
    assert complete


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
@pytest.mark.parametrize("opened", [True, False])
def test_required_calls_after_reasoning(
    llm: nc.LLM, name: str, opened: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = chat_models.OPENED if opened else chat_models.OPTIONAL
    path = tmp_path_factory.mktemp("model")
    model = chat_models.model(path, template, tool_call_parser=name)
    values = {"max_tokens": 400, "max_reasoning_tokens": 10, "seed": 1}
    found = model.chat(ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **values)
    (output,) = found.outputs
    assert output.text == ""
    assert output.finish_reason == "tool_calls"
    assert output.reasoning_tokens <= 10
    assert output.reasoning or not opened
    (call,) = output.tool_calls
    jsonschema.validate(json.loads(call.arguments_json), SCHEMAS[call.name])


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", "<|assistant|>"], ids=["optional", "opened"])
def test_reasoning_between_special_tokens_comes_before_optional_calls(llm: nc.LLM, prompt: str) -> None:
    """Free text of a grammar has no special tokens, so the section is a part of the grammar."""
    begin, end = (llm.tokenizer.backend.token_to_id(marker) for marker in ("<|assistant|>", "<|system|>"))
    chat_format = ChatFormat(llm.tokenizer, TOOL_FORMATS["hermes"], ReasoningFormat("<|assistant|>", "<|system|>"))
    chat = RenderedChat(prompt, chat_format, ToolUse.read(TOOLS, "auto", parallel_tool_calls=False))
    params = nc.SamplingParams(max_tokens=250, seed=1, temperature=1.5, n=4)
    made = chat_request(chat, llm.encode("Weather"), params, llm.new_engine().prepare)
    assert made.params.structured_outputs is not None
    text = llm.tokenizer.encode
    section = [*([] if prompt else [begin]), *text("hm", False), end]
    complete = 0
    for before in (section, [*section, *text("Well.\n", False)], *([] if prompt else [text("Well.\n", False)])):
        request = dataclasses.replace(made, output_ids=[*before, *text("<tool_call>", False)])
        for output in outputs_of(llm, request, chat.chunk_parser()):
            assert (output.reasoning or "") == ("hm" if end in before else "")
            complete += output.finish_reason == "tool_calls"
            check_arguments(output)
    assert complete


def test_a_template_with_unknown_tool_calls_needs_a_parser(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{% if tools %}<unknown>{% endif %}{{ messages[-1].content }}"
    model = chat_models.model(tmp_path_factory.mktemp("model"), template)
    assert model.chat(ASK, max_tokens=3).text
    with pytest.raises(nc.ParameterError, match="set tool_call_parser") as caught:
        model.chat(ASK, tools=TOOLS, max_tokens=3)
    assert caught.value.field == "tools"
    assert nc.LLM(model.folder, tool_call_parser="hermes").chat(ASK, tools=TOOLS, max_tokens=3)


PARTS: list[Any] = [
    *({"type": "string"}, {"$ref": "#/$defs/x"}, {"$ref": "#"}, {"enum": ["\ud800"]}, {"const": "\0"}),
    *({"pattern": "("}, {"pattern": "a{1,999999}"}, {"type": "nope"}, {"anyOf": []}, {"not": {}}),
    *({"type": "object", "additionalProperties": {"$ref": "#"}}, {"minItems": 10**9}, True, False, 5, None, "x"),
]
NAMES = ["a", "b", "</tool_call>", "\ud800", '"', "name"]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    def part() -> Any:
        return random_schema(rng, depth - 1) if depth and rng.random() < 0.4 else rng.choice(PARTS)

    choices: dict[str, Any] = {
        "properties": {rng.choice(NAMES): part() for _ in range(3)},
        "required": rng.choice([["a"], ["z"], 5, []]),
        "additionalProperties": rng.choice([True, False, {"type": "string"}]),
        "$defs": {"x": part()},
        "type": rng.choice(["object", "object", ["object", "null"], "array"]),
        "description": rng.choice(["d", "\ud800", 5]),
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    return {name: choices[name] for name in rng.sample(sorted(choices), rng.randrange(4))}


def test_any_schema_is_enforced_relaxed_or_an_error(llm: nc.LLM) -> None:
    rng = random.Random(0)
    for _ in range(tiers.count(30, 300)):
        functions = [
            {"name": f"f{index}", "parameters": random_schema(rng), "strict": rng.random() < 0.3} for index in "ab"
        ]
        tools = [{"type": "function", "function": function} for function in functions]
        error = None
        try:
            request, _ = llm.chat_request(ASK, tools=tools, tool_choice=rng.choice(["auto", "required"]))
        except nc.ParameterError as caught:
            error = caught
        if error is None:
            assert request.params.structured_outputs is not None
        else:
            assert error.field in ("tools", "prompt")
            assert len(str(error)) < 2000
