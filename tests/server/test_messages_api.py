"""Anthropic's Messages API: requests as chat completions, responses as content blocks and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served_apps import JSON, ask, bundled_app, events

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.server.limits import ServerLimits
from nucleate.server.messages_api import IGNORED, MESSAGES
from nucleate.server.openai.endpoints import CHAT
from nucleate.server.openai.requests import read_body

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
OPENAI_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "hi"}]
KEPT = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": True}}
CALL = {"id": "t1", "function": {"name": "f", "arguments": {"a": True}}}


def translated(**fields: Any) -> dict[str, Any]:
    return dict(MESSAGES.translate({"messages": HELLO, "max_tokens": 5, **fields}).body)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, **KEPT}


MESSAGES_TABLE: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "text": (HELLO, HELLO),
    "blocks": ([{"role": "user", "content": [text("a"), text("b")]}], [{"role": "user", "content": "a\nb"}]),
    "no blocks": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "a system message": ([{"role": "system", "content": [text("s")]}], [{"role": "system", "content": "s"}]),
    "tools": (
        [
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    text("t"),
                    {**USE, **KEPT},
                    {**USE, "id": "t2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one", **KEPT},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [text("no")], "is_error": True},
                    text("go"),
                    text("on"),
                ],
            },
        ],
        [
            *HELLO,
            {
                "role": "assistant",
                "content": "t",
                "reasoning_content": "hm",
                "tool_calls": [CALL, {**CALL, "id": "t2"}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "one"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
            {"role": "user", "content": "go\non"},
        ],
    ),
    "a call alone": (
        [
            *HELLO,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
        [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "t1", "content": ""},
        ],
    ),
}


@pytest.mark.parametrize("name", MESSAGES_TABLE)
def test_content_blocks_become_messages(name: str) -> None:
    given, expected = MESSAGES_TABLE[name]
    body = translated(messages=given)
    assert body["messages"] == expected
    read_body(CHAT, body, nc.SamplingParams())  # accepts them
    for system in ("be", [text("be")]):
        assert translated(messages=given, system=system)["messages"] == [{"role": "system", "content": "be"}, *expected]


def test_a_final_message_of_the_assistant_is_continued() -> None:
    assert "continue_final_message" not in translated()
    assert translated(messages=[*HELLO, {"role": "assistant", "content": "I"}])["continue_final_message"] is True


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop_sequences": ["x"], "top_k": 3, "min_p": 0.1}, {"stop": ["x"], "top_k": 3, "min_p": 0.1}),
    ({"tools": [TOOL]}, {"tools": [OPENAI_TOOL]}),
    ({"tools": [{**TOOL, "type": "custom", **KEPT}]}, {"tools": [OPENAI_TOOL]}),
    *(
        (
            {"tools": [TOOL], "tool_choice": given},
            {"tools": [OPENAI_TOOL], "tool_choice": made, "parallel_tool_calls": many},
        )
        for given, made, many in [
            ({"type": "auto"}, "auto", True),
            ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
            ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
            ({"type": "none"}, "none", True),
        ]
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"chat_template_kwargs": ON, "max_reasoning_tokens": 9}),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": OFF}),
    ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {}}),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"x": 1}}, {"chat_template_kwargs": {**OFF, "x": 1}}),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}},
    ),
    ({"stream": True, "model": "m", **{name: {} for name in sorted(IGNORED)}}, {"stream": True, "model": "m"}),
]


@pytest.mark.parametrize(("given", "expected"), FIELDS, ids=lambda value: str([*value])[:40])
def test_fields_become_those_of_chat_completions(given: dict[str, Any], expected: dict[str, Any]) -> None:
    body = translated(**given)
    assert body == {"messages": HELLO, "max_tokens": 5, **expected}
    read_body(CHAT, body, nc.SamplingParams())


def user(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*content]}]}


REJECTED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"thinking": {"type": "enabled", "budget_tokens": -3}},
        "thinking.budget_tokens",
        "thinking.budget_tokens must be",
    ),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format",
        "output_config.format.schema must",
    ),
    ({"output_config": {"effort": "x"}}, "output_config.effort", "output_config.effort must be"),
    *(
        (given, next(iter(given)), message)
        for given, message in [
            *(({"messages": messages}, "messages must be a list") for messages in (None, [])),
            ({"messages": [7]}, r"messages\[0\] must be an object with content and a role"),
            ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\] must be"),
            ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a list"),
            (user(7), r"messages\[0\].content\[0\] must be a content block"),
            (user({"type": "image"}), r"content\[0\].type 'image' is not supported"),
            (user(USE), "'tool_use' is not supported in a message of the role user"),
            (user({"type": "text"}), r"content\[0\].text must be a string"),
            (user({"type": ["x"]}), "must be a content block"),
            (user({**USE, "input": "x"}, role="assistant"), r"content\[0\].input must be an object"),
            (user({**USE, "id": ""}, role="assistant"), r"content\[0\].id must be a non-empty"),
            (user({"type": "tool_result"}), r"content\[0\].tool_use_id must be"),
            ({"system": 7}, "system must be a string or a list of parts"),
            ({"system": [{"type": "image"}]}, r"system\[0\] must be a block of type text"),
            ({"max_tokens": None}, "max_tokens is missing"),
            ({"max_tokens": 0}, "max_tokens must be an integer >= 1"),
            ({"stop_sequences": "x"}, "stop_sequences must be a list"),
            ({"stop_sequences": [1]}, "stop_sequences must be"),
            *(
                ({name: value}, f"unknown field '{name}'")
                for name, value in {"stop": ["x"], "n": 2, "logprobs": 1}.items()
            ),
            ({"tools": 7}, "tools must be a list"),
            (
                {"tools": [{"type": "bash_20250124", "name": "bash"}]},
                r"tools\[0\].type must be custom, got 'bash_20250124'",
            ),
            ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema is missing"),
            ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, r"tools\[0\].input_schema must be"),
            ({"tools": [{**TOOL, "name": "a b"}]}, r"tools\[0\].name must be 1 to 128"),
            ({"tool_choice": {"type": "any"}}, "tool_choice 'any' needs tools"),
            ({"tool_choice": {"type": "x"}}, "tool_choice.type must be one of"),
            ({"tool_choice": "auto"}, "tool_choice must be an object"),
            ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be"),
            ({"thinking": {"type": "enabled"}}, "needs budget_tokens"),
            ({"thinking": {"type": "disabled", "budget_tokens": 3}}, "cannot have budget_tokens"),
            *(({"thinking": value}, "thinking.type must be one of") for value in ({"type": "x"}, {"budget_tokens": 3})),
            ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be json_schema"),
            ({"temperature": -1}, "temperature must be"),
            ({"chat_template_kwargs": 7, "thinking": {"type": "adaptive"}}, "must be an object"),
        ]
    ),
]


@pytest.mark.parametrize(("given", "field", "message"), REJECTED, ids=lambda value: str(value)[:50])
def test_errors_name_the_field_of_the_request(given: dict[str, Any], field: str, message: str) -> None:
    body = {"messages": HELLO, "max_tokens": 5, **given}
    with pytest.raises(ParameterError, match=message) as caught, MESSAGES.own_names():
        read_body(CHAT, MESSAGES.translate(body).body, nc.SamplingParams())
    assert caught.value.field == field


def accumulated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream add up to, and a check of their order."""
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "message_stop"
    made, partial, index = found[0]["message"], "", -1
    assert made["content"] == []
    is_open = False
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, partial, index = True, "", index + 1
            made["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            if made["content"][-1]["type"] == "tool_use":
                made["content"][-1]["input"] = json.loads(partial or "{}")
        else:
            assert event["type"] == "content_block_delta"
            assert is_open
            kind, delta = event["delta"].pop("type"), event["delta"]
            [(name, part)] = delta.items()
            assert (
                kind == {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}[name]
            )
            if name == "partial_json":
                partial += part
            else:
                made["content"][-1][name] += part
        assert event["index"] == index
    assert not is_open
    assert found[-2]["type"] == "message_delta"
    return {**made, **found[-2]["delta"], "usage": found[-2]["usage"]}


BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"max_tokens": 10}, "max_tokens"),
    "to its end": ({"max_tokens": 300, "temperature": 0}, "end_turn"),
    "until a stop sequence": ({"max_tokens": 300, "temperature": 0, "stop_sequences": ["."]}, "stop_sequence"),
    "a call": ({"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_use"),
    "any call": (
        {"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "tool_use",
    ),
    "json": ({"max_tokens": 200, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "end_turn"),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", BODIES)
@bundled_app()
async def test_streams_and_whole_messages_are_the_same(app: Any, name: str) -> None:
    more, reason = BODIES[name]
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "seed": 3, **more}
    whole, stream = await ask(app, URL, body), await ask(app, URL, {**body, "stream": True})
    assert (whole.status, stream.status) == (200, 200), whole.data
    made, streamed = whole.json, accumulated(events(stream))
    for one in (made, streamed):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            block.pop("id", None)
        usage = one["usage"]  # the second answer finds the prompt of the first in the cache
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert made == streamed
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert made["stop_reason"] == reason
    assert (made["stop_sequence"] is not None) == (reason == "stop_sequence")
    assert made["usage"]["input_tokens"] > 0 < made["usage"]["output_tokens"]
    if reason == "tool_use":
        [block] = made["content"]
        assert (block["type"], block["name"], [*block["input"]]) == ("tool_use", "f", ["a"])
    if name == "json":
        assert [*json.loads(made["content"][0]["text"])] == ["a"]


@pytest.mark.slow
@bundled_app(reasoning_parser="qwen3")
async def test_thinking_is_a_block_and_can_be_left_out(app: Any) -> None:
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "<think>"}],
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "f"},
        "max_tokens": 200,
        "seed": 3,
    }
    whole, stream = (await ask(app, URL, body)).json, await ask(app, URL, {**body, "stream": True})
    assert [block["type"] for block in whole["content"]] == ["thinking", "tool_use"]
    assert whole["content"][0]["thinking"]
    streamed = accumulated(events(stream))
    assert streamed["content"][0] == whole["content"][0]
    assert streamed["content"][1]["input"] == whole["content"][1]["input"]
    body["thinking"]["display"] = "omitted"
    hidden = (await ask(app, URL, body)).json
    assert hidden["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert accumulated(events(await ask(app, URL, {**body, "stream": True})))["content"][0] == hidden["content"][0]


@bundled_app()
async def test_tokens_are_counted_as_in_a_message(app: Any) -> None:
    prompt = {"messages": HELLO, "system": "be", "tools": [TOOL], "model": "tiny", "tool_choice": {"type": "auto"}}
    counted = await ask(app, COUNT, prompt)
    made = await ask(app, URL, {**prompt, "max_tokens": 1})
    usage = made.json["usage"]
    assert counted.json == {"input_tokens": usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)}
    for wrong in ({"messages": 7}, {**prompt, "max_tokens": 1}, {**prompt, "model": "x"}, {**prompt, "tools": [7]}):
        assert (await ask(app, COUNT, wrong)).json["type"] == "error"


