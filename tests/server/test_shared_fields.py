"""Fields that every API has: priority, truncation, unknown fields, names of tools, and parameters at their extremes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from served_apps import CHAT, TEXT, ask, bundled_app, check_error, streamed, toy_app

import nucleate as nc
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import CHAT as CHAT_ENDPOINT
from nucleate.server.service import Service
from nucleate.tokenization import prompts

COMPLETIONS = "/v1/completions"
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


def recorded(service: Service) -> list[Any]:
    """The requests that the engine will get."""
    seen, prepare = [], service.engine.prepare
    service.engine.prepare = lambda request: (seen.append(request), prepare(request))[1]  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("path", BODIES)
@toy_app()
async def test_prompts_are_truncated(app: Any, service: Service, path: str) -> None:
    seen = recorded(service)
    whole = await ask(app, path, BODIES[path])
    ids = [*seen.pop().prompt_ids]
    assert prompt_tokens(whole.json) == len(ids) > 9
    for more, expected in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        call = await ask(app, path, {**BODIES[path], **more})
        assert prompt_tokens(call.json) == len(expected)
        assert [*seen.pop().prompt_ids] == expected
    for name, value in (("truncate_prompt_tokens", 0), ("truncation_side", "middle"), ("priority", "high")):
        call = await ask(app, path, {**BODIES[path], name: value})
        assert (call.status, message_of(call.json).partition(" ")[0]) == (400, name)


@pytest.mark.parametrize("path", BODIES)
@toy_app(service={"allow_priority": True})
async def test_priority(app: Any, service: Service, path: str) -> None:
    seen = recorded(service)
    bodies = [{"priority": priority} for priority in (5, -(2**63), 2**63 - 1, 0, None)]
    if path == COMPLETIONS:
        bodies.append({"priority": -4, "use_beam_search": True, "best_of": 2, "n": 1, "seed": None})
    for body in bodies:
        assert (await ask(app, path, {**BODIES[path], **body})).status == 200
        assert seen.pop().priority == (body["priority"] or 0)
    for wrong in (2**63, 1.0, "1", True):
        call = await ask(app, path, {**BODIES[path], "priority": wrong})
        assert (call.status, message_of(call.json).partition(" ")[0]) == (400, "priority")


@pytest.mark.parametrize("path", BODIES)
@toy_app()
async def test_priority_needs_a_flag(app: Any, path: str) -> None:
    assert (await ask(app, path, {**BODIES[path], "priority": 0})).status == 200
    call = await ask(app, path, {**BODIES[path], "priority": -1})
    assert call.status == 400
    assert "--scheduling-policy" in message_of(call.json)


SMALL: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/api/show": {"model": "toy"},
}


UNKNOWN: dict[str, Any] = {"foo": 1, "a b\r\n,é": {"x": []}, "nothing": None}


@pytest.mark.parametrize("path", [*BODIES, *SMALL])
@toy_app(service={"ignore_unknown_fields": True})
async def test_unknown_fields_can_be_ignored(app: Any, path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    body, unknown, names = {**BODIES, **SMALL}[path], {**UNKNOWN}, [*UNKNOWN][:2]
    header = "foo, a%20b%0D%0A%2C%C3%A9"
    in_options = path in OTHERS and path.startswith("/api")
    if in_options:
        unknown["options"] = {**body["options"], "bar": 1}
        names, header = [*names, "options.bar"], f"{header}, options.bar"
    plain = await ask(app, path, body)
    assert plain.status == 200
    assert "x-nucleate-ignored-fields" not in plain.headers
    for more in ({}, {"stream": True}) if path in BODIES else ({},):
        call = await ask(app, path, {**body, **unknown, **more})
        assert call.status == 200, call.data
        assert call.headers["x-nucleate-ignored-fields"] == header
        assert caplog.records[-1].fields["ignored_fields"] == names  # type: ignore[attr-defined]
    for name in ("guided_json", "temperature") if path in BODIES else ():  # a constraint is never dropped
        if (path, name) != ("/v1/messages", "guided_json"):
            wrong = {"options": {name: "x"}} if in_options else {name: "x"}
            assert (await ask(app, path, {**body, **wrong})).status == 400


@pytest.mark.parametrize("path", [*BODIES, *SMALL])
@toy_app()
async def test_unknown_fields_are_errors_by_default(app: Any, path: str) -> None:
    for name, value in UNKNOWN.items():
        call = await ask(app, path, {**BODIES, **SMALL}[path] | {name: value})
        assert call.status == (200 if value is None else 400)


@pytest.mark.parametrize("path", [path for path in BODIES if path not in ("/v1/completions", "/api/generate")])
@toy_app()
async def test_the_length_of_a_tools_name_depends_on_the_api(app: Any, path: str) -> None:
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

    assert (await ask(app, path, body(limit))).status == 200
    call = await ask(app, path, body(limit + 1))
    assert call.status == 400
    assert "tools[0]" in message_of(call.json)
    assert str(limit) in message_of(call.json)


FILL: dict[str, Any] = {"prompt": "Once", "suffix": " time", "max_tokens": 6, "seed": 2}
OLLAMA_FILL = {"prompt": "Once", "suffix": " time", "options": {"num_predict": 6, "seed": 2}, "stream": False}


@pytest.fixture
def fill_ids(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompt of both, with a model that has fill-in-the-middle tokens."""
    tokens = [llm.tokenizer.pieces.tokens[token] for token in (300, 301, 302)]
    monkeypatch.setattr(prompts, "FORMATS", (prompts.FillFormat(*tokens),))
    return prompts.encode_fill(llm.tokenizer, "Once", " time")


