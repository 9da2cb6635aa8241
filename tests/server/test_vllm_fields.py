"""Fields and endpoints beyond OpenAI's, as in vLLM: usage, token ids, truncation, priority, names, unknown fields."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from served_apps import CHAT, JSON, SIZE, TEXT, ask, check_error, text_of, toy_app

import nucleate as nc
from nucleate.server.limits import ServerLimits
from nucleate.server.service import Service

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PATHS = [(COMPLETIONS, TEXT), (CHATS, CHAT)]
BOTH = pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])
USAGE = {"stream_options": {"include_usage": True}, "stream": True}


@pytest.mark.slow
@BOTH
@toy_app()
async def test_seeds_of_openais_range(app: Any, path: str, body: dict[str, Any]) -> None:
    for seed in (-2, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 0):
        [choice] = (await ask(app, path, {**body, "seed": seed})).json["choices"]
        assert choice["seed"] == seed % 2**64
        [again] = (await ask(app, path, {**body, "seed": seed % 2**64})).json["choices"]
        assert again == choice
    seeds = {(await ask(app, path, {**body, "seed": -1})).json["choices"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3
    for seed in (-(2**63) - 1, 2**64, 1.0, "1", True, [1], 10**400, -(10**400)):
        check_error(await ask(app, path, {**body, "seed": seed}), 400, param="seed")


@BOTH
@toy_app()
async def test_the_fingerprint(app: Any, service: Service, llm: nc.LLM, path: str, body: dict[str, Any]) -> None:
    found = (await ask(app, path, body)).json["system_fingerprint"]
    assert found == service.fingerprint
    assert found.startswith(f"nucleate-{nc.__version__}-")
    stream = await ask(app, path, {**body, **USAGE})
    assert {frame["system_fingerprint"] for frame in stream.frames[:-1]} == {found}
    other = Service(llm, llm.new_engine(), "toy", nc.SamplingParams(top_p=0.5), ServerLimits())
    same = Service(llm, llm.new_engine(), "other name", nc.SamplingParams(), ServerLimits())
    assert other.fingerprint != found == same.fingerprint


@BOTH
@toy_app()
async def test_cached_tokens(app: Any, path: str, body: dict[str, Any]) -> None:
    body = {**body, "prompt": [*range(5, 45)]} if path == COMPLETIONS else body
    long = {"messages": [{"role": "user", "content": "A long story about a fox. " * 5}]}
    body = body if path == COMPLETIONS else {**body, **long}
    first = (await ask(app, path, {**body, "n": 3})).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 4  # choices share the prompt of their own request
    second = (await ask(app, path, body)).json["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens"] - 8 <= cached < second["prompt_tokens"]
    stream = await ask(app, path, {**body, **USAGE})
    assert stream.frames[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert stream.frames[-2]["choices"] == []
    text = (await ask(app, "/metrics")).data.decode()
    hits = next(line for line in text.splitlines() if line.startswith("nucleate_prefix_cache_hits_total"))
    assert float(hits.split()[-1]) >= 2 * cached


@toy_app()
async def test_cached_tokens_of_several_prompts(app: Any, llm: nc.LLM) -> None:
    one, other = [*range(5, 30)], [*range(100, 140)]
    await ask(app, COMPLETIONS, {**TEXT, "prompt": one})
    usage = (await ask(app, COMPLETIONS, {**TEXT, "prompt": [one, other], "n": 2})).json["usage"]
    assert usage["prompt_tokens"] == 65
    assert 15 <= usage["prompt_tokens_details"]["cached_tokens"] < 25
    story = "A fox who lived in a wood met a cat. " * 3
    [first], [second] = (llm.generate(story, max_tokens=2) for _ in range(2))
    assert second.usage.cached_tokens >= first.usage.cached_tokens
    assert 0 < second.usage.cached_tokens < second.usage.prompt_tokens


@pytest.mark.slow
@BOTH
@toy_app()
async def test_continuous_usage(app: Any, path: str, body: dict[str, Any]) -> None:
    body = {**body, "n": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *frames, last, _ = (await ask(app, path, {**body, "stream_options": options})).frames
    plain = (await ask(app, path, {**body, **USAGE})).frames
    for index in (0, 1):
        counted = 0
        for frame in frames:
            if frame["choices"][0]["index"] == index:
                counted += len(frame["choices"][0]["token_ids"])
                usage = frame["usage"]
                assert usage["completion_tokens"] == counted
                assert usage["total_tokens"] == counted + usage["prompt_tokens"]
                assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert 2 * counted == last["usage"]["completion_tokens"]
    assert {**last["usage"], "prompt_tokens_details": 0} == {**plain[-2]["usage"], "prompt_tokens_details": 0}
    assert all(frame["usage"] is None for frame in plain[:-2])
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        silent = (await ask(app, path, {**body, "stream_options": options})).frames  # as in vLLM
        assert not any("usage" in frame for frame in silent[:-1])
    call = await ask(app, path, {**body, "stream_options": {"continuous_usage_stats": 1}})
    check_error(call, 400, param="stream_options.continuous_usage_stats")
    assert (await ask(app, path, {**body, "stream_options": {"include_usage": None}})).status == 200


@pytest.mark.slow
@toy_app(limits=ServerLimits(max_choices_per_request=10**4))
async def test_prompt_token_ids(app: Any, llm: nc.LLM) -> None:
    body = {**TEXT, "prompt": [[1, 2], [3]], "n": 2, "return_token_ids": True}
    choices = (await ask(app, COMPLETIONS, body)).json["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2], [1, 2], [3], [3]]
    frames = (await ask(app, COMPLETIONS, {**body, "stream": True})).frames[:-1]
    found = [frame["choices"][0] for frame in frames if "prompt_token_ids" in frame["choices"][0]]
    shown = sorted((one["index"], *one["prompt_token_ids"]) for one in found)
    assert shown == [(0, 1, 2), (1, 1, 2), (2, 3), (3, 3)]
    chat = {**CHAT, "return_token_ids": True}
    ids = llm.encode_chat(CHAT["messages"])
    assert (await ask(app, CHATS, chat)).json["prompt_token_ids"] == ids
    first, *rest = (await ask(app, CHATS, {**chat, "stream": True})).frames[:-1]
    assert first["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in frame for frame in rest)
    for path, plain in PATHS:
        for value in (False, None):
            made = (await ask(app, path, {**plain, "return_token_ids": value})).json
            assert (made["choices"][0] if path == COMPLETIONS else made)["prompt_token_ids"] is None
        check_error(await ask(app, path, {**plain, "return_token_ids": 1}), 400, param="return_token_ids")
    many = {**TEXT, "prompt": [[5] * 200] * 30, "n": 100, "max_tokens": 1, "return_token_ids": True}
    check_error(await ask(app, COMPLETIONS, many), 400, param="return_token_ids")


@pytest.mark.parametrize("stream", [False, True])
@toy_app()
async def test_tokens_as_ids(app: Any, stream: bool) -> None:
    body = {**TEXT, "max_tokens": 3, "logprobs": 2, "return_tokens_as_token_ids": True, "stream": stream}
    call = await ask(app, COMPLETIONS, body)
    for part in call.frames[:-1] if stream else [call.json]:
        [choice] = part["choices"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
            assert name in top
            assert all(other.startswith("token_id:") for other in top)
    body = {**CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    call = await ask(app, CHATS, {**body, "stream": stream})
    choices = [part["choices"][0] for part in (call.frames[:-1] if stream else [call.json])]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or []]
    assert len(entries) == 3
    for entry in entries:
        for one in (entry, *entry["top_logprobs"]):
            assert one["token"] == f"token_id:{one['token_id']}"
    check_error(await ask(app, CHATS, {**CHAT, "return_tokens_as_token_ids": "x"}), 400)


@pytest.mark.slow
@toy_app()
async def test_truncated_prompts(app: Any, service: Service, llm: nc.LLM) -> None:
    async def ids_of(path: str, body: dict[str, Any]) -> Any:
        made = (await ask(app, path, {**body, "return_token_ids": True})).json
        return made["prompt_token_ids"] if path == CHATS else made["choices"][0]["prompt_token_ids"]

    assert service.max_model_len == 256
    long = [*range(1, 300)]
    body = {**TEXT, "prompt": long, "max_tokens": 20}
    assert await ids_of(COMPLETIONS, {**body, "truncate_prompt_tokens": -1}) == long[-236:]
    assert await ids_of(COMPLETIONS, {**body, "prompt": [1, 2], "truncate_prompt_tokens": 2**63 - 1}) == [1, 2]
    chat = {**CHAT, "messages": [{"role": "user", "content": "a " * 400}], "max_tokens": None}
    full = llm.encode_chat(chat["messages"])
    assert await ids_of(CHATS, {**chat, "truncate_prompt_tokens": -1}) == full[-255:]
    assert await ids_of(CHATS, {**chat, "truncate_prompt_tokens": 9}) == full[-9:]
    for count in (None, 237, 299):
        call = await ask(app, COMPLETIONS, {**body, "truncate_prompt_tokens": count})
        check_error(call, 400, code="context_length_exceeded")
    check_error(await ask(app, COMPLETIONS, {**body, "max_tokens": 300, "truncate_prompt_tokens": -1}), 400)
    for count in (0, -2, True, 1.0, "5", 2**63):
        call = await ask(app, COMPLETIONS, {**body, "truncate_prompt_tokens": count})
        check_error(call, 400, param="truncate_prompt_tokens")
    for side in ("middle", 1, ["left"], ""):
        check_error(await ask(app, COMPLETIONS, {**body, "truncation_side": side}), 400, param="truncation_side")
    for name, value in (("echo", True), ("suffix", "x")):
        call = await ask(app, COMPLETIONS, {**TEXT, "prompt": "a", name: value, "truncate_prompt_tokens": 5})
        check_error(call, 400, message=f"truncate_prompt_tokens cannot be combined with {name}")


@toy_app()
async def test_echo_in_a_chat(app: Any) -> None:
    started = [*CHAT["messages"], {"role": "assistant", "content": "Once upon"}]
    for messages, prefix in ((started, "Once upon"), (CHAT["messages"], "")):
        body = {**CHAT, "messages": messages, "continue_final_message": messages is started, "echo": True}
        plain = (await ask(app, CHATS, {**body, "echo": False})).json["choices"][0]
        found = (await ask(app, CHATS, body)).json["choices"][0]
        assert text_of(found) == prefix + text_of(plain)
        assert found["token_ids"] == plain["token_ids"]
        frames = (await ask(app, CHATS, {**body, "stream": True, "n": 2})).frames[:-1]
        own = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == 0]
        assert own[0]["delta"] == {"role": "assistant", "content": prefix}
        assert "".join(one["delta"].get("content", "") for one in own) == text_of(found)
    check_error(await ask(app, CHATS, {**CHAT, "echo": 1}), 400, param="echo")
    check_error(await ask(app, CHATS, {**CHAT, "echo": True, "max_tokens": 0}), 400, param="max_tokens")


@pytest.mark.slow
@toy_app(limits=ServerLimits(max_logprobs=-1))
async def test_logprobs_of_all_tokens(app: Any) -> None:
    short = {"max_tokens": 1, "logprobs": -1}
    [choice] = (await ask(app, COMPLETIONS, {**TEXT, **short, "return_tokens_as_token_ids": True})).json["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) == SIZE
    [choice] = (await ask(app, CHATS, {**CHAT, **short, "logprobs": True, "top_logprobs": -1})).json["choices"]
    entries = choice["logprobs"]["content"][0]["top_logprobs"]
    assert sorted(one["token_id"] for one in entries) == [*range(SIZE)]
    body = {**TEXT, "max_tokens": 1, "prompt_logprobs": -1}
    [choice] = (await ask(app, COMPLETIONS, body)).json["choices"]
    assert [step and len(step) for step in choice["prompt_logprobs"]] == [None, SIZE, SIZE]
    check_error(await ask(app, COMPLETIONS, {**TEXT, "max_tokens": 200, "logprobs": -1}), 400, param="logprobs")
    for value in (-2, -1.0, True):
        check_error(await ask(app, COMPLETIONS, {**TEXT, "logprobs": value}), 400, param="logprobs")


@toy_app()
async def test_logprobs_of_all_tokens_need_a_flag(app: Any) -> None:
    of_output = {COMPLETIONS: {"logprobs": -1}, CHATS: {"top_logprobs": -1, "logprobs": True}}
    for path, fields in [*of_output.items(), *((path, {"prompt_logprobs": -1}) for path in of_output)]:
        call, name = await ask(app, path, {**dict(PATHS)[path], **fields}), next(iter(fields))
        check_error(call, 400, param=name)
        assert "--max-logprobs -1" in call.json["error"]["message"]


@toy_app(service={"aliases": ("gpt-4", "a/b"), "root": "owner/model"})
async def test_several_model_names(app: Any) -> None:
    models = (await ask(app, "/v1/models")).json["data"]
    assert [model["id"] for model in models] == ["toy", "gpt-4", "a/b"]
    assert {model["root"] for model in models} == {"owner/model"}
    assert (await ask(app, "/v1/models/a/b")).json == models[2]
    for path, body in PATHS:
        for name in ("toy", "gpt-4", "a/b", None):
            made = await ask(app, path, {**body, "model": name})
            assert made.json["model"] == "toy"
        check_error(await ask(app, path, {**body, "model": "b"}), 404, code="model_not_found")
    tokens = await ask(app, "/tokenize", {"prompt": "a", "model": "gpt-4"})
    assert tokens.status == 200


@toy_app()
async def test_load_and_ping(app: Any, service: Service) -> None:
    assert (await ask(app, "/load")).json == {"server_load": 0}
    with service.request_slot(), service.request_slot():
        assert (await ask(app, "/load")).json == {"server_load": 2}
    assert (await ask(app, "/ping")).status == (await ask(app, "/ping", {}, method="POST")).status == 200
    service.drain()
    check_error(await ask(app, "/ping"), 503, code="shutting_down")


@toy_app(keys=["secret"])
async def test_ping_needs_no_key(app: Any) -> None:
    assert (await ask(app, "/ping")).status == 200
    assert (await ask(app, "/load")).status == 401


NOTHING: dict[str, Any] = {
    **dict.fromkeys(("cache_salt", "request_id", "guided_json", "a field of the future")),
    **dict.fromkeys(("echo", "return_token_ids", "return_tokens_as_token_ids"), False),
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "logits_processors": [],
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "priority": 0,
    "truncation_side": "left",
}


@BOTH
@toy_app()
async def test_fields_that_request_nothing(app: Any, path: str, body: dict[str, Any]) -> None:
    own = {"suffix": "", "add_special_tokens": True} if path == COMPLETIONS else {"tools": [], "documents": []}
    plain = await ask(app, path, body)
    call = await ask(app, path, {**body, **NOTHING, **own})
    assert call.json["choices"] == plain.json["choices"]
    assert "x-nucleate-ignored-fields" not in call.headers
    assert (await ask(app, "/tokenize", {"prompt": "a", "of the future": None})).status == 200
    check_error(await ask(app, "/tokenize", {"prompt": "a", "of the future": 1}), 400, param="of the future")
    for name, value in {"cache_salt": "x", "request_id": "x", "vllm_xargs": {"a": 1}, "logits_processors": [1]}.items():
        check_error(await ask(app, path, {**body, name: value}), 400, param=name)


@BOTH
@toy_app(service={"ignore_unknown_fields": True})
async def test_ignored_fields(app: Any, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    many = {f"{index}{'x' * 500}": 1 for index in range(500)}
    call = await ask(app, path, {**body, **many, "\ud800": 1})
    assert call.status == 200
    assert 1000 < len(call.headers["x-nucleate-ignored-fields"]) <= 2000
    assert len(caplog.records[-1].fields["ignored_fields"]) == 20
    for name, value in {"guided_json": {}, "audio": {"voice": "a"}, "temperature": -1}.items():
        if name != "audio" or path == CHATS:  # a constraint or an unsupported field is never dropped
            check_error(await ask(app, path, {**body, name: value}), 400, param=name)
    schema = (await ask(app, "/openapi.json")).json["components"]["schemas"]
    assert schema["ChatRequest"]["additionalProperties"] == {}


@toy_app()
async def test_invocations_take_both_bodies(app: Any) -> None:
    for path, body in PATHS:
        expected, found = [(await ask(app, each, {**body, "seed": 5})).json for each in (path, "/invocations")]
        assert found["choices"] == expected["choices"]
        assert (found["object"], found.keys()) == (expected["object"], expected.keys())
    check_error(await ask(app, "/invocations", {"prompt": "x", "messages": []}), 400, param="prompt")
    check_error(await ask(app, "/invocations", [1]), 400, param="body")


@toy_app()
async def test_the_load_is_reported_if_it_is_asked_for(app: Any) -> None:
    label = b"endpoint-load-metrics-format"
    for stream in (False, True):
        text, more = [
            (await ask(app, COMPLETIONS, {**TEXT, "stream": stream}, headers=(JSON, (label, kind)))).headers
            for kind in (b"text", b"JSON")
        ]
        assert re.fullmatch(
            r"TEXT named_metrics\.kv_cache_usage_perc=[0-9.]+, named_metrics\.num_requests_waiting=0\.0",
            text["endpoint-load-metrics"],
        )
        kind, _, report = more["endpoint-load-metrics"].partition(" ")
        assert kind == "JSON"
        assert json.loads(report)["named_metrics"].keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
        for headers in ((JSON,), (JSON, (label, b"xml"))):
            call = await ask(app, COMPLETIONS, {**TEXT, "stream": stream}, headers=headers)
            assert "endpoint-load-metrics" not in call.headers


@toy_app()
async def test_the_clients_request_id_is_returned(app: Any) -> None:
    for given, returned in (
        (b"trace-1/a=b", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"a b", False),
        (b"", False),
    ):
        found = (await ask(app, COMPLETIONS, TEXT, headers=(JSON, (b"x-request-id", given)))).headers["x-request-id"]
        assert (found == given.decode()) == returned
        assert returned or found.startswith("req_")


@toy_app()
async def test_thinking_token_budget_is_another_name(app: Any) -> None:
    for value in (-1, 1.5, "a"):
        check_error(await ask(app, CHATS, {**CHAT, "thinking_token_budget": value}), 400, param="thinking_token_budget")
    both = {**CHAT, "thinking_token_budget": 4, "max_reasoning_tokens": 5}
    check_error(await ask(app, CHATS, both), 400, param="thinking_token_budget")
    assert (await ask(app, CHATS, {**both, "max_reasoning_tokens": 4})).status == 200
    check_error(await ask(app, CHATS, {**CHAT, "include_reasoning": 1}), 400, param="include_reasoning")
