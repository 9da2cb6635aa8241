"""Ollama's API: requests as chat completions, responses as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import ask, begin, serve, until

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.server.ollama_api import CHAT_API, GENERATE_API, IGNORED_OPTIONS
from nucleate.server.openai.endpoints import CHAT, LONG_NAMES_CHAT, TEXT
from nucleate.server.openai.requests import read_body

URL, GENERATE = "/api/chat", "/api/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "hi"}]
CALL = {"function": {"name": "f", "arguments": {"a": True}}}


def translated(**fields: Any) -> dict[str, Any]:
    made = CHAT_API.translate({"messages": HELLO, "stream": False, **fields}).body
    return {name: value for name, value in made.items() if value is not None}


def test_messages_become_those_of_chat_completions() -> None:
    given = [
        {"role": "system", "content": "be"},
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL, {"function": {"name": "g"}}, CALL]},
        {"role": "tool", "content": "g1", "tool_name": "g"},
        {"role": "tool", "content": "f1", "tool_name": "f"},
        {"role": "tool", "content": "f2"},
        {"role": "tool", "content": "late", "tool_name": "f"},
        {"role": "tool", "content": "known", "tool_call_id": "x"},
    ]
    body = translated(messages=given)
    f, g = {"name": "f", "arguments": {"a": True}}, {"name": "g", "arguments": {}}
    ids = [f"call_2_{number}" for number in range(3)]
    calls = [{"id": ids[0], "function": f}, {"id": ids[1], "function": g}, {"id": ids[2], "function": f}]
    assert body["messages"] == [
        *given[:2],
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "g1", "name": "g", "tool_call_id": ids[1]},
        {"role": "tool", "content": "f1", "name": "f", "tool_call_id": ids[0]},
        {"role": "tool", "content": "f2", "tool_call_id": ids[2]},
        {"role": "tool", "content": "late", "name": "f"},
        {"role": "tool", "content": "known", "tool_call_id": "x"},
    ]
    read_body(CHAT, body, nc.SamplingParams())


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"model": "m:latest"}, {"model": "m"}),
    (
        {"options": {"num_predict": 5, "repeat_penalty": 1.1, "repeat_last_n": -1}},
        {"max_tokens": 5, "repetition_penalty": 1.1, "penalty_last_n": -1},
    ),
    ({"options": {"num_predict": -1, "seed": -1}}, {}),
    (
        {"options": {"num_predict": -2, "seed": 7, "stop": ["x"], "min_p": 0.1, "top_k": 3}},
        {"seed": 7, "stop": ["x"], "min_p": 0.1, "top_k": 3},
    ),
    ({"options": {**dict.fromkeys(sorted(IGNORED_OPTIONS), 1), "tfs_z": 1.0, "penalize_newline": True}}, {}),
    ({"options": {"mirostat": 0, "mirostat_tau": 3}}, {}),
    ({"options": {"mirostat": 2}}, {"mirostat_tau": 5.0}),
    ({"options": {"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2}}, {"mirostat_tau": 3, "mirostat_eta": 0.2}),
    ({"options": {"mirostat": 1, "mirostat_eta": 0.2}}, {"mirostat_v1_tau": 5.0, "mirostat_v1_eta": 0.2}),
    ({"options": {"dry_multiplier": 0.8, "xtc_probability": 0.1}}, {"dry_multiplier": 0.8, "xtc_probability": 0.1}),
    ({"format": ""}, {}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    (
        {"format": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}},
    ),
    ({"think": True}, {"chat_template_kwargs": ON}),
    ({"think": False}, {"chat_template_kwargs": OFF}),
    ({"think": "low"}, {"reasoning_effort": "low"}),
    ({"tools": [TOOL], "keep_alive": "5m"}, {"tools": [TOOL]}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
]


@pytest.mark.parametrize(("given", "expected"), FIELDS, ids=lambda value: str(value)[:40])
def test_fields_become_those_of_chat_completions(given: dict[str, Any], expected: dict[str, Any]) -> None:
    body = translated(**given)
    assert body == {"messages": HELLO, "stream": False, **expected}
    read_body(CHAT, body, nc.SamplingParams())


def test_streaming_is_the_default() -> None:
    assert CHAT_API.translate({"messages": HELLO}).body["stream"] is True
    assert GENERATE_API.translate({"prompt": "x"}).body["stream"] is True


def test_a_final_message_of_the_assistant_is_continued() -> None:
    assert "continue_final_message" not in translated()
    assert translated(messages=[*HELLO, {"role": "assistant", "content": "I"}])["continue_final_message"] is True


def test_prompts_become_chats_or_completions() -> None:
    chat = GENERATE_API.translate({"prompt": "hi", "system": "be", "stream": False, "think": True, "context": []})
    assert chat.url == LONG_NAMES_CHAT.url
    assert chat.body["messages"] == [{"role": "system", "content": "be"}, *HELLO]
    assert chat.body["chat_template_kwargs"] == ON
    raw = GENERATE_API.translate({"prompt": "hi", "raw": True, "logprobs": True, "top_logprobs": 2})
    assert raw.url == TEXT.url
    assert (raw.body["prompt"], raw.body["logprobs"]) == ("hi", 2)
    assert read_body(TEXT, raw.body, nc.SamplingParams()).params.max_tokens is None
    assert GENERATE_API.translate({"prompt": "hi", "suffix": "x"}).body["suffix"] == "x"


REJECTED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "messages must be a list"),
    ({"messages": [7]}, "messages", r"messages\[0\] must be an object"),
    ({"messages": [{"content": "x"}]}, "messages", r"messages\[0\].role must be"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", r"messages\[0\].content must be a string"),
    ({"messages": [{"role": "user", "images": ["x"]}]}, "messages", r"messages\[0\].images is not supported"),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages", "needs the role assistant"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [7]}]},
        "messages",
        r"messages\[0\].tool_calls\[0\] must be an object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}]},
        "messages",
        r"function.name must be",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
        "messages",
        r"arguments must be",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_name": 7}]}, "messages", r"tool_name must be a string"),
    ({"options": 7}, "options", "options must be an object"),
    ({"options": {"frob": 1}}, "options", "unknown field of options 'frob'"),
    ({"options": {"n": 2}}, "options", "unknown field of options 'n'"),
    ({"options": {"num_predict": 0}}, "num_predict", "num_predict must be"),
    ({"options": {"num_predict": 1, "max_tokens": 1}}, "options", "unknown field of options 'max_tokens'"),
    ({"options": {"repeat_penalty": 1, "repetition_penalty": 1}}, "options", "are the same"),
    ({"options": {"repeat_penalty": -1}}, "repeat_penalty", "repeat_penalty must be"),
    ({"options": {"tfs_z": 0.5}}, "options", "options.tfs_z is not supported"),
    ({"options": {"mirostat": 3}}, "options", "options.mirostat must be 0, 1 or 2"),
    ({"options": {"mirostat": [1]}}, "options", "options.mirostat must be"),
    ({"format": "xml"}, "format", "format must be json or"),
    ({"format": ["json"]}, "format", "format must be json or"),
    ({"think": "x"}, "think", "think must be"),
    ({"think": ["low"]}, "think", "think must be"),
    ({"tools": 7}, "tools", "tools must be a list"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"stream": "x"}, "stream", "stream must be"),
    ({"frob": 1}, "frob", "unknown field 'frob'"),
    ({"max_tokens": 1}, "max_tokens", "unknown field 'max_tokens'"),
]


@pytest.mark.parametrize(("given", "field", "message"), REJECTED, ids=lambda value: str(value)[:50])
def test_errors_name_the_field_of_the_request(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught, CHAT_API.own_names():
        read_body(CHAT, CHAT_API.translate({"messages": HELLO, **given}).body, nc.SamplingParams())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({"prompt": value}, "prompt") for value in (None, "", 7, ["x"])),
        *(
            ({"prompt": "x", name: ["x"]}, name)
            for name in ("system", "suffix", "template", "context", "images", "raw")
        ),
        ({"prompt": "x", "raw": True, "system": "s"}, "system"),
        ({"prompt": "x", "raw": True, "think": True}, "think"),
        ({"prompt": "x", "messages": HELLO}, "messages"),
    ],
)
def test_errors_of_prompts(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        GENERATE_API.translate(given)
    assert caught.value.field == field


def lines(call: Any) -> list[dict[str, Any]]:
    assert call.headers["content-type"] == "application/x-ndjson"
    assert call.data.endswith(b"\n")
    return [json.loads(line) for line in call.data.decode().splitlines()]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole response that the lines of a stream add up to."""
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    made = found[-1]
    target = made.get("message", made)
    parts = [line.get("message", line) for line in found[:-1]]
    for name in ("content", "response", "thinking"):
        if text := "".join(part.get(name, "") for part in parts):
            target[name] = text
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        target["tool_calls"] = calls
    if steps := [step for line in found for step in line.get("logprobs", ())]:
        made["logprobs"] = steps
    return made


