"""The openai SDK against a server process: completions, streams and errors."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from server_process import Server, wait_until

import nucleate as nc

openai = pytest.importorskip("openai")

MODEL = "nucleate-tiny"
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Tell me a story about a cat."}]
RUNNING, WAITING = "nucleate_num_requests_running", "nucleate_num_requests_waiting"
SAMPLED_TOKENS = "nucleate_sampled_tokens_total"
KINDS = pytest.mark.parametrize("kind", ["completions", "chat"])
SAMPLED = {"temperature": 0.9, "seed": 7}
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
KEY = "sk-a-key-for-the-tests"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with an API key and very low limits."""
    with Server("--api-key", KEY, "--max-num-seqs", "1", "--max-queued-seqs", "1") as running:
        yield running


def client_of(server: Server, **options: Any) -> Any:
    return openai.OpenAI(**_options(server, options))


@asynccontextmanager
async def async_client(server: Server, **options: Any) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(**_options(server, options)) as made:
        yield made


def _options(server: Server, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 30.0, **options}


def ask(client: Any, kind: str, **fields: Any) -> Any:
    """Request a completion of the prompt, or a chat completion."""
    if kind == "chat":
        return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 16, **fields})
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 16, **fields})


def in_process(llm: nc.LLM, kind: str, **fields: Any) -> nc.Completion:
    """The output of the library for the same request."""
    params = llm.default_params.replace(**{"max_tokens": 16, **fields})
    return llm.chat(HELLO, params) if kind == "chat" else llm.generate(PROMPT, params)[0]


def text(choice: Any) -> str:
    return choice.text if hasattr(choice, "text") else choice.message.content


def added(choice: Any) -> str:
    """The text that a chunk of a stream adds."""
    return choice.text if hasattr(choice, "text") else choice.delta.content or ""


def is_idle(server: Server, headers: dict[str, str] | None = None) -> bool:
    return server.metric(RUNNING, headers) == server.metric(WAITING, headers) == 0


# ---- completions


def test_models_are_listed_and_an_unknown_one_is_not_found(client: Any) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    assert listed[0].object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


@KINDS
def test_a_response_has_the_librarys_output_in_openais_format(client: Any, llm: nc.LLM, kind: str) -> None:
    expected = in_process(llm, kind, **SAMPLED)
    response = ask(client, kind, **SAMPLED)
    choice = response.choices[0]
    assert text(choice) == expected.text
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (expected.usage.prompt_tokens, 16)
    assert response.usage.total_tokens == expected.usage.total_tokens
    assert response.object == {"chat": "chat.completion", "completions": "text_completion"}[kind]
    assert response.id.startswith({"chat": "chatcmpl-", "completions": "cmpl-"}[kind])
    assert response.model == MODEL
    assert abs(response.created - time.time()) < 60
    assert ask(client, kind, **SAMPLED).id != response.id
    if kind == "chat":
        assert choice.message.role == "assistant"


@KINDS
def test_the_reported_seed_reproduces_the_text(client: Any, kind: str) -> None:
    first, other = (ask(client, kind, temperature=1.5) for _ in range(2))
    seed = first.choices[0].seed
    again = ask(client, kind, temperature=1.5, seed=seed)
    assert (text(again.choices[0]), again.choices[0].seed) == (text(first.choices[0]), seed)
    assert other.choices[0].seed != seed
    assert text(other.choices[0]) != text(first.choices[0])


@KINDS
def test_several_choices(client: Any, llm: nc.LLM, kind: str) -> None:
    expected = in_process(llm, kind, n=3, **SAMPLED)
    response = ask(client, kind, n=3, **SAMPLED)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert [text(choice) for choice in response.choices] == [output.text for output in expected.outputs]
    assert len({text(choice) for choice in response.choices}) == 3
    assert response.usage.completion_tokens == expected.usage.completion_tokens


@KINDS
@pytest.mark.parametrize("listed", [True, False])
def test_stop_strings_end_the_output_and_are_excluded(client: Any, llm: nc.LLM, kind: str, listed: bool) -> None:
    complete = in_process(llm, kind, **SAMPLED, max_tokens=40).text
    stop = complete[len(complete) // 2 :][:4]
    response = ask(client, kind, **SAMPLED, max_tokens=40, stop=["never there", stop] if listed else stop)
    assert text(response.choices[0]) == complete[: complete.index(stop)]
    assert (response.choices[0].finish_reason, response.choices[0].stop_reason) == ("stop", stop)


def test_max_completion_tokens(client: Any) -> None:
    response = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=5, **SAMPLED)
    assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (5, "length")


