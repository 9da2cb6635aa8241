"""The openai SDK against a server process: completions, logprobs and streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from server_process import Server

import nucleate as nc

openai = pytest.importorskip("openai")

MODEL = "nucleate-tiny"
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Tell me a story about a cat."}]
KINDS = pytest.mark.parametrize("kind", ["completions", "chat"])
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


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


# ---- completions


@pytest.mark.slow
def test_models_are_listed_and_an_unknown_one_is_not_found(client: Any) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    assert listed[0].object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


@pytest.mark.slow
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


def test_prompts_of_every_type(client: Any, llm: nc.LLM) -> None:
    ids = [llm.encode(PROMPT), llm.encode("The cat")]
    expected = [llm.generate([one], llm.default_params.replace(max_tokens=16, **SAMPLED))[0].text for one in ids]
    for prompt in ([PROMPT, "The cat"], ids):
        response = ask(client, "completions", prompt=prompt, **SAMPLED)
        assert [choice.text for choice in response.choices] == expected
        assert response.usage.prompt_tokens == sum(map(len, ids))
    assert ask(client, "completions", prompt=ids[1], **SAMPLED).choices[0].text == expected[1]


# ---- logprobs


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


# ---- streams


@pytest.mark.slow
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


def test_every_response_has_a_request_id(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    other = client.models.with_raw_response.list()
    assert other.headers["x-request-id"] != raw.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "chat", temperature=-1)
    assert caught.value.request_id
    assert str(client.base_url)
