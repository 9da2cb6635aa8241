"""``suffix`` in completions: with a model that has fill-in-the-middle tokens, and without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_client import ask
from test_app import check_error, serve

import nucleate as nc
from nucleate.server.service import Service
from nucleate.tokenization.prompts import FillFormat, encode_fill

URL = "/v1/completions"
BODY = {"prompt": "Once", "suffix": " time", "max_tokens": 6, "seed": 2, "ignore_eos": False}


def test_the_prompt_has_the_suffix(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [llm.tokenizer.pieces.tokens[token] for token in (300, 301, 302)]
    monkeypatch.setattr("nucleate.tokenization.prompts.FORMATS", (FillFormat(*tokens),))

    async def use(app: Any, service: Service) -> None:
        ids = encode_fill(llm.tokenizer, "Once", " time")
        found = (await ask(app, URL, BODY)).json
        assert found["usage"]["prompt_tokens"] == len(ids)
        stops = [300, 301, 302]
        plain = {**BODY, "prompt": ids, "suffix": "", "stop_token_ids": stops}
        assert (await ask(app, URL, plain)).json["choices"] == found["choices"]
        stream = await ask(app, URL, {**BODY, "stream": True})
        text = "".join(frame["choices"][0]["text"] for frame in stream.frames[:-1])
        assert text == found["choices"][0]["text"]
        several = (await ask(app, URL, {**BODY, "prompt": ["Once", ""]})).json
        assert several["choices"][0]["text"] == text
        forced = await ask(app, URL, {**BODY, "logit_bias": {"301": 1000}})
        assert forced.json["choices"][0]["finish_reason"] == "stop"
        for more, name in (({"echo": True}, "echo"), ({"use_beam_search": True, "seed": None}, "use_beam_search")):
            call = await ask(app, URL, {**BODY, **more})
            check_error(call, 400, param="suffix", message=f"suffix cannot be combined with {name}")
        check_error(await ask(app, URL, {**BODY, "prompt": [1, 2]}), 400, param="suffix")
        check_error(await ask(app, URL, {**BODY, "prompt": "a " * 5000}), 400, code="context_length_exceeded")

    serve(llm, use)


@pytest.mark.parametrize("suffix", ["x", 1, ["x"], True, "\ud800"])
def test_errors(llm: nc.LLM, suffix: Any) -> None:
    async def use(app: Any, service: Service) -> None:
        check_error(await ask(app, URL, {**BODY, "suffix": suffix}), 400, param="suffix")

    serve(llm, use)


@pytest.mark.parametrize("suffix", ["", None])
def test_an_empty_suffix_is_none(llm: nc.LLM, suffix: Any) -> None:
    async def use(app: Any, service: Service) -> None:
        calls = await asyncio.gather(ask(app, URL, {**BODY, "suffix": suffix}), ask(app, URL, {**BODY, "suffix": ""}))
        assert calls[0].json["choices"] == calls[1].json["choices"]
        check_error(await ask(app, "/v1/chat/completions", {"messages": [], "suffix": "x"}), 400, param="suffix")

    serve(llm, use)
