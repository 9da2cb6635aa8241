"""Beam search over the application: same results as ``LLM.beam_search``, and unsupported fields."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from served_apps import SIZE, ask, check_error, rule, toy_app

import nucleate as nc
from nucleate.generation.beam_search import beam_search
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS
from nucleate.server.openai.fields import BEAM_PARAMETER_FIELDS
from nucleate.server.openai.requests import read_body

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 12, "use_beam_search": True}
HELLO = [{"role": "user", "content": "Hello"}]
SEARCHES: list[dict[str, Any]] = [
    {"best_of": 4, "n": 2},
    {"n": 3},
    {"best_of": 1},
    {"best_of": 4, "n": 4, "length_penalty": -1.0, "early_stopping": True},
    {"best_of": 6, "n": 6, "num_beam_groups": 3, "diversity_penalty": 2.5, "early_stopping": "never"},
    {"best_of": 2, "ignore_eos": True, "temperature": 0, "seed": 5},
]


def searched(llm: nc.LLM, fields: dict[str, Any]) -> list[list[int]]:
    """The completions of the reference implementation."""
    num_beams = fields.get("best_of", fields.get("n", 1))
    names = ("length_penalty", "early_stopping", "diversity_penalty")
    found = beam_search(
        rule,
        BODY["prompt"],
        num_beams=num_beams,
        max_tokens=BODY["max_tokens"],
        eos_token_ids=() if fields.get("ignore_eos") else llm.tokenizer.eos_token_ids,
        num_return_sequences=fields.get("n", 1),
        num_beam_groups=fields.get("num_beam_groups", 1),
        **{name: fields[name] for name in names if name in fields},
    )
    return [list(beam.token_ids) for beam in found]


@pytest.mark.parametrize("fields", SEARCHES, ids=str)
@pytest.mark.fast_cases(0)
@toy_app()
async def test_the_best_beams_come_first_as_in_the_reference(app: Any, llm: nc.LLM, fields: dict[str, Any]) -> None:
    call = await ask(app, PATH, {**BODY, **fields})
    assert call.status == 200, call.data
    choices = call.json["choices"]
    assert [choice["token_ids"] for choice in choices] == searched(llm, fields)
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    made = sum(len(choice["token_ids"]) for choice in choices)
    usage = call.json["usage"]
    assert [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [3, made, made + 3]


@toy_app()
async def test_several_prompts_echo_and_logprobs(app: Any) -> None:
    body = {**BODY, "prompt": ["Lily", "The dog"], "best_of": 3, "n": 2}
    call = await ask(app, PATH, {**body, "echo": True})
    texts = [choice["text"] for choice in call.json["choices"]]
    assert len(texts) == 4
    assert all(text.startswith("Lily" if index < 2 else "The dog") for index, text in enumerate(texts))
    response = await ask(app, PATH, {**body, "logprobs": 2})
    for choice, text in zip(response.json["choices"], texts, strict=True):
        assert text.endswith(choice["text"])
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


@toy_app()
async def test_structured_output_in_a_chat(app: Any) -> None:
    body = {"messages": HELLO, "use_beam_search": True, "n": 3, "structured_outputs": {"regex": "[0-9]{2}-[a-c]"}}
    call = await ask(app, CHAT_PATH, {**body, "logprobs": True, "top_logprobs": 1})
    assert call.status == 200, call.data
    for choice in call.json["choices"]:
        assert re.fullmatch("[0-9]{2}-[a-c]", choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def broken(seen: tuple[int, ...]) -> np.ndarray:
    return np.full(SIZE, np.nan, np.float32) if len(seen) > 5 else rule(seen)


@toy_app(of=broken)
async def test_a_failed_search_is_an_error(app: Any) -> None:
    check_error(await ask(app, PATH, {**BODY, "best_of": 4, "ignore_eos": True}), 500)


REJECTED: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, name)
        for name, value in {
            "stream": True,
            "use_beam_search": "yes",
            "early_stopping": "sometimes",
            "best_of": 129,
            "length_penalty": "1",
            "diversity_penalty": -1,
            "structured_outputs": {"regex": "("},
            "stop": "x",
            "stop_regex": "x",
            "logit_bias": {"5": 1.0},
            "suppress_token_ids": [4],
            "logprob_token_ids": [4],
            "draw": "greedy",
            "prompt_logprobs": 1,
            "temperature": 0.5,
        }.items()
    ),
    ({"length_penalty": 1e9}, "length_penalty"),
    ({"best_of": 4, "num_beam_groups": 3}, "num_beam_groups"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"echo": True, "logprobs": 1}, "logprobs"),
    *(({"use_beam_search": False, name: 1}, name) for name in BEAM_PARAMETER_FIELDS),
]


@toy_app()
async def test_incompatible_fields_are_rejected_by_name(app: Any) -> None:
    for fields, name in REJECTED:
        check_error(await ask(app, PATH, {**BODY, **fields}), 400, param=name)


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_every_parameter_is_used_or_rejected(endpoint: Any) -> None:
    """Beam search rejects unsupported parameters instead of ignoring them, unless they have their default."""
    subject = {"prompt": "x"} if endpoint is COMPLETIONS else {"messages": HELLO}
    plain = read_body(endpoint, {**subject, "use_beam_search": True}, nc.SamplingParams()).beam_params
    for name, parameter in FIELDS.items():
        other = {"bool": not parameter.default, "float": 0.5, "int": 3}.get(parameter.kind)
        if other is None or name in ("n", "seed", "logprobs"):
            continue
        rejected = parsed = None
        try:
            parsed = read_body(endpoint, {**subject, "use_beam_search": True, name: other}, nc.SamplingParams())
        except ParameterError as error:
            rejected = error
        if parsed is None:
            assert (name.rpartition("_")[0] or name) in str(rejected)
        else:
            assert parsed.beam_params != plain, name


def test_the_sampling_defaults_of_the_model_are_ignored() -> None:
    defaults = nc.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=9)
    parsed = read_body(COMPLETIONS, {"prompt": "x", "use_beam_search": True}, defaults)
    assert parsed.beam_params is not None
    assert (parsed.beam_params.max_tokens, parsed.beam_params.num_beams) == (9, 1)


@pytest.mark.parametrize("best_of", [1, 4])
@toy_app()
async def test_cached_tokens(app: Any, best_of: int) -> None:
    body = {**BODY, "prompt": [*range(5, 45)], "best_of": best_of}
    counts = []
    for _ in range(2):
        usage = (await ask(app, PATH, body)).json["usage"]
        counts.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert usage["prompt_tokens"] == 40
    assert counts[0] == 0
    assert 32 <= counts[1] < 40
    sampled = (await ask(app, PATH, {"prompt": body["prompt"], "max_tokens": 2})).json["usage"]
    assert sampled["prompt_tokens_details"]["cached_tokens"] == counts[1]
