"""Limits: a value above a limit is rejected with both numbers, quickly; a value at the limit is accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling_params import FIELDS
from nucleate.server import limits as module
from nucleate.server.limits import LIMITED_FIELDS, ServerLimits
from nucleate.server.openai import messages
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint
from nucleate.server.openai.requests import ParsedRequest, read_body

DEFAULTS = nc.SamplingParams()
VOCABULARY = 50
HELLO = {"role": "user", "content": "Hello"}


def body(kind: Endpoint, **fields: Any) -> dict[str, Any]:
    return {**({"messages": [HELLO]} if kind is CHAT else {"prompt": "Hello"}), **fields}


def parse(kind: Endpoint, **fields: Any) -> ParsedRequest:
    return read_body(kind, body(kind, **fields), DEFAULTS)


def limit_error(fields: Mapping[str, Any], limits: ServerLimits | None = None) -> ParameterError | None:
    """The error of checking a body against the limits before it is parsed."""
    return error_of((limits or ServerLimits()).check_body, body(COMPLETIONS, **fields), VOCABULARY)


def error_of(check: Callable[..., object], *given_: Any) -> ParameterError | None:
    try:
        check(*given_)
    except ParameterError as error:
        return error
    return None


def ids(count: int) -> list[int]:
    return [1] * count


# limit: (its value, the field, a value with this size, the noun in the message)
SIZES: list[tuple[str, int, str, Any, str]] = [
    *(("max_completion_tokens", 7, name, int, "") for name in ("max_tokens", "max_completion_tokens")),
    *(("max_choices_per_request", 3, name, int, "") for name in ("n", "best_of")),
    *(("max_choices_per_request", 3, "prompt", lambda size, one=one: [one] * size, "prompts") for one in ("a", [1])),
    *(("max_logprobs", most, "logprobs", int, "") for most in (0, 4)),
    *(("max_logprobs", most, name, int, "") for most, name in ((2, "top_logprobs"), (4, "prompt_logprobs"))),
    *(("MAX_ENTRIES", 3, name, lambda size: ["a"] * size, "entries") for name in ("stop", "stop_regex")),
    ("MAX_ENTRIES", 3, "logit_bias", lambda size: dict.fromkeys(map(str, range(size)), 1.0), "entries"),
    ("MAX_ENTRIES", 3, "stop_token_ids", ids, "entries"),
    ("MAX_ENTRIES", 3, "bad_words", lambda size: ["a", [1, 2], "b", "c", "d"][:size], "entries"),
    ("MAX_SEQUENCE_BREAKERS", 3, "dry_sequence_breakers", lambda size: ["a"] * size, "entries"),
    ("MAX_CHARACTERS", 9, "stop", lambda size: ["a", "b" * (size - 1)], "characters"),
    ("MAX_CHARACTERS", 9, "stop", lambda size: "ä" * size, "characters"),
    ("MAX_CHARACTERS", 7, "bad_words", lambda size: ["a", [1, 2], "b" * (size - 3)], "characters"),
    ("MAX_CHARACTERS", 7, "bad_words", lambda size: [[1] * size], "characters"),
]


@pytest.mark.parametrize(
    ("limit", "allowed", "field", "sized", "noun"), SIZES, ids=lambda value: "" if callable(value) else str(value)
)
def test_one_more_than_allowed_is_rejected_with_both_numbers(
    limit: str, allowed: int, field: str, sized: Any, noun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit_error({field: sized(allowed + 1)}) is None
    if limit in ServerLimits.PARAMETERS:
        limits = ServerLimits(**{limit: allowed})
    else:
        limits = ServerLimits()
        monkeypatch.setattr(module, limit, allowed)
    assert limit_error({field: sized(allowed)}, limits) is None
    error = limit_error({field: sized(allowed + 1)}, limits)
    assert error is not None
    assert error.field == field
    assert f"at most {allowed} " in str(error)
    assert str(allowed + 1) in str(error)
    assert noun in str(error)


def test_every_numeric_limit_applies_to_a_field() -> None:
    assert LIMITED_FIELDS.keys() <= COMPLETIONS.field_names | CHAT.field_names
    assert {*LIMITED_FIELDS.values()} <= ServerLimits.PARAMETERS.keys()


def test_every_valid_stage_order_fits_the_limits() -> None:
    for order in (*FIELDS["order"].choices, [], [*REQUESTABLE], [*reversed(REQUESTABLE)]):
        assert limit_error({"order": order}) is None
    for order in ("a" * 10**6, ["a" * 10**6], ["top_p"] * 10**6):
        error = limit_error({"order": order})
        assert error is not None
        assert error.field == "order"


def test_allowed_token_ids_may_be_as_long_as_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    assert limit_error({"allowed_token_ids": ids(VOCABULARY)}) is None
    error = limit_error({"allowed_token_ids": ids(VOCABULARY + 1)})
    assert str(error) == "allowed_token_ids has 51 entries, but this server allows at most 50 entries"


def test_true_is_not_a_number_of_logprobs() -> None:
    assert limit_error({"logprobs": True}, ServerLimits(max_logprobs=0)) is None


def test_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGES", 3)
    parse(CHAT, messages=[HELLO] * 3)
    with pytest.raises(ParameterError, match="messages has 4 entries, but at most 3 are allowed"):
        parse(CHAT, messages=[HELLO] * 4)


def test_choices_of_all_prompts_are_counted() -> None:
    limits = ServerLimits(max_choices_per_request=6)
    good = [
        parse(COMPLETIONS, prompt=["a", "b"], n=3),
        parse(COMPLETIONS, prompt=["a", "b"], best_of=3),
        parse(CHAT, n=6),
    ]
    for request in good:
        limits.check_request(request, [[1]] * max(len(request.prompts), 1), 100)
    for field, request in {
        "n": parse(COMPLETIONS, prompt=["a", "b"], n=4),
        "best_of": parse(COMPLETIONS, prompt=["a", "b"], n=2, best_of=4),
        "prompt": parse(COMPLETIONS, prompt=["a"] * 7),
    }.items():
        with pytest.raises(ParameterError, match=f"{field} requests [78] choices .* at most 6 ") as caught:
            limits.check_request(request, [[1]] * len(request.prompts), 100)
        assert caught.value.field == field
    with pytest.raises(ParameterError, match=r"n requests 7 choices \(1 prompts, 7 choices each\)"):
        limits.check_request(parse(CHAT, n=7), [[1]], 100)


PROMPTS = [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize(
    ("fields", "num_logprobs", "field"),
    [
        ({}, 0, ""),
        ({"max_tokens": 10**6, "n": 128}, 0, ""),
        ({"prompt_logprobs": 0}, 5, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "n": 2}, 5 * 4, "prompt_logprobs"),
        ({"logprobs": 0, "max_tokens": 10}, 2 * 10, "logprobs"),
        ({"logprobs": 3, "max_tokens": 10, "n": 2}, 2 * 10 * 4 * 2, "logprobs"),
        ({"logprob_token_ids": [1, 2], "max_tokens": 10}, 2 * 10 * 3, "logprobs"),
        ({"logprobs": 3, "logprob_token_ids": [1, 2], "max_tokens": 10}, 2 * 10 * 6, "logprobs"),
        ({"best_of": 3, "max_tokens": 10}, 2 * 10 * 3, "best_of"),
        ({"prompt_logprobs": 1, "logprob_token_ids": [7, 8, 9]}, 5 * 5 + 2 * 16 * 4, "prompt_logprobs"),
        ({"logprobs": 0, "max_tokens": 99}, 97 + 98, "logprobs"),
        ({"echo": True}, 5, "echo"),
        ({"echo": True, "n": 3}, 15, "echo"),
        ({"echo": True, "n": 2, "logprobs": 3, "max_tokens": 10}, 5 * 4 * 2 + 2 * 10 * 4 * 2, "echo"),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, 5 * 2 + 2 * 2, "echo"),
    ],
)
def test_returned_logprobs_are_counted(
    fields: dict[str, Any], num_logprobs: int, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = parse(COMPLETIONS, prompt=PROMPTS, **fields)
    monkeypatch.setattr(module, "MAX_LOGPROBS_PER_RESPONSE", max(num_logprobs, 1))
    ServerLimits().check_request(request, PROMPTS, 100)
    if num_logprobs > 1:
        monkeypatch.setattr(module, "MAX_LOGPROBS_PER_RESPONSE", num_logprobs - 1)
        with pytest.raises(
            ParameterError, match=f"{field} requests {num_logprobs} .* at most {num_logprobs - 1} "
        ) as caught:
            ServerLimits().check_request(request, PROMPTS, 100)
        assert caught.value.field == field


def test_a_chat_without_max_tokens_counts_up_to_the_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    request = parse(CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=4)
    monkeypatch.setattr(module, "MAX_LOGPROBS_PER_RESPONSE", 5 * 90)
    ServerLimits().check_request(request, [[1] * 10], 100)
    monkeypatch.setattr(module, "MAX_LOGPROBS_PER_RESPONSE", 5 * 90 - 1)
    with pytest.raises(ParameterError, match=r"logprobs requests 450 .* at most 449 "):
        ServerLimits().check_request(request, [[1] * 10], 100)


def test_the_default_max_tokens_of_an_endpoint() -> None:
    for url, usual in {COMPLETIONS.url: 16, CHAT.url: None}.items():
        for limit, expected in {None: usual, 5: 5, 30: usual or 30}.items():
            endpoint = ServerLimits(max_completion_tokens=limit).cap_max_tokens(ENDPOINTS[url])
            assert endpoint.max_tokens == expected
            request = read_body(endpoint, body(ENDPOINTS[url]), DEFAULTS)
            assert request.params.max_tokens == expected


def test_limits_have_ranges() -> None:
    for name, parameter in ServerLimits.PARAMETERS.items():
        assert getattr(ServerLimits(), name) == parameter.default
        assert parameter.help
        if parameter.low is not None:
            with pytest.raises(ParameterError, match=f"^{name} must be "):
                ServerLimits(**{name: parameter.low if parameter.open_low else parameter.low - 1})
        if parameter.high is not None:
            assert getattr(ServerLimits(**{name: parameter.high}), name) == parameter.high
            with pytest.raises(ParameterError, match=f"^{name} must be "):
                ServerLimits(**{name: parameter.high + 1})
    with pytest.raises(ParameterError):
        ServerLimits(max_queued_seqs="many")
    with pytest.raises(ParameterError):
        ServerLimits(max_choices_per_request=None)
    assert isinstance(ServerLimits(request_timeout_seconds=5).request_timeout_seconds, float)


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats() | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=6),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=tiers.count(75, 300))
@given(value=VALUES, names=st.lists(st.sampled_from(sorted(COMPLETIONS.field_names | CHAT.field_names)), max_size=4))
def test_any_json_is_accepted_or_a_parameter_error(value: Any, names: list[str]) -> None:
    small = ServerLimits(max_completion_tokens=4, max_choices_per_request=4, max_logprobs=4)
    for given_body in (value, dict.fromkeys(names, value)):
        assert len(str(error_of(small.check_body, given_body, 5))) < 200


MILLION = 10**6
WORST: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    **{
        name: (COMPLETIONS, {name: value})
        for name, value in {
            "stop": ["a"] * MILLION,
            "bad_words": [[1] * MILLION],
            "logit_bias": dict.fromkeys(map(str, range(400_000)), 1.0),
            "allowed_token_ids": [1] * MILLION,
            "order": ["top_p"] * MILLION,
            "prompt": [""] * MILLION,
        }.items()
    },
    "one stop": (COMPLETIONS, {"stop": "a" * MILLION}),
    "bad words": (COMPLETIONS, {"bad_words": ["a"] * MILLION}),
    "name in the order": (COMPLETIONS, {"order": ["a" * MILLION]}),
    "lists of ids": (COMPLETIONS, {"prompt": [[1]] * MILLION}),
    "messages": (CHAT, {"messages": [HELLO] * 160_000}),
    "unknown names": (COMPLETIONS, dict.fromkeys(map(str, range(400_000)), 1)),
}


@pytest.mark.parametrize("name", WORST)
def test_rejecting_a_large_body_is_fast(name: str) -> None:
    kind, fields = WORST[name]
    large, best = body(kind, **fields), 9.0
    for _ in range(3):
        start = time.thread_time()  # CPU time, which does not depend on the load
        error = error_of(ServerLimits().check_body, large, 128_256)
        if error is None:  # some values are not checked by the limits
            error = error_of(read_body, kind, large, DEFAULTS)
        best = min(best, time.thread_time() - start)
        assert error is not None
        assert len(str(error)) < 2000
    assert best < 0.05  # without the limits up to 8 s


@pytest.mark.slow
def test_the_largest_allowed_body_is_parsed_quickly() -> None:
    vocabulary = 128_256
    lists = ("stop_token_ids", "suppress_token_ids", "xtc_exempt_token_ids", "logprob_token_ids")
    fields = {
        "prompt": ["a" * 10_000] * 256,
        "n": 2,
        **dict.fromkeys(("stop", "bad_words"), ["a" * 16] * 1024),
        "stop_regex": ["a" * 512] * 4,
        "logit_bias": dict.fromkeys(map(str, range(1024)), 1.0),
        **{name: [*range(1024)] for name in lists},
        "dry_sequence_breakers": ["a"] * 32,
        "allowed_token_ids": [*range(vocabulary)],
    }
    best = 9.0
    for _ in range(3):
        start = time.thread_time()
        ServerLimits().check_body(fields, vocabulary)
        read_body(COMPLETIONS, fields, DEFAULTS)
        best = min(best, time.thread_time() - start)
    assert best < 1.0  # 0.3 s on a slow machine