@KINDS
def test_extension_parameters_are_read_from_extra_body(client: Any, llm: nc.LLM, kind: str) -> None:
    own = {"min_p": 0.02, "dry_multiplier": 0.8, "top_n_sigma": 2.0, "xtc_probability": 0.5, "repetition_penalty": 1.3}
    response = ask(client, kind, extra_body=own, max_tokens=32, **SAMPLED)
    assert text(response.choices[0]) == in_process(llm, kind, **own, max_tokens=32, **SAMPLED).text
    greedy = in_process(llm, kind, temperature=0.0)
    assert text(ask(client, kind, extra_body={"top_k": 1}, **SAMPLED).choices[0]) == greedy.text != ""


@KINDS
def test_logit_bias_forces_or_bans_a_token(client: Any, llm: nc.LLM, kind: str) -> None:
    first = in_process(llm, kind, temperature=0.0).outputs[0].token_ids[0]
    forbidden = ask(client, kind, temperature=0, logit_bias={str(first): -100}).choices[0]
    assert first not in forbidden.token_ids
    forced = ask(client, kind, seed=1, logit_bias={str(first): 100}, max_tokens=3).choices[0]
    assert forced.token_ids == [first] * 3


@KINDS
def test_null_equals_an_absent_field(client: Any, kind: str) -> None:
    names = ("top_p", "n", "stop", "stream", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "user")
    response = ask(client, kind, **SAMPLED, **dict.fromkeys(names))
    assert text(response.choices[0]) == text(ask(client, kind, **SAMPLED).choices[0])


def test_prompts_of_every_type(client: Any, llm: nc.LLM) -> None:
    ids = [llm.encode(PROMPT), llm.encode("The cat")]
    expected = [llm.generate([one], llm.default_params.replace(max_tokens=16, **SAMPLED))[0].text for one in ids]
    for prompt in ([PROMPT, "The cat"], ids):
        response = ask(client, "completions", prompt=prompt, **SAMPLED)
        assert [choice.text for choice in response.choices] == expected
        assert response.usage.prompt_tokens == sum(map(len, ids))
    assert ask(client, "completions", prompt=ids[1], **SAMPLED).choices[0].text == expected[1]


def test_best_of(client: Any, llm: nc.LLM) -> None:
    made = in_process(llm, "completions", n=5, logprobs=0, **SAMPLED).outputs
    best = sorted(made, key=lambda output: -(output.cumulative_logprob or 0) / len(output.token_ids))
    response = ask(client, "completions", n=2, best_of=5, **SAMPLED)
    assert [choice.text for choice in response.choices] == [output.text for output in best[:2]]
    assert [choice.index for choice in response.choices] == [0, 1]
    assert response.usage.completion_tokens == sum(len(output.token_ids) for output in made)


# ---- logprobs


def test_logprobs_of_a_completion(client: Any, llm: nc.LLM) -> None:
    steps = in_process(llm, "completions", logprobs=3, **SAMPLED).outputs[0].logprobs
    assert steps is not None
    reported = ask(client, "completions", logprobs=3, **SAMPLED).choices[0].logprobs
    assert reported.token_logprobs == pytest.approx([step.chosen.logprob for step in steps], abs=1e-3)
    for step, name, value, top in zip(
        steps, reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True
    ):
        assert top[name] == value
        assert len(top) == len({one.token_id for one in (step.chosen, *step.top)}) >= 3
    assert reported.text_offset[0] == 0


def test_logprobs_of_a_chat(client: Any, llm: nc.LLM) -> None:
    steps = in_process(llm, "chat", logprobs=5, **SAMPLED).outputs[0].logprobs
    assert steps is not None
    choice = ask(client, "chat", logprobs=True, top_logprobs=5, **SAMPLED).choices[0]
    content = choice.logprobs.content
    assert [one.logprob for one in content] == pytest.approx([step.chosen.logprob for step in steps], abs=1e-3)
    assert [len(one.top_logprobs) for one in content] == [5] * 16
    assert all(one.token.encode() == bytes(one.bytes) for one in content)
    assert "".join(one.token for one in content).strip() == choice.message.content.strip()
    assert ask(client, "chat", logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs_with_echo(client: Any, llm: nc.LLM) -> None:
    ids = llm.encode("The cat sat on the mat.")
    response = ask(client, "completions", prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0)
    reported, scored = response.choices[0].logprobs, nc.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    expected = llm.generate([ids], scored)[0].prompt_logprobs
    assert expected is not None
    assert reported.token_logprobs[0] is None is reported.top_logprobs[0]
    assert len(reported.tokens) == len(reported.token_logprobs) == len(reported.text_offset) == len(ids) + 1
    assert reported.token_logprobs[1:-1] == pytest.approx([step.chosen.logprob for step in expected if step], abs=1e-3)
    assert response.choices[0].text.startswith("The cat sat on the mat.")
    silent = ask(client, "completions", prompt=[ids], echo=True, logprobs=1, max_tokens=0)
    assert silent.choices[0].text == "The cat sat on the mat."
    assert silent.choices[0].logprobs.token_logprobs[1:] == pytest.approx(reported.token_logprobs[1:-1], abs=1e-3)


# ---- streams


@KINDS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.fast_cases(3)
def test_a_stream_has_the_same_content_as_the_response(client: Any, kind: str, count: int, usage: bool) -> None:
    fields = {"n": count, "max_tokens": 24, "stop": ["zzz"], **SAMPLED}
    complete = ask(client, kind, **fields)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    with ask(client, kind, stream=True, **options, **fields) as stream:
        chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == {"chat": "chat.completion.chunk", "completions": "text_completion"}[kind]
    if usage:
        last = chunks.pop()
        assert (last.choices, last.usage) == ([], complete.usage)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert all(("usage" in chunk.model_fields_set) == usage for chunk in chunks)
    texts = defaultdict(list)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index].append(choice)
    assert sorted(texts) == list(range(count))
    for choice in complete.choices:
        own = texts[choice.index]
        assert "".join(map(added, own)) == text(choice)
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert {one.seed for one in own} == {choice.seed}
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert len(own) > 1  # chunks that are delayed are sent together
        if kind == "chat":
            assert own[0].delta.role == "assistant"
            assert [one.delta.role for one in own[1:]] == [None] * (len(own) - 1)


