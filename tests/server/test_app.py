"""The ASGI application without a socket: responses, and failures of the model, the engine, the client or the server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from served_apps import (
    CHAT,
    JSON,
    SIZE,
    TEXT,
    alive,
    ask,
    begin,
    check_error,
    ids_of,
    longest_hold,
    rule,
    serve_toy,
    slowly,
    toy_app,
    until,
)
from toy_models import PagedToy, Toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.models.protocol import ModelError
from nucleate.server import generation_endpoint
from nucleate.server import service as service_module
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service


@pytest.mark.slow
@toy_app(engine={"max_num_seqs": 4})
async def test_several_prompts_with_several_choices_each(app: Any) -> None:
    body = {**TEXT, "prompt": [[1, 2], [3], [4, 5, 6]], "n": 2}
    response = (await ask(app, "/v1/completions", body)).json
    assert [choice["index"] for choice in response["choices"]] == list(range(6))
    assert [choice["seed"] for choice in response["choices"]] == [3, 4] * 3
    counts = {"prompt_tokens": 6, "completion_tokens": 180, "total_tokens": 186}
    assert response["usage"] == {**counts, "prompt_tokens_details": response["usage"]["prompt_tokens_details"]}
    stream = await ask(app, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert {**stream.frames[-2]["usage"], "prompt_tokens_details": 0} == {**counts, "prompt_tokens_details": 0}
    for choice in response["choices"]:
        own = [f["choices"][0] for f in stream.frames[:-2] if f["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
    for prompt, pair in zip(body["prompt"], (response["choices"][i : i + 2] for i in (0, 2, 4)), strict=True):
        alone = (await ask(app, "/v1/completions", {**body, "prompt": prompt})).json["choices"]
        assert [one["token_ids"] for one in alone] == [one["token_ids"] for one in pair]


def fails_at_once(seen: tuple[int, ...]) -> np.ndarray:
    if 7 in seen:
        raise RuntimeError("/secret/path/model.bin is broken")
    return rule(seen)


@toy_app(of=fails_at_once)
async def test_a_model_that_fails_at_the_first_step(app: Any) -> None:
    other = begin(app, "/v1/completions", {**TEXT, "prompt": [1]})
    for stream in (False, True):
        call = await ask(app, "/v1/completions", {**TEXT, "stream": stream})
        check_error(call, 500, type="server_error", code="generation_failed")
        assert "secret" not in call.data.decode()
    await other.task
    assert other.status == 200


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_model_that_fails_during_generation(llm: nc.LLM, how: str) -> None:
    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if len(seen) < 10 or seen[0] != 7:
            return rule(seen)
        if how == "raises":
            raise RuntimeError("/secret/path")
        return np.full(SIZE, np.nan, np.float32)

    async def use(app: Any, service: Service) -> None:
        response = await ask(app, "/v1/completions", TEXT)
        check_error(response, 500, code="generation_failed")
        call = await ask(app, "/v1/completions", {**TEXT, "stream": True})
        assert call.status == 200
        assert call.over
        *chunks, error, done = call.frames
        assert 1 <= len(chunks) <= 8
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert error["error"]["type"] == "server_error"
        assert done == "[DONE]"
        assert "secret" not in call.data.decode()
        assert ("invalid logits" in error["error"]["message"]) == (how == "nan")
        both = await ask(app, "/v1/completions", {**TEXT, "prompt": [[7, 8, 9], [1, 2]], "stream": True})
        assert next(frame for frame in both.frames if "error" in frame)["error"]["code"] == "generation_failed"

    serve_toy(llm, use, fails)


@toy_app()
async def test_an_internal_error_is_a_500_without_details(
    app: Any, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    monkeypatch.setattr(service, "parse", lambda *_: {}["/secret"])
    call = await ask(app, "/v1/completions", TEXT)
    check_error(call, 500, type="server_error", param=None)
    assert call.headers["x-request-id"] in call.json["error"]["message"]
    assert "secret" not in call.data.decode()
    record = next(record for record in caplog.records if record.exc_info)
    assert record.exc_info[0] is KeyError
    assert record.fields["id"] == call.headers["x-request-id"]


@toy_app(of=slowly)
async def test_an_internal_error_during_a_stream(app: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    from nucleate.server.openai.streams import CompletionStream

    def fails(*_: object) -> bytes:
        raise ZeroDivisionError("/secret")

    call = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": True})
    await until(lambda: call.data)
    monkeypatch.setattr(CompletionStream, "frames", fails)
    await call.task
    assert call.over
    assert call.frames[-2]["error"]["type"] == "server_error"
    assert call.frames[-1] == "[DONE]"
    assert "secret" not in call.data.decode()
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


def test_a_stopped_engine(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Engine(PagedToy(Toy(slowly, SIZE, 256), 400, 4), llm.tokenizer, backend="reference")
        service = Service(llm, engine, "toy", nc.SamplingParams(), ServerLimits())
        async with alive(application(service, RequestLog())) as app:
            assert (await ask(app, "/health")).json == {"status": "ok"}
            stream = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": True})
            await until(lambda: stream.data)
            monkeypatch.setattr(engine, "step", lambda: 1 / 0)
            await asyncio.wait_for(stream.task, 10)
            assert stream.frames[-2]["error"]["code"] == "engine_stopped"
            for path, body in (("/health", None), ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
                check_error(await ask(app, path, body), 503, code="engine_stopped", type="server_error")
            assert (await ask(app, "/version")).status == 200

    asyncio.run(main())


def test_a_model_that_fails_is_an_error_at_startup(llm: nc.LLM) -> None:
    engine = Engine(PagedToy(Toy(lambda _: 1 / 0, SIZE, 256), 400, 4), llm.tokenizer, backend="reference")
    with pytest.raises(ModelError, match=r"cannot be run: .*division"):
        Service(llm, engine, "toy", nc.SamplingParams(), ServerLimits())


@toy_app(of=slowly)
async def test_a_client_disconnect_cancels_its_request(app: Any, service: Service) -> None:
    for stream in (False, True):
        sampled = service.engine.stats.sampled_tokens
        call = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": stream})
        await until(lambda sampled=sampled: service.engine.stats.sampled_tokens >= sampled + 5)
        call.leave()
        await asyncio.wait_for(call.task, 5)
        await asyncio.wait_for(until(lambda: not service.engine.stats.num_running_seqs), 5)
        at = service.engine.stats
        assert at.num_used_kv_blocks == 0
        assert at.sampled_tokens < sampled + 200
        await asyncio.sleep(0.03)
        assert service.engine.stats == at
    text = (await ask(app, "/metrics")).data.decode()
    assert 'nucleate_client_disconnects_total{model_name="toy"} 2.0' in text


@pytest.mark.slow
@toy_app(of=slowly)
async def test_a_slow_client_causes_back_pressure_and_loses_nothing(app: Any, service: Service) -> None:
    body = {**TEXT, "max_tokens": 240, "prompt": [7], "stream": True}
    expected = (await ask(app, "/v1/completions", {**body, "stream": False})).json["choices"][0]
    before = service.engine.stats.sampled_tokens
    call = begin(app, "/v1/completions", body)
    await until(lambda: call.data)
    call.reads.clear()
    await asyncio.sleep(0.6)
    sampled = service.engine.stats.sampled_tokens
    assert sampled < before + 200
    assert (await ask(app, "/v1/completions", {**TEXT, "prompt": [1]})).status == 200
    call.reads.set()
    await asyncio.wait_for(call.task, 10)
    chunks = [frame["choices"][0] for frame in call.frames[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    assert ids_of(chunks) == expected["token_ids"]
    assert len(chunks) < 200  # the rest came in fewer frames


def asleep(seen: tuple[int, ...]) -> np.ndarray:
    time.sleep(0.2 if 9 in seen else 0)
    return rule(seen)


@toy_app(of=asleep)
async def test_an_idle_stream_gets_keep_alive_comments(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_endpoint, "KEEP_ALIVE_SECONDS", 0.05)
    call = await ask(app, "/v1/completions", {**TEXT, "max_tokens": 2, "stream": True})
    assert call.frames[0] == ": keep-alive"
    assert call.frames.count(": keep-alive") >= 4
    assert call.frames[-1] == "[DONE]"


@pytest.mark.slow
@toy_app(of=slowly, limits=ServerLimits(request_timeout_seconds=0.2))
async def test_a_request_timeout(app: Any) -> None:
    body = {**TEXT, "max_tokens": 240}
    check_error(await ask(app, "/v1/completions", body), 504, code="timeout", type="server_error")
    stream = await ask(app, "/v1/completions", {**body, "stream": True})
    assert stream.frames[-2]["error"]["code"] == "timeout"
    assert stream.frames[-1] == "[DONE]"
    unread = begin(app, "/v1/completions", {**body, "stream": True})
    unread.reads.clear()
    await asyncio.wait_for(unread.task, 5)
    assert not unread.over


@toy_app()
async def test_a_preprocessing_timeout(app: Any, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PREPARE_TIMEOUT_SECONDS", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(service.llm, "encode", lambda *_: gate.wait(60))
    try:  # the error is sent while the text is still being tokenized
        check_error(await ask(app, "/v1/completions", {**TEXT, "prompt": "x"}), 504, code="timeout")
    finally:
        gate.set()


@pytest.mark.slow
@toy_app()
async def test_the_event_loop_is_not_blocked_by_a_long_prompt(app: Any) -> None:
    shares = []
    for turn in range(3):  # one is enough: the machine may run other programs
        call = begin(app, "/v1/completions", {"prompt": f"Once upon a time {turn} there was a fox. " * 30_000})
        shares.append(await longest_hold(call.task))
        check_error(call, 400, param="prompt")
    assert min(shares) < 0.4, shares


@pytest.mark.slow
@toy_app(of=slowly, limits=ServerLimits(max_queued_seqs=3), engine={"max_num_seqs": 2})
async def test_guidance_counts_as_two_sequences_and_its_errors_name_the_field(app: Any) -> None:
    guided = {**TEXT, "guidance_scale": 2.0, "negative_prompt": "A sad story"}
    calls = [begin(app, "/v1/completions", guided) for _ in range(9)]
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(call.status for call in calls) == [200] * 2 + [503] * 7  # four sequences of at most five
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        for field, values in (
            ("negative_prompt", {"guidance_scale": 2.0, "negative_prompt": "word " * 300}),
            ("negative_prompt", {"guidance_scale": 2.0, "negative_prompt": [SIZE]}),
            ("negative_prompt", {"guidance_scale": 2.0, "negative_prompt": "word " * 10_000}),
            ("guidance_scale", {"guidance_scale": "2"}),
            ("contrastive_beta", {"contrastive_beta": 1.0}),
        ):
            check_error(await ask(app, path, {**body, **values}), 400, param=field)


@pytest.mark.slow
@toy_app(of=slowly, limits=ServerLimits(max_queued_seqs=3), engine={"max_num_seqs": 2})
async def test_running_and_queued_requests_are_limited(app: Any) -> None:
    calls = [begin(app, "/v1/completions", TEXT) for _ in range(9)]
    await asyncio.gather(*(call.task for call in calls))
    good, full = ([call for call in calls if call.status == status] for status in (200, 503))
    assert len(good) == 5  # two run at a time, and three are queued
    for call in full:
        message = check_error(call, 503, code="queue_full", type="server_error")["message"]
        assert "needs 1 sequence, but 2 are running and 3 queued, of at most 5" in message
        assert call.headers["retry-after"] == "1"
    assert (await ask(app, "/v1/completions", {**TEXT, "n": 20})).status == 200  # no other request is in flight
    calls = [begin(app, "/v1/completions", {**TEXT, "n": 4}) for _ in range(2)]
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(call.status for call in calls) == [200, 503]


@toy_app(of=slowly, limits=ServerLimits(max_concurrent_requests=2))
async def test_requests_in_flight_are_limited(app: Any) -> None:
    calls = [begin(app, "/v1/completions", TEXT) for _ in range(3)]
    tokens = begin(app, "/tokenize", {"prompt": "x"})
    await asyncio.gather(*(call.task for call in (*calls, tokens)))
    assert sorted(call.status for call in calls) == [200, 200, 503]
    assert "2 requests are in flight" in check_error(tokens, 503, code="too_many_requests")["message"]
    assert (await ask(app, "/health")).status == 200


@toy_app(of=slowly)
async def test_draining_and_shutdown(app: Any, service: Service) -> None:
    body = {**TEXT, "max_tokens": 240}
    stream, response = (begin(app, "/v1/completions", {**body, "stream": stream}) for stream in (True, False))
    await until(lambda: stream.data)
    service.drain()
    for path, given in (("/v1/completions", TEXT), ("/tokenize", {"prompt": "x"}), ("/health", None)):
        late = await ask(app, path, given)
        check_error(late, 503, code="shutting_down", type="server_error")
        assert late.headers["retry-after"]
    assert not stream.over
    service.abort()
    await asyncio.gather(stream.task, response.task)
    assert stream.frames[-2]["error"]["code"] == "shutting_down"
    assert stream.frames[-1] == "[DONE]"
    check_error(response, 503, code="shutting_down")


@toy_app()
async def test_paths_and_methods(app: Any) -> None:
    for path in ("/v1", "/v1/completions/", "//v1/completions", "/v1/chat", "/docs/", "/health/"):
        check_error(await ask(app, path), 404)
    call = await ask(app, "/v1/completions")
    check_error(call, 405)
    assert call.headers["allow"] == "POST"
    check_error(await ask(app, "/health", {}, method="DELETE"), 405)
    check_error(await ask(app, "/v1/models/other"), 404, code="model_not_found", param="model")
    check_error(await ask(app, "/v1/completions", {**TEXT, "model": "o"}), 404, code="model_not_found")
    assert (await ask(app, "/v1/models/toy")).json == (await ask(app, "/v1/models")).json["data"][0]
    assert (await ask(app, "/v1/completions", {**TEXT, "model": "toy"})).status == 200
    assert "paths" in (await ask(app, "/openapi.json")).json
    text = (await ask(app, "/metrics")).data.decode()
    labels = {*re.findall(r'nucleate_http_requests_total\{.*route="(.*?)"', text)}
    assert labels == {"/v1/completions", "/v1/models", "/v1/models/{model:path}", "/health", "/openapi.json", "other"}


@toy_app(limits=ServerLimits(max_request_body_bytes=1024))
async def test_content_types(app: Any) -> None:
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"", b"application/jsonx"):
        check_error(await ask(app, "/v1/completions", TEXT, headers=((b"content-type", kind),)), 415)
    check_error(await ask(app, "/v1/completions", TEXT, headers=()), 415)
    good = await ask(app, "/v1/completions", TEXT, headers=((b"content-type", b"Application/JSON; charset=utf-8"),))
    assert good.status == 200
    check_error(await ask(app, "/v1/completions", TEXT, headers=(JSON, (b"content-encoding", b"gzip"))), 415)
    check_error(await ask(app, "/v1/completions", b"\xff{}"), 400, param="body")
    check_error(await ask(app, "/v1/completions", b"x" * 2000), 413, code="body_too_large")


@toy_app()
async def test_tokenize_and_detokenize(app: Any, llm: nc.LLM) -> None:
    text = "The fox said: \N{GRINNING FACE}!"
    tokenized = (await ask(app, "/tokenize", {"prompt": text, "return_token_strs": True})).json
    assert tokenized["tokens"] == llm.tokenizer.encode(text)
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 256
    bare = (await ask(app, "/tokenize", {"prompt": text, "add_special_tokens": False})).json["tokens"]
    assert (await ask(app, "/detokenize", {"tokens": bare})).json == {"prompt": text}
    assert (await ask(app, "/tokenize", {"prompt": text})).json["token_strs"] is None
    chat = (await ask(app, "/tokenize", {"messages": CHAT["messages"]})).json
    assert chat["tokens"] == llm.encode_chat(CHAT["messages"])
    assert (await ask(app, "/tokenize", {"prompt": ""})).status == 200
    check_error(await ask(app, "/detokenize", {"tokens": [SIZE + 5]}), 400, param="tokens")
    closed = (await ask(app, "/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})).json
    assert closed["tokens"] == chat["tokens"][: closed["count"]]
    assert closed["count"] < chat["count"]
    answered = [*CHAT["messages"], {"role": "assistant", "content": "Once upon"}]
    continued = (await ask(app, "/tokenize", {"messages": answered, "continue_final_message": True})).json
    prompt = (await ask(app, "/detokenize", {"tokens": continued["tokens"]})).json["prompt"]
    assert prompt.endswith("Once upon")
    body = {"messages": answered, "continue_final_message": True, "max_tokens": 1}
    assert (await ask(app, "/v1/chat/completions", body)).json["usage"]["prompt_tokens"] == continued["count"]
    info = (await ask(app, "/tokenizer_info")).json
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["eos_token"] == "<|endoftext|>"
    assert info["chat_template"] == llm.tokenizer.chat_template


@toy_app()
async def test_pipelines(app: Any) -> None:
    stages = [{"stage": "temperature", "t": 0.7}, {"stage": "top_p", "p": 0.9}]
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        shared = {**{name: value for name, value in body.items() if name in ("prompt", "messages")}, "seed": 4}
        fields = (await ask(app, path, {**shared, "temperature": 0.7, "top_p": 0.9, "max_tokens": 8})).json
        given = (await ask(app, path, {**shared, "pipeline": stages, "max_tokens": 8})).json
        assert given["choices"] == fields["choices"]
        drawn = [*stages, {"stage": "gumbel", "seed": 4}]
        unseeded = {name: value for name, value in shared.items() if name != "seed"}
        given = (await ask(app, path, {**unseeded, "pipeline": drawn, "max_tokens": 8})).json
        assert given["choices"] == fields["choices"]
    for bad, message in (
        ("temperature(0.7)", "pipeline must be a list of objects with a stage"),
        ([{"stage": "temprature"}], "pipeline[0] unknown stage 'temprature'; did you mean temperature"),
        ([{"stage": "logprobs", "n": 5000}], "set the field logprobs"),
        ([{"stage": "top_k"}] * 65, "at most 64"),
        ([{"stage": "logit_bias", "bias": {str(i): 1 for i in range(1025)}}], "at most 1024 entries"),
        ([{"stage": "dry", "dry_sequence_breakers": ["a"] * 33}], "at most 32 entries"),
        ([{"stage": "suppress", "ids": [1] * 1024}] * 60, "entries in all stages"),
    ):
        reply = await ask(app, "/v1/completions", {**TEXT, "pipeline": bad})
        check_error(reply, 400)
        assert message in reply.json["error"]["message"], reply.json
    reply = await ask(app, "/v1/completions", {"prompt": "a", "pipeline": stages, "temperature": 1.5})
    check_error(reply, 400, param="temperature")


@pytest.mark.slow
@toy_app()
async def test_max_tokens_beyond_the_context_is_an_error(app: Any, service: Service, llm: nc.LLM) -> None:
    count, context = len(llm.encode("The fox")), service.max_model_len
    for name, path, body in (
        ("max_tokens", "/v1/completions", {"prompt": "The fox"}),
        ("max_tokens", "/v1/chat/completions", CHAT),
        ("max_completion_tokens", "/v1/chat/completions", {"messages": CHAT["messages"]}),
    ):
        reply = await ask(app, path, body | {name: context})
        check_error(reply, 400, param=name, code="context_length_exceeded")
        assert f"maximum context length is {context} tokens" in reply.json["error"]["message"]
        check_error(await ask(app, path, body | {name: 10**9}), 400)
    short = llm.encode("The fox")
    body = {"prompt": [short, short * 2], "max_tokens": context - 2 * count}
    assert (await ask(app, "/v1/completions", body)).status == 200
    check_error(await ask(app, "/v1/completions", body | {"max_tokens": context - 2 * count + 1}), 400)
    full = {"prompt": [5] * (context - 1)}  # the default of max_tokens, 16, is cut to what fits
    assert (await ask(app, "/v1/completions", full)).json["usage"]["completion_tokens"] == 1


@toy_app(keys=["right"], origins=["https://page.example"])
async def test_api_keys_and_cors_origins(app: Any) -> None:
    key, origin = (b"authorization", b"Bearer right"), (b"origin", b"https://page.example")
    assert (await ask(app, "/health")).status == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/v1/completions"):
        check_error(await ask(app, path, headers=()), 401, code="invalid_api_key")
    assert (await ask(app, "/v1/completions", TEXT, headers=(JSON, key))).status == 200
    for path, body, status in (("/v1/models", None, 200), ("/v1/completions", {}, 400)):
        reply = await ask(app, path, body, headers=(JSON, key, origin))
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, "https://page.example")
    other = await ask(app, "/v1/models", headers=(key, (b"origin", b"https://other.example")))
    assert "access-control-allow-origin" not in other.headers


@toy_app()
async def test_no_origin_is_allowed_by_default(app: Any) -> None:
    headers = (JSON, (b"origin", b"https://page.example"), (b"access-control-request-method", b"POST"))
    for path, method in (("/v1/models", "GET"), ("/v1/completions", "OPTIONS"), ("/v1/completions", "POST")):
        call = await ask(app, path, {} if method == "POST" else None, method=method, headers=headers)
        assert not [name for name in call.headers if name.startswith("access-control")]


@toy_app()
async def test_the_log_has_a_line_per_request_and_no_prompt(app: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    await ask(app, "/v1/completions", {**TEXT, "prompt": "a very private matter", "n": 2})
    await ask(app, "/v1/completions", {"prompt": "a very private matter", "nonsense": "private"})
    good, bad = (record.fields for record in caplog.records if record.getMessage() == "request")
    assert (good["status"], bad["status"]) == (200, 400)
    assert good["completion_tokens"] == 60
    assert good["finish_reasons"] == ["length"] * 2
    assert 0 < good["time_to_first_token_seconds"] < good["duration_seconds"]
    assert "private" not in json.dumps([good, bad])