def stable(response: dict[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in response.items() if not name.endswith(("_duration", "created_at"))}
    for call in made.get("message", {}).get("tool_calls", ()):
        call.pop("id")
    return made


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (URL, {"options": {"num_predict": 8}}),
    "logprobs": (URL, {"options": {"num_predict": 8}, "logprobs": True, "top_logprobs": 1}),
    "json": (URL, {"format": SCHEMA, "options": {"num_predict": 200}}),
    "to its end": (URL, {"options": {"temperature": 0}}),
    "generate": (GENERATE, {"options": {"num_predict": 8}, "system": "Be brief"}),
    "raw": (GENERATE, {"options": {"num_predict": 8}, "raw": True, "logprobs": True}),
}


@pytest.mark.parametrize("name", BODIES)
def test_streams_and_whole_responses_are_the_same(llm: nc.LLM, name: str) -> None:
    path, more = BODIES[name]
    subject = {"messages": [{"role": "user", "content": "A story"}]} if path == URL else {"prompt": "Once upon"}
    body = {"model": "tiny:latest", **subject, **more, "options": {"seed": 3, **more["options"]}}

    async def use(app: Any, service: Any) -> None:
        whole, stream = await ask(app, path, {**body, "stream": False}), await ask(app, path, body)
        assert (whole.status, stream.status) == (200, 200), whole.data
        made = whole.json
        assert stable(joined(lines(stream))) == stable(made)
        assert (made["model"], made["done"]) == ("tiny", True)
        assert made["done_reason"] == ("stop" if name in ("json", "to its end") else "length")
        assert made["total_duration"] >= made["prompt_eval_duration"] > 0
        assert made["prompt_eval_count"] > 0 < made["eval_count"]
        if name == "json":
            assert [*json.loads(made["message"]["content"])] == ["a"]
        if "logprobs" in more:
            text = made["message"]["content"] if path == URL else made["response"]
            assert "".join(step["token"] for step in made["logprobs"]) == text

    serve(llm, use)


