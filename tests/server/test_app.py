"""The ASGI application without a socket: responses, and failures of the model, the engine, the client or the server."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from asgi_client import JSON, alive, ask, begin
from toy_models import PagedToy, Toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.models.protocol import ModelError
from nucleate.server import generation_endpoint
from nucleate.server import service as service_module
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service, ServiceOptions

SIZE = 4096
TEXT = {"prompt": [7, 8, 9], "max_tokens": 30, "ignore_eos": True, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 3}
NOISE = np.random.default_rng(0).normal(0, 2, (50, SIZE)).astype(np.float32)
Use = Callable[[Any, Service], Awaitable[None]]


def rule(seen: tuple[int, ...]) -> np.ndarray:
    return NOISE[hash(seen) % len(NOISE)]


def slowly(seen: tuple[int, ...]) -> np.ndarray:
    time.sleep(0.002)
    return rule(seen)


def serve(llm: nc.LLM, use: Use, of: Any = rule, limits: ServerLimits | None = None, **options: Any) -> None:
    """Run a coroutine function with an application whose model has no weights."""
    runner = PagedToy(Toy(of, SIZE, 256), 400, 4)
    engine = Engine(runner, llm.tokenizer, backend="reference", **options.pop("engine", {}))
    own = ServiceOptions(**options.pop("service", {}))
    service = Service(llm, engine, "toy", nc.SamplingParams(), limits or ServerLimits(), own)

    async def main() -> None:
        async with alive(application(service, RequestLog(), **options)) as app:
            await asyncio.wait_for(use(app, service), 60)
            assert service.num_requests == service.num_sequences == 0
            for _ in range(2000):
                if not len(engine):
                    break
                await asyncio.sleep(0.001)
            assert not len(engine)

    asyncio.run(main())


def ids_of(parts: list[Any]) -> list[int]:
    return [token for part in parts for token in part["token_ids"]]


def check_error(call: Any, status: int, **fields: Any) -> dict[str, Any]:
    assert call.status == status
    assert call.over
    assert call.headers["content-type"] == "application/json"
    assert call.headers["x-request-id"].startswith("req_")
    error = call.json["error"]
    assert call.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert {name: error[name] for name in fields} == fields
    assert "Traceback" not in error["message"]
    assert "/src/" not in error["message"]
    return error


def test_responses_and_streams_have_the_same_content(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            response = await ask(app, path, body)
            stream = await ask(app, path, {**body, "stream": True})
            assert response.status == stream.status == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.frames[-1] == "[DONE]"
            parts = [frame["choices"][0] for frame in stream.frames[:-1]]
            text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
            choice = response.json["choices"][0]
            assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
            assert ids_of(parts) == choice["token_ids"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"

    serve(llm, use)


def test_several_prompts_with_several_choices_each(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        body = {**TEXT, "prompt": [[1, 2], [3], [4, 5, 6]], "n": 2}
        response = (await ask(app, "/v1/completions", body)).json
        assert [choice["index"] for choice in response["choices"]] == list(range(6))
        assert [choice["seed"] for choice in response["choices"]] == [3, 4] * 3
        counts = {"prompt_tokens": 6, "completion_tokens": 180, "total_tokens": 186}
        assert response["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
        stream = await ask(app, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert stream.frames[-2]["usage"] == response["usage"]
        for choice in response["choices"]:
            own = [f["choices"][0] for f in stream.frames[:-2] if f["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]
        for prompt, pair in zip(body["prompt"], (response["choices"][i : i + 2] for i in (0, 2, 4)), strict=True):
            alone = (await ask(app, "/v1/completions", {**body, "prompt": prompt})).json["choices"]
            assert [one["token_ids"] for one in alone] == [one["token_ids"] for one in pair]

    serve(llm, use, engine={"max_num_seqs": 4})


def test_a_model_that_fails_at_the_first_step(llm: nc.LLM) -> None:
    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if 7 in seen:
            raise RuntimeError("/secret/path/model.bin is broken")
        return rule(seen)

    async def use(app: Any, service: Service) -> None:
        other = begin(app, "/v1/completions", {**TEXT, "prompt": [1]})
        for stream in (False, True):
            call = await ask(app, "/v1/completions", {**TEXT, "stream": stream})
            check_error(call, 500, type="server_error", code="generation_failed")
            assert "secret" not in call.data.decode()
        await other.task
        assert other.status == 200

    serve(llm, use, fails)


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

    serve(llm, use, fails)


def test_an_internal_error_is_a_500_without_details(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def use(app: Any, service: Service) -> None:
        monkeypatch.setattr(service, "parse", lambda *_: {}["/secret"])
        call = await ask(app, "/v1/completions", TEXT)
        check_error(call, 500, type="server_error", param=None)
        assert call.headers["x-request-id"] in call.json["error"]["message"]
        assert "secret" not in call.data.decode()
        record = next(record for record in caplog.records if record.exc_info)
        assert record.exc_info[0] is KeyError
        assert record.fields["id"] == call.headers["x-request-id"]

    with caplog.at_level(logging.INFO, "nucleate.server"):
        serve(llm, use)


def test_an_internal_error_during_a_stream(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from nucleate.server.openai.streams import CompletionStream

    def fails(*_: object) -> bytes:
        raise ZeroDivisionError("/secret")

    async def use(app: Any, service: Service) -> None:
        call = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": True})
        while not call.data:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        monkeypatch.setattr(CompletionStream, "frames", fails)
        await call.task
        assert call.over
        assert call.frames[-2]["error"]["type"] == "server_error"
        assert call.frames[-1] == "[DONE]"
        assert "secret" not in call.data.decode()

    with caplog.at_level(logging.INFO, "nucleate.server"):
        serve(llm, use, slowly)
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


def test_a_stopped_engine(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Engine(PagedToy(Toy(slowly, SIZE, 256), 400, 4), llm.tokenizer, backend="reference")
        service = Service(llm, engine, "toy", nc.SamplingParams(), ServerLimits())
        async with alive(application(service, RequestLog())) as app:
            assert (await ask(app, "/health")).json == {"status": "ok"}
            stream = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": True})
            while not stream.data:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
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


def test_a_client_disconnect_cancels_its_request(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        for stream in (False, True):
            sampled = service.engine.stats.sampled_tokens
            call = begin(app, "/v1/completions", {**TEXT, "max_tokens": 200, "stream": stream})
            while service.engine.stats.sampled_tokens < sampled + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            call.leave()
            await asyncio.wait_for(call.task, 5)
            async with asyncio.timeout(5):
                while service.engine.stats.num_running_seqs:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            at = service.engine.stats
            assert at.num_used_kv_blocks == 0
            assert at.sampled_tokens < sampled + 200
            await asyncio.sleep(0.03)
            assert service.engine.stats == at
        text = (await ask(app, "/metrics")).data.decode()
        assert 'nucleate_client_disconnects_total{model_name="toy"} 2.0' in text

    serve(llm, use, slowly)


def test_a_slow_client_causes_back_pressure_and_loses_nothing(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        body = {**TEXT, "max_tokens": 240, "prompt": [7], "stream": True}
        expected = (await ask(app, "/v1/completions", {**body, "stream": False})).json["choices"][0]
        before = service.engine.stats.sampled_tokens
        call = begin(app, "/v1/completions", body)
        while not call.data:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
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

    serve(llm, use, slowly)


def test_an_idle_stream_gets_keep_alive_comments(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_endpoint, "KEEP_ALIVE_SECONDS", 0.05)

    def asleep(seen: tuple[int, ...]) -> np.ndarray:
        time.sleep(0.2 if 9 in seen else 0)
        return rule(seen)

    async def use(app: Any, service: Service) -> None:
        call = await ask(app, "/v1/completions", {**TEXT, "max_tokens": 2, "stream": True})
        assert call.frames[0] == ": keep-alive"
        assert call.frames.count(": keep-alive") >= 4
        assert call.frames[-1] == "[DONE]"

    serve(llm, use, asleep)


def test_a_request_timeout(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        body = {**TEXT, "max_tokens": 240}
        check_error(await ask(app, "/v1/completions", body), 504, code="timeout", type="server_error")
        stream = await ask(app, "/v1/completions", {**body, "stream": True})
        assert stream.frames[-2]["error"]["code"] == "timeout"
        assert stream.frames[-1] == "[DONE]"
        unread = begin(app, "/v1/completions", {**body, "stream": True})
        unread.reads.clear()
        await asyncio.wait_for(unread.task, 5)
        assert not unread.over

    serve(llm, use, slowly, ServerLimits(request_timeout_seconds=0.2))


def test_a_preprocessing_timeout(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(app: Any, service: Service) -> None:
        gate = threading.Event()
        monkeypatch.setattr(service.llm, "encode", lambda *_: gate.wait(60))
        try:  # the error is sent while the text is still being tokenized
            check_error(await ask(app, "/v1/completions", {**TEXT, "prompt": "x"}), 504, code="timeout")
        finally:
            gate.set()

    monkeypatch.setattr(service_module, "PREPARE_TIMEOUT_SECONDS", 0.1)
    serve(llm, use)


async def longest_hold(task: asyncio.Future[Any]) -> float:
    """The largest share of a task's time for which the event loop was blocked at once.

    Less than 50 ms counts as nothing: two threads of Python alternate every 5 ms, a large share of a short task.
    """
    start = last = time.perf_counter()
    worst = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    return worst / (last - start) if worst >= 0.05 else 0.0


def test_the_event_loop_is_not_blocked_by_a_long_prompt(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        shares = []
        for turn in range(3):  # one is enough: the machine may run other programs
            call = begin(app, "/v1/completions", {"prompt": f"Once upon a time {turn} there was a fox. " * 30_000})
            shares.append(await longest_hold(call.task))
            check_error(call, 400, param="prompt")
        assert min(shares) < 0.4, shares

    serve(llm, use)


def test_guidance_counts_as_two_sequences_and_its_errors_name_the_field(llm: nc.LLM) -> None:
    guided = {**TEXT, "guidance_scale": 2.0, "negative_prompt": "A sad story"}

    async def use(app: Any, service: Service) -> None:
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

    serve(llm, use, slowly, ServerLimits(max_queued_seqs=3), engine={"max_num_seqs": 2})


def test_running_and_queued_requests_are_limited(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
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

    serve(llm, use, slowly, ServerLimits(max_queued_seqs=3), engine={"max_num_seqs": 2})

    async def fill(app: Any, service: Service) -> None:
        calls = [begin(app, "/v1/completions", TEXT) for _ in range(3)]
        tokens = begin(app, "/tokenize", {"prompt": "x"})
        await asyncio.gather(*(call.task for call in (*calls, tokens)))
        assert sorted(call.status for call in calls) == [200, 200, 503]
        assert "2 requests are in flight" in check_error(tokens, 503, code="too_many_requests")["message"]
        assert (await ask(app, "/health")).status == 200

    serve(llm, fill, slowly, ServerLimits(max_concurrent_requests=2))


def test_draining_and_shutdown(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        body = {**TEXT, "max_tokens": 240}
        stream, response = (begin(app, "/v1/completions", {**body, "stream": stream}) for stream in (True, False))
        while not stream.data:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
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

    serve(llm, use, slowly)


def test_paths_and_methods(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        for path in ("/", "/v1", "/v1/completions/", "//v1/completions", "/v1/chat", "/docs/", "/health/"):
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

    serve(llm, use)


def test_content_types(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"", b"application/jsonx"):
            check_error(await ask(app, "/v1/completions", TEXT, headers=((b"content-type", kind),)), 415)
        check_error(await ask(app, "/v1/completions", TEXT, headers=()), 415)
        good = await ask(app, "/v1/completions", TEXT, headers=((b"content-type", b"Application/JSON; charset=utf-8"),))
        assert good.status == 200
        check_error(await ask(app, "/v1/completions", TEXT, headers=(JSON, (b"content-encoding", b"gzip"))), 415)
        check_error(await ask(app, "/v1/completions", b"\xff{}"), 400, param="body")
        check_error(await ask(app, "/v1/completions", b"x" * 2000), 413, code="body_too_large")

    serve(llm, use, limits=ServerLimits(max_request_body_bytes=1024))


def test_tokenize_and_detokenize(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
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

    serve(llm, use)


def test_pipelines(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
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

    serve(llm, use)


def test_max_tokens_beyond_the_context_is_an_error(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
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

    serve(llm, use)


def test_api_keys_and_cors_origins(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        key = (b"authorization", b"Bearer right")
        origin = (b"origin", b"https://page.example")
        assert (await ask(app, "/health")).status == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/v1/completions"):
            check_error(await ask(app, path, headers=()), 401, code="invalid_api_key")
        assert (await ask(app, "/v1/completions", TEXT, headers=(JSON, key))).status == 200
        reply = await ask(app, "/v1/models", headers=(key, origin))
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
        other = await ask(app, "/v1/models", headers=(key, (b"origin", b"https://other.example")))
        assert "access-control-allow-origin" not in other.headers
        preflight = (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")
        assert (await ask(app, "/v1/completions", method="OPTIONS", headers=(origin, *preflight))).status == 200

    serve(llm, use, keys=["right"], origins=["https://page.example"])

    async def plain(app: Any, service: Service) -> None:
        call = await ask(app, "/v1/models", headers=((b"origin", b"https://page.example"),))
        assert not [name for name in call.headers if name.startswith("access-control")]

    serve(llm, plain)


def test_the_log_has_a_line_per_request_and_no_prompt(llm: nc.LLM, caplog: Any) -> None:
    async def use(app: Any, service: Service) -> None:
        await ask(app, "/v1/completions", {**TEXT, "prompt": "a very private matter", "n": 2})
        await ask(app, "/v1/completions", {"prompt": "a very private matter", "nonsense": "private"})

    with caplog.at_level(logging.INFO, "nucleate.server"):
        serve(llm, use)
    good, bad = (record.fields for record in caplog.records if record.getMessage() == "request")
    assert (good["status"], bad["status"]) == (200, 400)
    assert good["completion_tokens"] == 60
    assert good["finish_reasons"] == ["length"] * 2
    assert 0 < good["time_to_first_token_seconds"] < good["duration_seconds"]
    assert "private" not in json.dumps([good, bad])