@KINDS
def test_a_stream_has_the_same_logprobs(client: Any, kind: str) -> None:
    fields = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    complete = ask(client, kind, **fields, **SAMPLED).choices[0].logprobs
    with ask(client, kind, stream=True, **fields, **SAMPLED) as stream:
        parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs is not None]
    if kind == "chat":
        content = [step for part in parts for step in part.content]
        assert [step.token for step in content] == [step.token for step in complete.content]
        assert [step.logprob for step in content] == pytest.approx(
            [step.logprob for step in complete.content], abs=1e-3
        )
        assert [len(step.top_logprobs) for step in content] == [2] * 16
        return
    for name in ("tokens", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(complete, name)
    values = [value for part in parts for value in part.token_logprobs]
    assert values == pytest.approx(complete.token_logprobs, abs=1e-3)
    assert len([top for part in parts for top in part.top_logprobs]) == 16


def test_the_sdks_stream_helper(client: Any) -> None:
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "logprobs": True, "top_logprobs": 1, **SAMPLED}
    word = client.chat.completions.create(**fields).choices[0].message.content.split()[9]
    fields["stop"] = word  # the SDK raises for an output that max_tokens truncated
    complete = client.chat.completions.create(**fields)
    with client.chat.completions.stream(stream_options={"include_usage": True}, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == complete.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs == complete.choices[0].logprobs
    assert final.usage == complete.usage


def test_text_outside_ascii(client: Any) -> None:
    messages = [{"role": "user", "content": "Grüße 🐈‍⬛ \u2028 \x00 \ud7ff"}]
    response = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=1, temperature=3.0)
    with client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, seed=1, temperature=3.0, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == response.choices[0].message.content


def test_concurrent_streams_equal_single_requests(server: Server, llm: nc.LLM) -> None:
    prompts = [f"{name} and the {thing}" for name in ("Tom", "Lily", "A cat", "Once") for thing in "abcdefgh"]
    params = [llm.default_params.replace(max_tokens=24, seed=seed) for seed in range(32)]
    expected = [completion.text for completion in llm.generate(prompts, params)]

    async def one(client: Any, seed: int) -> str:
        stream = await ask(client, "completions", prompt=prompts[seed], max_tokens=24, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with async_client(server) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(32)))

    got = asyncio.run(all_of_them())
    # Sums in batches differ in their last digits, so one output may differ at a near-tie; a mix-up changes two.
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1
    assert len(set(expected)) == 32


# ---- rejected requests


@KINDS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 1.0),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", 0.5),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", ["x"] * 10_000),
        ("logit_bias", {"99999999": 1}),
        ("min_p", 2),
        ("stream_options", {"include_usage": True}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_invalid_field_is_named(client: Any, kind: str, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, kind, extra_body={field: value})
    error = caught.value
    assert (error.param, error.type, error.status_code) == (field, "invalid_request_error", 400)
    assert field in error.body["message"]
    assert len(error.body["message"]) < 2000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "somebody", "content": "hello"}]),
        ("response_format", {"type": "xml"}),
        ("top_logprobs", 3),
        ("prompt", "x"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_invalid_field_of_a_chat_is_named(client: Any, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "chat", extra_body={field: value})
    assert caught.value.param == field


@KINDS
def test_an_unknown_model_is_not_found(client: Any, kind: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, kind, model="gpt-4o")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@KINDS
def test_a_prompt_that_is_too_long_is_rejected(client: Any, kind: str) -> None:
    words = "word " * 3000
    prompt_fields = {"messages": [{"role": "user", "content": words}]} if kind == "chat" else {"prompt": words}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, kind, **prompt_fields)
    assert caught.value.param == "".join(prompt_fields)
    assert caught.value.code == "context_length_exceeded"  # client programs check for it