def test_calls_and_thinking_are_parts_of_the_message() -> None:
    from nucleate.outputs import CompletionChunk, ToolCallDelta, Usage
    from nucleate.server.chat_api import EncoderInput, Timing
    from nucleate.server.ollama_api import ChatLines
    from nucleate.server.openai.responses import ResponseHead

    request = read_body(CHAT, translated(), nc.SamplingParams())
    given = EncoderInput(ResponseHead("x-1", 1, "m"), request, 1, None, lambda: Timing(2.0, 1.5))  # type: ignore[arg-type]
    start = ToolCallDelta(0, "call_1", "f")
    chunks = [
        CompletionChunk("", (1,), 0, 7, reasoning="hm"),
        CompletionChunk("t", (1,), 0, 7),
        CompletionChunk("", (1,), 0, 7, tool_calls=(start, ToolCallDelta(0, arguments='{"n": 1e999}'))),
        CompletionChunk("", (1,), 0, 7, finish_reason="tool_calls"),
    ]
    stream = ChatLines(given)
    found = b"".join([*(stream.frames(0, [chunk]) for chunk in chunks), stream.end(Usage(1, 4))]).decode().splitlines()
    assert '"tool_calls":[{"id":"call_1","function":{"index":0,"name":"f","arguments":{"n": 1e999}}}]' in found[2]
    message = json.loads("".join(ChatLines(given).whole(chunks, Usage(1, 4))))["message"]
    assert (message["content"], message["thinking"], len(message["tool_calls"])) == ("t", "hm", 1)
    assert [json.loads(line)["message"].get("thinking") for line in found] == ["hm", None, None, None]
    last = json.loads(found[-1])
    assert (last["done_reason"], last["eval_duration"], last["total_duration"]) == ("stop", 5 * 10**8, 2 * 10**9)
    assert json.loads(stream.keep_alive())["done"] is False


