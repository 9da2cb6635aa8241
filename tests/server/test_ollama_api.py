"""Ollama's API: requests as chat completions, responses as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from served_apps import ask, begin, bundled_app

import nucleate as nc
from nucleate.models.protocol import ModelError
from nucleate.outputs import CompletionChunk, ToolCallDelta, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.server import ollama_routes
from nucleate.server.chat_api import EncoderInput, Timing
from nucleate.server.ollama_api import CHAT_API, CHAT_LINES, GENERATE_API, IGNORED_OPTIONS
from nucleate.server.openai.endpoints import CHAT, LONG_NAMES_CHAT, TEXT
from nucleate.server.openai.requests import read_body
from nucleate.server.openai.responses import ResponseHead

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
    ({"options": {"num_predict": -2, "seed": 7, "stop": ["x"], "top_k": 3}}, {"seed": 7, "stop": ["x"], "top_k": 3}),
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
    ({"options": {"num_predict": 0}}, "num_predict", "num_predict must be"),
    ({"options": {"repeat_penalty": -1}}, "repeat_penalty", "repeat_penalty must be"),
    *(
        (given, next(iter(given)), message)
        for given, message in [
            ({"messages": "x"}, "messages must be a list"),
            ({"messages": [7]}, r"messages\[0\] must be an object"),
            ({"messages": [{"content": "x"}]}, r"messages\[0\].role must be"),
            ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content must be a string"),
            ({"messages": [{"role": "user", "images": ["x"]}]}, r"messages\[0\].images is not supported"),
            ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "needs the role assistant"),
            *(
                ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, message)
                for call, message in [
                    (7, r"messages\[0\].tool_calls\[0\] must be an object"),
                    ({"function": {"name": 7}}, "function.name must be"),
                    ({"function": {"name": "f", "arguments": [1]}}, "arguments must be"),
                ]
            ),
            ({"messages": [{"role": "tool", "content": "x", "tool_name": 7}]}, r"tool_name must be a string"),
            ({"options": 7}, "options must be an object"),
            *(({"options": {name: 1}}, f"unknown field of options '{name}'") for name in ("frob", "n")),
            ({"options": {"num_predict": 1, "max_tokens": 1}}, "unknown field of options 'max_tokens'"),
            ({"options": {"repeat_penalty": 1, "repetition_penalty": 1}}, "are the same"),
            ({"options": {"tfs_z": 0.5}}, "options.tfs_z is not supported"),
            ({"options": {"mirostat": 3}}, "options.mirostat must be 0, 1 or 2"),
            ({"options": {"mirostat": [1]}}, "options.mirostat must be"),
            *(({"format": value}, "format must be json or") for value in ("xml", ["json"])),
            *(({"think": value}, "think must be") for value in ("x", ["low"])),
            ({"tools": 7}, "tools must be a list"),
            ({"top_logprobs": 2}, "needs logprobs"),
            ({"stream": "x"}, "stream must be"),
            *(({name: 1}, f"unknown field '{name}'") for name in ("frob", "max_tokens")),
        ]
    ),
]


@pytest.mark.parametrize(("given", "field", "message"), REJECTED, ids=lambda value: str(value)[:50])
def test_errors_name_the_field_of_the_request(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught, CHAT_API.own_names():
        read_body(CHAT, CHAT_API.translate({"messages": HELLO, **given}).body, nc.SamplingParams())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({"prompt": value}, "prompt") for value in (7, ["x"])),
        *(({"prompt": "x", n: ["x"]}, n) for n in ("system", "suffix", "template", "context", "images", "raw")),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
@bundled_app()
async def test_streams_and_whole_responses_are_the_same(app: Any, name: str) -> None:
    path, more = BODIES[name]
    subject = {"messages": [{"role": "user", "content": "A story"}]} if path == URL else {"prompt": "Once upon"}
    body = {"model": "tiny:latest", **subject, **more, "options": {"seed": 3, **more["options"]}}
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


def test_arguments_keep_their_numbers_and_lines_have_durations() -> None:
    request = read_body(CHAT, translated(), nc.SamplingParams())
    given = EncoderInput(ResponseHead("x-1", 1, "m"), request, 1, None, lambda: Timing(2.0, 1.5))  # type: ignore[arg-type]
    call = ToolCallDelta(0, "call_1", "f"), ToolCallDelta(0, arguments='{"n": 1e999}')
    chunks = [CompletionChunk("", (1,), 0, 7, tool_calls=call), CompletionChunk("", (1,), 0, 7, "tool_calls")]
    stream = CHAT_LINES(given)
    found = b"".join([*(stream.frames(0, [chunk]) for chunk in chunks), stream.end(Usage(1, 4))]).decode().splitlines()
    assert '"tool_calls":[{"id":"call_1","function":{"index":0,"name":"f","arguments":{"n": 1e999}}}]' in found[0]
    last = json.loads(found[-1])
    assert (last["done_reason"], last["eval_duration"], last["total_duration"]) == ("stop", 5 * 10**8, 2 * 10**9)
    assert json.loads(stream.keep_alive())["done"] is False


@bundled_app()
async def test_what_clients_ask_about_the_model(app: Any, service: Any) -> None:
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


@bundled_app()
async def test_clients_find_the_server_and_the_loaded_model(app: Any, service: Any) -> None:
    call = await ask(app, "/", method="HEAD")
    assert call.status == 200
    [model] = (await ask(app, "/api/ps")).json["models"]
    assert (model["name"], model["context_length"]) == ("tiny", service.max_model_len)
    assert model["size"] > 1_000_000
    assert model["details"]["quantization_level"] == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"model": "tiny"}),
        (GENERATE, {"model": "tiny:latest", "prompt": "", "keep_alive": -1}),
        (GENERATE, {"prompt": None, "stream": False}),
        (URL, {"model": "tiny"}),
        (URL, {"messages": [], "stream": False, "keep_alive": 0}),
    ],
)
@bundled_app()
async def test_a_request_without_a_prompt_loads_the_model(app: Any, path: str, body: dict[str, Any]) -> None:
    call = await ask(app, path, body)
    content = call.json.get("message", {}).get("content") if path == URL else call.json["response"]
    assert (call.status, content, call.json["done"], call.json["done_reason"]) == (200, "", True, "load")
    assert (call.json["model"], call.data.count(b"\n")) == ("tiny", 0)
    assert (await ask(app, path, {**body, "model": "other"})).status == 404
    assert (await ask(app, path, {**body, "frob": 1})).status == 400


@bundled_app()
async def test_pull(app: Any, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*map(json.loads, (await ask(app, "/api/pull", {"model": "tiny:latest"})).data.splitlines())] == [
        {"status": "pulling manifest"},
        {"status": "success"},
    ]
    begun, go_on, pulled = threading.Event(), threading.Event(), []

    def pull(name: str, *, progress: bool) -> None:
        begun.set()
        assert go_on.wait(60)
        pulled.append(name)
        if name == "a/bad":
            raise ModelError("no such file")
        if name == "a/worse":
            raise ZeroDivisionError

    monkeypatch.setattr(ollama_routes, "pull", pull)
    monkeypatch.setattr(ollama_routes, "PULL_SECONDS", 0.01)
    service.options = replace(service.options, allow_pull=True)
    assert (await ask(app, "/api/pull", {"model": "no name"})).status == 400
    call = begin(app, "/api/pull", {"model": "a/b:Q4"})
    async with asyncio.timeout(60):
        while not begun.is_set() or b"pulling a/b" not in call.data:  # noqa: ASYNC110  # set by a thread
            await asyncio.sleep(0.01)
    assert (await ask(app, "/api/pull", {"model": "c/d"})).status == 503  # one at a time
    go_on.set()
    await asyncio.wait_for(call.task, 60)
    assert call.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line)["status"] for line in call.data.splitlines()]
    assert [found[0], *found[-2:]] == ["pulling manifest", "verifying sha256 digest", "success"]
    assert {*found[1:-2]} == {"pulling a/b:Q4"}
    assert (await ask(app, "/api/pull", {"name": "c/d", "stream": False})).json == {"status": "success"}
    assert pulled == ["a/b:Q4", "c/d"]
    call = await ask(app, "/api/pull", {"model": "a/bad", "stream": False})
    assert (call.status, call.json) == (502, {"error": "no such file"})
    call = await ask(app, "/api/pull", {"model": "a/bad"})
    assert json.loads(call.data.splitlines()[-1]) == {"error": "no such file"}
    assert (await ask(app, "/api/pull", {"model": "a/worse", "stream": False})).status == 500
    assert (await ask(app, "/api/pull", {"model": "c/d", "stream": False})).status == 200


@bundled_app()
async def test_errors_have_ollamas_format(app: Any) -> None:
    for path, body, status, message in (
        (URL, {"messages": HELLO, "model": "other"}, 404, "does not exist"),
        (URL, {"messages": HELLO, "options": {"num_predict": 5000}}, 400, "num_predict is 5000"),
        (URL, {"messages": HELLO, "format": {"uniqueItems": True}}, 400, "format: cannot enforce uniqueItems"),
        (GENERATE, {"prompt": "a " * 3000}, 400, "the prompt is too long"),
        ("/api/pull", {"model": "a/b"}, 403, "This server does not download models (see --allow-pull)"),
        ("/api/pull", {"model": 7}, 400, "model must be"),
        ("/api/push", {"model": "x"}, 404, "Path /api/push does not exist"),
    ):
        call = await ask(app, path, body)
        assert call.status == status
        assert [*call.json] == ["error"]
        assert message in call.json["error"]
        assert "on_unsupported" not in call.json["error"]


@pytest.mark.parametrize("path", [URL, GENERATE])
@bundled_app()
async def test_a_stream_without_text_has_its_last_line(app: Any, path: str) -> None:
    body: dict[str, Any] = {"messages": HELLO} if path == URL else {"prompt": "Once upon a time", "raw": True}
    greedy = {"temperature": 0, "num_predict": 1}
    first = (await ask(app, path, {**body, "stream": False, "options": greedy})).json
    text = first["message"]["content"] if path == URL else first["response"]
    assert text
    stream = await ask(app, path, {**body, "options": {**greedy, "stop": [text]}})
    assert (stream.status, stream.headers["content-type"]) == (200, "application/x-ndjson")
    [last] = [json.loads(line) for line in stream.data.splitlines()][-1:]
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 1)