@toy_app()
async def test_a_suffix(app: Any, fill_ids: list[int]) -> None:
    found = (await ask(app, COMPLETIONS, FILL)).json
    assert found["usage"]["prompt_tokens"] == len(fill_ids)
    plain = {**FILL, "prompt": fill_ids, "suffix": "", "stop_token_ids": [300, 301, 302]}
    assert (await ask(app, COMPLETIONS, plain)).json["choices"] == found["choices"]
    stream = await ask(app, COMPLETIONS, {**FILL, "stream": True})
    text = streamed([frame["choices"][0] for frame in stream.frames[:-1]])
    assert text == found["choices"][0]["text"]
    several = (await ask(app, COMPLETIONS, {**FILL, "prompt": ["Once", ""]})).json
    assert several["choices"][0]["text"] == text
    forced = await ask(app, COMPLETIONS, {**FILL, "logit_bias": {"301": 1000}})
    assert forced.json["choices"][0]["finish_reason"] == "stop"
    for more, name in (({"echo": True}, "echo"), ({"use_beam_search": True, "seed": None}, "use_beam_search")):
        call = await ask(app, COMPLETIONS, {**FILL, **more})
        check_error(call, 400, param="suffix", message=f"suffix cannot be combined with {name}")
    check_error(await ask(app, COMPLETIONS, {**FILL, "prompt": [1, 2]}), 400, param="suffix")
    check_error(await ask(app, COMPLETIONS, {**FILL, "prompt": "a " * 5000}), 400, code="context_length_exceeded")


@toy_app()
async def test_a_suffix_in_ollamas_api(app: Any, fill_ids: list[int]) -> None:
    path, text = "/api/generate", (await ask(app, COMPLETIONS, FILL)).json["choices"][0]["text"]
    found = (await ask(app, path, OLLAMA_FILL)).json
    assert (found["prompt_eval_count"], found["response"]) == (len(fill_ids), text)
    stream = await ask(app, path, {**OLLAMA_FILL, "stream": True})
    assert "".join(json.loads(line)["response"] for line in stream.data.splitlines()) == text
    forced = await ask(app, path, {**OLLAMA_FILL, "options": {"seed": 2, "logit_bias": {"301": 1000}}})
    assert forced.json["done_reason"] == "stop"
    for name, value in {"system": "be", "think": True, "truncate_prompt_tokens": 3, "suffix": 5}.items():
        call = await ask(app, path, {**OLLAMA_FILL, name: value})
        assert (call.status, call.json["error"].startswith(name)) == (400, True)
    chat = await ask(app, path, {**OLLAMA_FILL, "suffix": ""})  # is a message of the user
    assert chat.json["prompt_eval_count"] != len(fill_ids)


@toy_app()
async def test_a_suffix_needs_a_model_with_fill_in_the_middle_tokens(app: Any) -> None:
    call = await ask(app, "/api/generate", OLLAMA_FILL)
    assert call.status == 400
    assert "suffix needs a model with fill-in-the-middle tokens" in call.json["error"]
    for suffix in ("x", 1, ["x"], True, "\ud800"):
        check_error(await ask(app, COMPLETIONS, {**FILL, "suffix": suffix}), 400, param="suffix")
    check_error(await ask(app, "/v1/chat/completions", {"messages": [], "suffix": "x"}), 400, param="suffix")
    none = [await ask(app, COMPLETIONS, {**FILL, "suffix": suffix}) for suffix in ("", None)]
    assert none[0].json["choices"] == none[1].json["choices"]


