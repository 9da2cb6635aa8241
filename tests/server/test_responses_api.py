"""The Responses API: requests as chat completions, responses as items and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served_apps import ask, bundled_app, events

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.endpoints import CHAT
from nucleate.server.openai.requests import read_body
from nucleate.server.responses_api import INCLUDABLE, RESPONSES

URL = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
HELLO = [{"role": "user", "content": "hi"}]
CALLED = {"id": "c1", "function": {"name": "f", "arguments": {"a": True}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": true}'}


def translated(**fields: Any) -> dict[str, Any]:
    return dict(RESPONSES.translate({"input": "hi", **fields}).body)


MESSAGES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "text": ("hi", HELLO),
    "a message": ([{"role": "user", "content": "hi"}], HELLO),
    "parts": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("h", "i")]}],
        HELLO,
    ),
    "an output that is sent back": (
        [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}],
            },
            {**CALL, "id": "fc", "status": "completed"},
            {**CALL, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        ],
        [
            *HELLO,
            {
                "role": "assistant",
                "content": "t",
                "reasoning_content": "hm",
                "tool_calls": [CALLED, CALLED | {"id": "c2"}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
        ],
    ),
    "calls without a text": (
        [*HELLO, CALL],
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}],
    ),
    "turns of the assistant": (
        [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        ],
        [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "", "reasoning_content": "s"},
        ],
    ),
    "encrypted reasoning": ([*HELLO, {"type": "reasoning", "summary": [], "encrypted_content": "x"}], HELLO),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": "no"}],
    ),
    "roles": (
        [{"role": role, "content": "x"} for role in ("system", "developer", "user")],
        [{"role": role, "content": "x"} for role in ("system", "developer", "user")],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_input_items_become_messages(name: str) -> None:
    given, expected = MESSAGES[name]
    body = translated(input=given)
    assert body["messages"] == expected
    read_body(CHAT, body, nc.SamplingParams())  # accepts them
    assert translated(input=given, instructions="be")["messages"] == [{"role": "system", "content": "be"}, *expected]


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
    *(
        (fields, fields)
        for fields in [
            {"temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "seed": 3},
            {"parallel_tool_calls": False},
            {"stream": True, "stream_options": {"include_obfuscation": False}, "model": "m"},
            {"chat_template_kwargs": {"x": 1}, "structured_outputs": {"regex": "a"}},
        ]
    ),
    (
        {"tools": [TOOL], "tool_choice": "required"},
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
        },
    ),
    ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    (
        {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
        {"response_format": {"type": "json_object"}, "verbosity": "medium"},
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}},
    ),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"reasoning": {"effort": None}}, {}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"top_logprobs": 0, "include": [*INCLUDABLE[1:]]}, {}),
    ({"store": True, "metadata": {"a": "b"}, "truncation": "auto", "user": "u", "background": False}, {}),
    ({"previous_response_id": None, "conversation": None, "max_tool_calls": 3, "service_tier": "auto"}, {}),
]


@pytest.mark.parametrize(("given", "expected"), FIELDS, ids=lambda value: str([*value])[:40])
def test_fields_become_those_of_chat_completions(given: dict[str, Any], expected: dict[str, Any]) -> None:
    body = {name: value for name, value in translated(**given).items() if value is not None}
    assert body == {"messages": HELLO, **expected}
    read_body(CHAT, {**body, "tools": body.get("tools", [])}, nc.SamplingParams())


REJECTED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOL], "tool_choice": "g"}, "tool_choice", "tool_choice names 'g'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type must be one of"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "text.format.schema must be"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be one of"),
    *(
        (given, next(iter(given)), message)
        for given, message in [
            ({"input": None}, "input is missing"),
            ({"input": []}, "input must be a string or a list"),
            ({"input": 7}, "input must be"),
            ({"input": [7]}, r"input\[0\] must be an object"),
            ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\].role must be one of"),
            ({"input": [{"role": "user"}]}, r"input\[0\].content must be"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                r"input\[0\].content\[0\] must be a part",
            ),
            ({"input": [*HELLO, {"type": "item_reference", "id": "x"}]}, r"input\[1\]: this server stores no items"),
            ({"input": [{"type": "web_search_call"}]}, r"input\[0\].type 'web_search_call' is not supported"),
            ({"input": [{"type": ["x"]}]}, r"input\[0\].type"),
            ({"input": [*HELLO, {**CALL, "arguments": "{"}]}, r"input\[1\].arguments must be JSON"),
            ({"input": [*HELLO, {**CALL, "arguments": "[]"}]}, r"input\[1\].arguments must be a JSON object"),
            ({"input": [*HELLO, {**CALL, "call_id": ""}]}, r"input\[1\].call_id must be a non-empty string"),
            ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, r"input\[0\].summary\[0\] must be"),
            ({"input": [{"type": "reasoning", "summary": []}]}, "a message is missing"),
            ({"instructions": 7}, "instructions must be a string"),
            ({"previous_response_id": "r"}, "stores no responses"),
            ({"background": True}, "background is not supported"),
            ({"conversation": "c"}, "conversation is not supported"),
            ({"tools": [{"type": "web_search"}]}, r"tools\[0\] must be a tool of type function, got 'web_search'"),
            ({"tools": 7}, "tools must be a list"),
            ({"tools": [{**TOOL, "name": "a b"}]}, r"tools\[0\].name must be 1 to 128"),
            ({"tools": [{**TOOL, "frob": 1}]}, r"unknown field of tools\[0\] 'frob'"),
            ({"text": {"verbosity": "loud"}}, "verbosity must be one of"),
            ({"text": 7}, "text must be an object"),
            ({"reasoning": {"frob": 1}}, "unknown field of reasoning"),
            ({"include": ["x"]}, r"include\[0\] must be one of"),
            ({"top_logprobs": 2.5}, "top_logprobs must be"),
            ({"metadata": {"a": 1}}, "metadata must be"),
            ({"truncation": "x"}, "truncation must be one of"),
            ({"max_output_tokens": 0}, "max_output_tokens must be"),
            ({"max_tokens": 5}, "unknown field 'max_tokens'"),
            ({"n": 2}, "unknown field 'n'"),
            ({"messages": HELLO}, "unknown field 'messages'"),
            ({"store": 1}, "store must be true or false"),
        ]
    ),
]


@pytest.mark.parametrize(("given", "field", "message"), REJECTED, ids=lambda value: str(value)[:50])
def test_errors_name_the_field_of_the_request(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught, RESPONSES.own_names():
        read_body(CHAT, RESPONSES.translate({"input": "hi", **given}).body, nc.SamplingParams())
    assert caught.value.field == field


def check_order(found: list[dict[str, Any]]) -> None:
    """Check that the events of a stream follow each other as OpenAI's do."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete")
    items = found[-1]["response"]["output"]
    for index in sorted({event["output_index"] for event in found[2:-1]}):
        own = [event for event in found[2:-1] if event["output_index"] == index]
        kinds = [event["type"].removeprefix("response.") for event in own]
        added, done = own[0]["item"], own[-1]["item"]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        assert added["status"] == "in_progress"
        assert {event["item_id"] for event in own[1:-1]} == {added["id"]} == {done["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if done["type"] == "function_call":
            assert kinds[-2] == "function_call_arguments.done"
            assert own[-2]["arguments"] == done["arguments"] == text
            assert added["arguments"] == ""
        else:
            part = "content" if "content" in done else "summary"
            kind = "content_part" if part == "content" else "reasoning_summary_part"
            assert (kinds[1], kinds[-2]) == (f"{kind}.added", f"{kind}.done")
            assert added[part] == []
            assert own[-3]["text"] == own[-2]["part"]["text"] == done[part][0]["text"] == text
        assert done in items


BODIES: dict[str, dict[str, Any]] = {
    "text": {"max_output_tokens": 12, "seed": 3, "top_logprobs": 2},
    "to its end": {"temperature": 0, "max_output_tokens": 200, "seed": 3},
    "a call": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "seed": 3, "max_output_tokens": 200},
    "calls": {
        "tools": [TOOL],
        "tool_choice": "required",
        "seed": 3,
        "max_output_tokens": 90,
        "max_reasoning_tokens": 3,
    },
    "json": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "seed": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
@bundled_app()
async def test_streams_and_whole_responses_are_the_same(app: Any, name: str) -> None:
    body = {"input": "Tell me a story", "metadata": {"k": "v"}, "instructions": "Be brief", **BODIES[name]}
    whole, stream = await ask(app, URL, body), await ask(app, URL, {**body, "stream": True})
    assert (whole.status, stream.status) == (200, 200), whole.data
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events(stream)
    check_order(found)
    assert [without_ids(found[-1]["response"])] == [without_ids(whole.json)]
    made = whole.json
    assert (made["object"], made["store"], made["metadata"]) == ("response", False, {"k": "v"})
    assert made["instructions"] == "Be brief"
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + made["usage"]["output_tokens"]
    if name == "text":
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        [part] = made["output"][0]["content"]
        assert "".join(step["token"] for step in part["logprobs"]) == part["text"]
        assert all(len(step["top_logprobs"]) == 2 for step in part["logprobs"])
    if name == "a call":
        [call] = made["output"]
        assert made["status"] == call["status"] == "completed"
        assert json.loads(call["arguments"]).keys() == {"a"}
        assert call["call_id"] not in ("", call["id"])
    if name == "json":
        assert json.loads(made["output"][0]["content"][0]["text"]).keys() == {"a"}


def without_ids(response: dict[str, Any]) -> Any:
    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            changing = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
            return {name: cleaned(item) for name, item in value.items() if name not in changing}
        if isinstance(value, float):
            return round(value, 4)  # the second prompt is cached: other rows, other last digits
        return [*map(cleaned, value)] if isinstance(value, list) else value

    return cleaned(response)


@bundled_app(reasoning_parser="qwen3")
async def test_reasoning_is_an_item(app: Any) -> None:
    body = {
        "input": [{"role": "user", "content": "Story"}, {"role": "assistant", "content": "<think>"}],
        "continue_final_message": True,
        "max_reasoning_tokens": 4,
        "ignore_eos": True,
        "max_output_tokens": 12,
        "seed": 3,
    }
    whole, stream = (await ask(app, URL, body)).json, await ask(app, URL, {**body, "stream": True})
    check_order(events(stream))
    assert without_ids(events(stream)[-1]["response"]) == without_ids(whole)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][0]["content"][0]["type"] == "reasoning_text"
    assert whole["output"][0]["summary"] == []
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] >= 4
    asked = {**body, "reasoning": {"summary": "auto"}}
    summarized, stream = (await ask(app, URL, asked)).json, await ask(app, URL, {**asked, "stream": True})
    found = events(stream)
    check_order(found)
    assert without_ids(found[-1]["response"]) == without_ids(summarized)
    text = whole["output"][0]["content"][0]["text"]
    assert summarized["output"][0]["summary"] == [{"type": "summary_text", "text": text}]
    assert "content" not in summarized["output"][0]
    assert not [event for event in found if event["type"].startswith("response.reasoning_text")]
    made = [event for event in found if event["type"].startswith("response.reasoning_summary")]
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in made]
    assert (kinds[0], kinds[-2:]) == ("part.added", ["text.done", "part.done"])
    assert {event["summary_index"] for event in made} == {0}