@KINDS
@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": []}, {"allowed_token_ids": [5], "suppress_token_ids": [5]}], ids=str
)
def test_banning_every_token_is_a_client_error(client: Any, kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):  # the client would retry a server error
        ask(client, kind, extra_body=fields)


def test_every_response_has_a_request_id(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    other = client.models.with_raw_response.list()
    assert other.headers["x-request-id"] != raw.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "chat", temperature=-1)
    assert caught.value.request_id
    assert str(client.base_url)


def test_an_api_key_is_required_if_the_server_has_one(guarded: Server) -> None:
    with client_of(guarded, api_key="sk-another") as client:
        for call in (client.models.list, lambda: ask(client, "chat"), lambda: ask(client, "completions", stream=True)):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert caught.value.code == "invalid_api_key"
            assert KEY not in str(caught.value)
            assert "sk-another" not in str(caught.value)
    with client_of(guarded, api_key=KEY) as client:
        assert text(ask(client, "chat").choices[0])


# ---- disconnects, timeouts and overload


@KINDS
def test_closing_a_stream_cancels_its_request(server: Server, client: Any, kind: str) -> None:
    wait_until(lambda: is_idle(server))
    before = server.metric(SAMPLED_TOKENS)
    with ask(client, kind, stream=True, **LONG) as stream:
        for _ in range(4):
            next(stream)
    took = wait_until(lambda: is_idle(server))
    assert took < 1
    assert server.metric(SAMPLED_TOKENS) - before < 400


@pytest.mark.parametrize("stream", [True, False])
def test_cancelling_a_task_cancels_its_request(server: Server, stream: bool) -> None:
    async def leave() -> None:
        async with async_client(server) as client:

            async def read() -> None:
                response = await ask(client, "chat", stream=stream, **LONG)
                async for _ in response:
                    pass

            task = asyncio.create_task(read())
            await asyncio.to_thread(wait_until, lambda: server.metric(RUNNING))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    wait_until(lambda: is_idle(server))
    before = server.metric(SAMPLED_TOKENS)
    asyncio.run(leave())
    assert wait_until(lambda: is_idle(server)) < 1
    assert server.metric(SAMPLED_TOKENS) - before < 600


def test_a_client_timeout_cancels_the_request(server: Server) -> None:
    with client_of(server, timeout=0.15) as client, pytest.raises(openai.APITimeoutError):
        ask(client, "completions", **LONG)
    assert wait_until(lambda: is_idle(server)) < 1


def test_an_overloaded_server_sends_retry_after(guarded: Server) -> None:
    async def crowd() -> tuple[str, str]:
        async with (
            async_client(guarded, api_key=KEY) as client,
            async_client(guarded, api_key=KEY, max_retries=9) as dogged,
        ):
            first = await ask(client, "chat", stream=True, **LONG)
            await anext(first)
            second = asyncio.create_task(ask(client, "chat"))
            await asyncio.to_thread(wait_until, lambda: guarded.metric(WAITING, AUTHORIZED) == 1)
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(client, "completions")
            assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            third = asyncio.create_task(ask(dogged, "chat"))
            await asyncio.sleep(0.1)
            await first.close()
            return text((await second).choices[0]), text((await third).choices[0])

    wait_until(lambda: is_idle(guarded, AUTHORIZED))
    assert all(asyncio.run(crowd()))
    wait_until(lambda: is_idle(guarded, AUTHORIZED))


def test_a_request_timeout_ends_with_an_error() -> None:
    flags = ("--request-timeout-seconds", "0.3", "--shutdown-timeout-seconds", "0")
    with Server(*flags) as short_timeout, client_of(short_timeout) as client:
        with pytest.raises(openai.APIStatusError) as late:
            ask(client, "chat", **LONG)
        assert late.value.status_code == 504
        with ask(client, "chat", stream=True, **LONG) as stream, pytest.raises(openai.APIError) as caught:
            list(stream)
        assert not isinstance(caught.value, openai.APIStatusError)
        assert caught.value.body["code"] == "timeout"


def test_shutdown_ends_streams_with_an_error() -> None:
    with Server("--shutdown-timeout-seconds", "0") as ending, client_of(ending) as client:
        with ask(client, "chat", stream=True, n=8, **LONG) as stream:
            next(stream)
            ending.process.terminate()
            with pytest.raises(openai.APIError) as caught:
                list(stream)
        assert caught.value.body["code"] == "shutting_down"
        assert ending.stop() == 0