MAX = sys.float_info.max
NUMBERS = (MAX, -MAX, 1e300, -1e300, 1e39, 5e-324, -5e-324, 1e-300, -0.0, 0, 1, 2**31, 2**63 - 1, 2**64)
NUMERIC = [name for name, one in FIELDS.items() if one.kind in ("int", "float") and name not in ("n", "max_tokens")]


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", NUMERIC)
@toy_app()
async def test_numeric_parameters_at_their_extremes(app: Any, name: str) -> None:
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
    found = set()
    for value in (*NUMBERS, *bounds):
        body = {**TEXT, "max_tokens": 4, "stop": None, "ignore_eos": True, **more.get(name, {}), name: value}
        call = await ask(app, "/v1/completions", body)
        found.add(call.status)
        if call.status != 200:
            check_error(call, 400, param=call.json["error"]["param"])
            assert call.json["error"]["param"] in (name, *more.get(name, {})), call.data
    assert 200 in found


@toy_app()
async def test_scores_that_become_infinite_name_the_field(app: Any) -> None:
    call = await ask(app, "/v1/completions", {**TEXT, "encoder_repetition_penalty": MAX, "max_tokens": 3})
    check_error(call, 400, param="encoder_repetition_penalty")
    stream = await ask(app, "/v1/completions", {**TEXT, "repetition_penalty": 5e-324, "stream": True})
    last = stream.json if stream.status != 200 else stream.frames[-2]
    assert last["error"]["param"] == "repetition_penalty"


TEXTS: dict[str, Callable[[Any], str]] = {
    "/v1/completions": lambda body: body["choices"][0]["text"],
    "/v1/chat/completions": lambda body: body["choices"][0]["message"]["content"],
    "/v1/responses": lambda body: body["output"][0]["content"][0]["text"],
    "/v1/messages": lambda body: body["content"][0]["text"],
    "/api/chat": lambda body: body["message"]["content"],
    "/api/generate": lambda body: body["response"],
}


@pytest.mark.parametrize("path", BODIES)
@bundled_app()
async def test_a_top_p_of_0_is_greedy(app: Any, path: str) -> None:
    async def text(**fields: Any) -> str:
        body = {name: value for name, value in BODIES[path].items() if name not in ("seed", "ignore_eos")}
        if path.startswith("/api"):
            fields = {"options": {"num_predict": 12, **fields}}
        else:
            body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 12}
        call = await ask(app, path, body | fields)
        assert call.status == 200, call.data
        return TEXTS[path](call.json)

    expected = await text(temperature=0)
    assert len(expected) > 5
    for _ in range(3):  # no seed
        assert await text(top_p=0) == expected


@bundled_app()
async def test_an_empty_prompt_generates_from_bos(app: Any, llm: nc.LLM) -> None:
    bos = llm.tokenizer.bos_token_id
    fields = {"max_tokens": 6, "seed": 1, "return_token_ids": True}
    expected = (await ask(app, "/v1/completions", {"prompt": [bos], **fields})).json
    for prompt in ("", [""]):
        found = (await ask(app, "/v1/completions", {"prompt": prompt, **fields})).json
        assert found["choices"][0]["text"] == expected["choices"][0]["text"]
        assert found["choices"][0]["prompt_token_ids"] == [bos]
        assert found["usage"]["prompt_tokens"] == 1
    both = (await ask(app, "/v1/completions", {"prompt": ["", "A"], "echo": True, **fields})).json
    assert both["choices"][0]["text"] == expected["choices"][0]["text"]
    beams = {"prompt": "", "use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0}
    assert (await ask(app, "/v1/completions", beams)).status == 200
    none = await ask(app, "/v1/completions", {"prompt": [], **fields})
    assert (none.status, none.json["error"]["param"]) == (400, "prompt")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@bundled_app()
async def test_a_prompt_that_fills_the_context_is_scored(app: Any, service: Any, llm: nc.LLM, stream: bool) -> None:
    length = llm.model.context_length
    ids = [0, *(5 + i % 900 for i in range(length - 1))]
    assert service.max_model_len == length
    score = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    for fields in (score, {**score, "n": 2}, {"echo": True, "max_tokens": 0, "stream": stream}):
        call = await ask(app, "/v1/completions", {"prompt": ids, **fields})
        assert call.status == 200, call.data
        choices = [part for frame in call.frames[:-1] for part in frame["choices"]] if stream else None
        choices = call.json["choices"] if choices is None else choices
        text = "".join(part["text"] for part in choices if part["index"] == 0)
        assert text == llm.tokenizer.decode(ids)
        if "logprobs" in fields:
            for index in range(fields.get("n", 1)):
                own = [one for c in choices if c["index"] == index for one in c["logprobs"]["token_logprobs"]]
                assert len(own) == length
                assert own[0] is None
                assert all(isinstance(one, float) for one in own[1:])
        assert {c["finish_reason"] for c in choices} - {None} == {"length"}
    for refused in ({"max_tokens": 0, "echo": True, "prompt": [*ids, 5]}, {"max_tokens": 1, "prompt": ids}):
        call = await ask(app, "/v1/completions", refused)
        assert (call.status, call.json["error"]["code"]) == (400, "context_length_exceeded")