def test_what_clients_ask_about_the_model(llm: nc.LLM) -> None:
    async def use(app: Any, service: Any) -> None:
        [model] = (await ask(app, "/api/tags")).json["models"]
        assert (model["name"], model["model"], len(model["digest"])) == ("tiny", "tiny", 64)
        for body in ({"model": "tiny"}, {"model": "tiny:latest"}, {"name": "tiny", "verbose": True}):
            shown = (await ask(app, "/api/show", body)).json
            assert shown["capabilities"] == ["completion", "tools"]
            assert shown["model_info"]["nucleate.context_length"] == service.max_model_len
        assert (await ask(app, "/api/show", {"model": "other"})).status == 404
        assert (await ask(app, "/api/show", {"model": "tiny", "name": 7})).status == 400
        assert (await ask(app, "/api/show", {"frob": 1})).json == {
            "error": "unknown field 'frob' (known: model, name, options, system, template, verbose)"
        }
        assert (await ask(app, "/api/version")).json["version"].count(".") == 2

    serve(llm, use)


def test_errors_have_ollamas_format(llm: nc.LLM) -> None:
    async def use(app: Any, service: Any) -> None:
        for path, body, status, message in (
            (URL, {"messages": HELLO, "model": "other"}, 404, "does not exist"),
            (URL, {"messages": HELLO, "options": {"num_predict": 5000}}, 400, "num_predict is 5000"),
            (
                URL,
                {"messages": HELLO, "format": {"type": "array", "uniqueItems": True}},
                400,
                "format: cannot enforce uniqueItems",
            ),
            (GENERATE, {"prompt": "a " * 3000}, 400, "the prompt is too long"),
            ("/api/pull", {"model": "x"}, 404, "Path /api/pull does not exist"),
        ):
            call = await ask(app, path, body)
            assert call.status == status
            assert [*call.json] == ["error"]
            assert message in call.json["error"]
            assert "on_unsupported" not in call.json["error"]

    serve(llm, use)


@pytest.mark.parametrize("path", [URL, GENERATE])
def test_a_stream_without_text_has_its_last_line(llm: nc.LLM, path: str) -> None:
    body: dict[str, Any] = {"messages": HELLO} if path == URL else {"prompt": "Once upon a time", "raw": True}

    async def use(app: Any, service: Any) -> None:
        greedy = {"temperature": 0, "num_predict": 1}
        first = (await ask(app, path, {**body, "stream": False, "options": greedy})).json
        text = first["message"]["content"] if path == URL else first["response"]
        assert text
        stream = await ask(app, path, {**body, "options": {**greedy, "stop": [text]}})
        assert (stream.status, stream.headers["content-type"]) == (200, "application/x-ndjson")
        [last] = [json.loads(line) for line in stream.data.splitlines()][-1:]
        assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 1)

    serve(llm, use)


def test_a_stream_that_fails_ends_with_an_error(llm: nc.LLM) -> None:
    async def use(app: Any, service: Any) -> None:
        call = begin(app, URL, {"messages": HELLO, "options": {"ignore_eos": True}})
        await until(lambda: b"\n" in call.data)
        service.abort()
        await asyncio.wait_for(call.task, 60)
        assert call.over
        assert lines(call)[-1] == {"error": "Server is shutting down."}

    serve(llm, use)


def test_a_client_that_disconnects_cancels_its_request(llm: nc.LLM) -> None:
    async def use(app: Any, service: Any) -> None:
        for stream in (True, False):
            call = begin(app, URL, {"messages": HELLO, "stream": stream, "options": {"ignore_eos": True}})
            await until(lambda: service.num_sequences)
            call.leave()
            await asyncio.wait_for(call.task, 60)
            assert service.num_sequences == 0

    serve(llm, use)