@bundled_app(keys=("sk-1",), limits=ServerLimits(max_request_body_bytes=1024))
async def test_errors_have_anthropics_format(app: Any, service: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 5}
    for path, sent, status, kind in (
        (URL, {}, 401, "authentication_error"),
        (URL, {**body, "max_tokens": 0}, 400, "invalid_request_error"),
        (URL, b"{", 400, "invalid_request_error"),
        (URL, b"\xff", 400, "invalid_request_error"),
        (URL, {**body, "model": "other"}, 404, "not_found_error"),
        (f"{URL}/batches", body, 404, "not_found_error"),
        (URL, b" " * 2000, 413, "request_too_large"),
    ):
        headers = (JSON,) if status == 401 else (JSON, (b"x-api-key", b"sk-1"))
        call = await ask(app, path, sent, headers=headers)
        assert (call.status, call.json["type"], call.json["error"]["type"]) == (status, "error", kind)
        assert call.json["error"].keys() == {"type", "message"}
        assert status == 401 or call.json["request_id"] == call.headers["x-request-id"]
    service.drain()
    call = await ask(app, URL, body, headers=(JSON, (b"x-api-key", b"sk-1")))
    assert (call.status, call.json["error"]["type"]) == (503, "overloaded_error")


@bundled_app()
async def test_a_thread_is_an_error_after_which_the_sdk_sends_whole_conversations(app: Any) -> None:
    call = await ask(app, URL, {"messages": HELLO, "max_tokens": 5, "thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (call.status, call.json["error"]["details"]) == (400, details)
    assert (await ask(app, URL, {"messages": HELLO, "max_tokens": 5, "thread": None})).status == 200


@bundled_app(keys=("sk-1",))
async def test_the_key_may_be_in_either_header(app: Any) -> None:
    key, bearer = (b"x-api-key", b"sk-1"), (b"authorization", b"Bearer sk-1")
    wrong, wrong_bearer = (b"x-api-key", b"sk-2"), (b"authorization", b"Bearer sk-2")
    body = {"messages": HELLO, "max_tokens": 1}
    for headers, status in (
        ((key,), 200),
        ((bearer,), 200),
        ((wrong,), 401),
        ((key, key), 401),
        ((bearer, bearer), 401),
        ((key, bearer), 200),
        ((key, wrong_bearer), 200),
        ((wrong, bearer), 200),
        ((wrong, wrong_bearer), 401),
        ((key, (b"authorization", b"Basic sk-2")), 200),
        ((wrong, (b"authorization", b"sk-1")), 401),
        ((key, wrong, wrong_bearer), 401),
    ):
        assert (await ask(app, URL, body, headers=(JSON, *headers))).status == status
    chat = {"messages": HELLO, "max_tokens": 1}
    assert (await ask(app, "/v1/chat/completions", chat, headers=(JSON, key))).status == 401
    assert (await ask(app, "/v1/messagesx", chat, headers=(JSON, bearer))).status == 404
