"""Edges of fields that clients send to every API: top_p of 0, an empty prompt, a prompt that fills the context."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_client import ask, serve

import nucleate as nc

HELLO = [{"role": "user", "content": "Tell me a story."}]
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # body, top_p of 0, temperature of 0
    "/v1/completions": ({"prompt": "Once"}, {"top_p": 0}, {"temperature": 0}),
    "/v1/chat/completions": ({"messages": HELLO}, {"top_p": 0.0}, {"temperature": 0}),
    "/v1/responses": ({"input": "Tell me a story."}, {"top_p": 0}, {"temperature": 0}),
    "/v1/messages": ({"messages": HELLO}, {"top_p": 0}, {"temperature": 0}),
    "/api/chat": ({"messages": HELLO, "stream": False}, {"options": {"top_p": 0}}, {"options": {"temperature": 0}}),
    "/api/generate": ({"prompt": "A", "stream": False}, {"options": {"top_p": 0}}, {"options": {"temperature": 0}}),
}
LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}


def content(path: str, body: Any) -> Any:
    match path:
        case "/v1/completions":
            return body["choices"][0]["text"]
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return body["content"][0]["text"]
        case "/api/chat":
            return body["message"]["content"]
    return body["response"]


@pytest.mark.parametrize("path", BODIES)
def test_a_top_p_of_0_is_greedy(llm: nc.LLM, path: str) -> None:
    body, zero, greedy = BODIES[path]

    async def use(app: Any, service: Any) -> None:
        def with_length(own: dict[str, Any]) -> dict[str, Any]:
            if path.startswith("/api"):
                return {**body, "model": "tiny", "options": {**own["options"], "num_predict": 12}}
            return {**body, **own, "model": "tiny", LENGTHS.get(path, "max_tokens"): 12}

        expected = await ask(app, path, with_length(greedy))
        assert expected.status == 200, expected.data
        for _ in range(3):  # no seed
            found = await ask(app, path, with_length(zero))
            assert found.status == 200, found.data
            assert content(path, found.json) == content(path, expected.json)
        assert len(content(path, expected.json)) > 5

    serve(llm, use)


def test_an_empty_prompt_generates_from_bos(llm: nc.LLM) -> None:
    async def use(app: Any, service: Any) -> None:
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

    serve(llm, use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_scored(llm: nc.LLM, stream: bool) -> None:
    length = llm.model.context_length
    ids = [0, *(5 + i % 900 for i in range(length - 1))]

    async def use(app: Any, service: Any) -> None:
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

    serve(llm, use)
