"""Fields that every API has: priority, truncation, unknown fields, names of tools, and parameters at their extremes."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from asgi_client import ask
from test_app import CHAT, TEXT, check_error, serve

import nucleate as nc
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import CHAT as CHAT_ENDPOINT
from nucleate.server.service import Service
from nucleate.tokenization.prompts import FillFormat, encode_fill

HELLO = [{"role": "user", "content": "Tell me a long story about a fox, please."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**TEXT, "prompt": [*range(5, 25)], "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": HELLO[0]["content"], "options": {"num_predict": 2}, "stream": False},
}
OTHERS = [path for path in BODIES if not path.endswith("completions")]


def prompt_tokens(body: Any) -> int:
    usage = body.get("usage", body)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    count: int = next(usage[name] for name in names if name in usage)
    return count + usage.get("cache_read_input_tokens", 0)


def message_of(body: Any) -> str:
    error = body["error"]
    text: str = error if isinstance(error, str) else error["message"]
    return text


@pytest.mark.parametrize("path", BODIES)
def test_prompts_are_truncated(llm: nc.LLM, path: str) -> None:
    seen: list[Any] = []

    async def use(app: Any, service: Service) -> None:
        prepare = service.engine.prepare

        def recording(request: Any) -> Any:
            seen.append([*request.prompt_ids])
            return prepare(request)

        service.engine.prepare = recording  # type: ignore[method-assign]
        whole = await ask(app, path, BODIES[path])
        ids = seen.pop()
        assert prompt_tokens(whole.json) == len(ids) > 9
        for more, expected in (
            ({"truncate_prompt_tokens": 5}, ids[-5:]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
            ({"truncate_prompt_tokens": -1}, ids),
        ):
            call = await ask(app, path, {**BODIES[path], **more})
            assert prompt_tokens(call.json) == len(expected)
            assert seen.pop() == expected
        for name, value in (("truncate_prompt_tokens", 0), ("truncation_side", "middle"), ("priority", "high")):
            call = await ask(app, path, {**BODIES[path], name: value})
            assert (call.status, message_of(call.json).partition(" ")[0]) == (400, name)

    serve(llm, use)


@pytest.mark.parametrize("path", BODIES)
def test_requests_of_a_lower_priority_value_run_first(llm: nc.LLM, path: str) -> None:
    seen: list[int] = []

    async def use(app: Any, service: Service) -> None:
        prepare = service.engine.prepare

        def recording(request: Any) -> Any:
            seen.append(request.priority)
            return prepare(request)

        service.engine.prepare = recording  # type: ignore[method-assign]
        for priority in (3, -7):
            assert (await ask(app, path, {**BODIES[path], "priority": priority})).status == 200
            assert seen.pop() == priority

    serve(llm, use, service={"allow_priority": True})


@pytest.mark.parametrize("path", BODIES)
def test_priority_needs_a_flag(llm: nc.LLM, path: str) -> None:
    async def use(app: Any, service: Service) -> None:
        call = await ask(app, path, {**BODIES[path], "priority": 1})
        assert call.status == 400
        assert "--scheduling-policy" in message_of(call.json)

    serve(llm, use)


SMALL: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/api/show": {"model": "toy"},
}


@pytest.mark.parametrize("path", [*OTHERS, *SMALL])
def test_unknown_fields_can_be_ignored(llm: nc.LLM, path: str, caplog: pytest.LogCaptureFixture) -> None:
    body = {**BODIES, **SMALL}[path]
    unknown: dict[str, Any] = {"foo": 1, "é": {"x": []}, "nothing": None}
    names = ["foo", "é"]
    if path in OTHERS and path.startswith("/api"):
        unknown["options"] = {**body["options"], "bar": 1}
        names.append("options.bar")

    async def use(app: Any, service: Service) -> None:
        plain = await ask(app, path, body)
        assert plain.status == 200
        assert "x-nucleate-ignored-fields" not in plain.headers
        for more in ({}, {"stream": True}) if path in OTHERS else ({},):
            call = await ask(app, path, {**body, **unknown, **more})
            assert call.status == 200, call.data
            expected = ", ".join(names).replace("é", "%C3%A9")
            assert call.headers["x-nucleate-ignored-fields"] == expected
            assert caplog.records[-1].fields["ignored_fields"] == names  # type: ignore[attr-defined]
        for name in ("guided_json", "temperature") if path in OTHERS else ():
            wrong = {"options": {name: "x"}} if path.startswith("/api") else {name: "x"}
            if (path, name) != ("/v1/messages", "guided_json"):
                assert (await ask(app, path, {**body, **wrong})).status == 400

    async def reject(app: Any, service: Service) -> None:
        for name, value in unknown.items():
            call = await ask(app, path, {**body, name: value})
            assert call.status == (200 if value is None else 400)

    with caplog.at_level(logging.INFO, "nucleate.server"):
        serve(llm, use, service={"ignore_unknown_fields": True})
        serve(llm, reject)


@pytest.mark.parametrize("path", [path for path in BODIES if path not in ("/v1/completions", "/api/generate")])
def test_the_length_of_a_tools_name_depends_on_the_api(llm: nc.LLM, path: str) -> None:
    limit = CHAT_ENDPOINT.max_tool_name if path == CHAT_ENDPOINT.url else 128

    def body(length: int) -> dict[str, Any]:
        schema = {"type": "object", "properties": {}}
        function = {"name": "n" * length, "parameters": schema}
        tool: dict[str, Any] = {"type": "function", "function": function}
        if path == "/v1/responses":
            tool = {"type": "function", **function}
        if path == "/v1/messages":
            tool = {"name": "n" * length, "input_schema": schema}
        return {**BODIES[path], "tools": [tool]}

    async def use(app: Any, service: Service) -> None:
        assert (await ask(app, path, body(limit))).status == 200
        call = await ask(app, path, body(limit + 1))
        assert call.status == 400
        assert "tools[0]" in message_of(call.json)
        assert str(limit) in message_of(call.json)

    serve(llm, use)


def test_a_suffix_in_ollamas_api(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [llm.tokenizer.pieces.tokens[token] for token in (300, 301, 302)]
    options = {"num_predict": 6, "seed": 2}
    body = {"prompt": "Once", "suffix": " time", "options": options, "stream": False}
    path = "/api/generate"

    async def without(app: Any, service: Service) -> None:
        call = await ask(app, path, body)
        assert call.status == 400
        assert "suffix needs a model with fill-in-the-middle tokens" in call.json["error"]

    async def use(app: Any, service: Service) -> None:
        ids = encode_fill(llm.tokenizer, "Once", " time")
        found = (await ask(app, path, body)).json
        assert found["prompt_eval_count"] == len(ids)
        given = {"prompt": "Once", "suffix": " time", "max_tokens": 6, "seed": 2}
        expected = (await ask(app, "/v1/completions", given)).json["choices"][0]
        assert found["response"] == expected["text"]
        stream = await ask(app, path, {**body, "stream": True})
        lines = stream.data.decode().splitlines()
        assert "".join(json.loads(line)["response"] for line in lines) == expected["text"]
        forced = await ask(app, path, {**body, "options": {**options, "logit_bias": {"301": 1000}}})
        assert forced.json["done_reason"] == "stop"
        for more, name in (
            ({"system": "be"}, "system"),
            ({"think": True}, "think"),
            ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
            ({"suffix": 5}, "suffix"),
        ):
            call = await ask(app, path, {**body, **more})
            assert call.status == 400
            assert call.json["error"].startswith(name)
        chat = await ask(app, path, {**body, "suffix": ""})  # is a message of the user
        assert chat.json["prompt_eval_count"] != len(ids)

    serve(llm, without)
    monkeypatch.setattr("nucleate.tokenization.prompts.FORMATS", (FillFormat(*tokens),))
    serve(llm, use)


MAX = sys.float_info.max
NUMBERS = (MAX, -MAX, 1e300, -1e300, 1e39, 5e-324, -5e-324, 1e-300, -0.0, 0, 1, 2**31, 2**63 - 1, 2**64)
NUMERIC = [name for name, one in FIELDS.items() if one.kind in ("int", "float") and name not in ("n", "max_tokens")]


@pytest.mark.parametrize("name", NUMERIC)
def test_numeric_parameters_at_their_extremes(llm: nc.LLM, name: str) -> None:
    """Each value is rejected, or has a result; where the scores become infinite, the error names the field."""
    more: dict[str, dict[str, Any]] = {
        "guidance_scale": {"negative_prompt": [7, 9]},
        "dry_base": {"dry_multiplier": 1.0, "dry_allowed_length": 1},
        "dynamic_temperature_low": {"dynamic_temperature_high": MAX},
        "dynamic_temperature_high": {"dynamic_temperature_low": 0.0},
        "dynamic_temperature_exponent": {"dynamic_temperature_low": 0.5, "dynamic_temperature_high": 1.5},
        "mirostat_eta": {"mirostat_tau": 1.0},
        "mirostat_v1_eta": {"mirostat_v1_tau": 1.0},
        "smoothing_curve": {"smoothing_factor": 1.0},
    }
    bounds = [bound for bound in (FIELDS[name].low, FIELDS[name].high) if bound is not None]

    async def use(app: Any, service: Service) -> None:
        found = set()
        for value in (*NUMBERS, *bounds):
            body = {**TEXT, "max_tokens": 4, "stop": None, "ignore_eos": True, **more.get(name, {}), name: value}
            call = await ask(app, "/v1/completions", body)
            found.add(call.status)
            if call.status != 200:
                check_error(call, 400, param=call.json["error"]["param"])
                assert call.json["error"]["param"] in (name, *more.get(name, {})), call.data
        assert 200 in found

    serve(llm, use)


def test_scores_that_become_infinite_name_the_field(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        call = await ask(app, "/v1/completions", {**TEXT, "encoder_repetition_penalty": MAX, "max_tokens": 3})
        check_error(call, 400, param="encoder_repetition_penalty")
        stream = await ask(app, "/v1/completions", {**TEXT, "repetition_penalty": 5e-324, "stream": True})
        last = stream.json if stream.status != 200 else stream.frames[-2]
        assert last["error"]["param"] == "repetition_penalty"

    serve(llm, use)
