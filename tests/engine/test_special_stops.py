"""A stop string that is a special token ends the output, although special tokens have no text."""

from __future__ import annotations

from typing import Any

import chat_models
import pytest

import nucleate as nc

ASK = [{"role": "user", "content": "Hi"}]
USER = "<|user|>"


def forced(llm: nc.LLM, **values: Any) -> nc.CompletionOutput:
    """An output whose fourth token is the special token."""
    user = llm.tokenizer.find_token(USER)
    assert user is not None
    free = llm.generate("Once", max_tokens=3, temperature=0)[0].outputs[0]
    request = nc.Request(
        llm.encode("Once"),
        nc.SamplingParams(max_tokens=20, temperature=0, logit_bias={user: 100.0}, **values),
        output_ids=free.token_ids,
    )
    return nc.CompletionOutput.from_chunks(list(chat_models.run(llm, request)))


@pytest.mark.parametrize("stop", [[USER], ["zzz", USER], USER])
def test_it_ends_the_output_and_is_cut(llm: nc.LLM, stop: Any) -> None:
    free = llm.generate("Once", max_tokens=3, temperature=0)[0].outputs[0]
    output = forced(llm, stop=stop)
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", USER, free.text)
    assert output.token_ids[:-1] == free.token_ids
    assert len(output.token_ids) == 4


def test_it_is_shown_on_request(llm: nc.LLM) -> None:
    free = llm.generate("Once", max_tokens=3, temperature=0)[0].outputs[0]
    for values in ({}, {"skip_special_tokens": False}):
        output = forced(llm, stop=[USER], include_stop_str_in_output=True, **values)
        assert (output.stop_reason, output.text) == (USER, free.text + USER)
    assert forced(llm, stop=[USER], skip_special_tokens=False).text == free.text


def test_min_tokens_and_eos_go_first(llm: nc.LLM) -> None:
    output = forced(llm, stop=[USER], min_tokens=8)
    assert (output.stop_reason, len(output.token_ids)) == (USER, 8)
    eos = llm.tokenizer.pieces.tokens[min(llm.tokenizer.eos_token_ids)]
    whole = llm.chat(ASK, stop=[eos], temperature=0, max_tokens=400).outputs[0]
    assert whole.finish_reason == "length" or whole.stop_reason is None
    assert forced(llm, stop=["user"]).finish_reason == "length"
