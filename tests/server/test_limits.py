"""Limits: one more than allowed is refused with both numbers, what is allowed is not, and refusing takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.core.parameter import ParameterError
from nucleate.params import FIELDS
from nucleate.presets import WANTED
from nucleate.server.limits import CHARACTERS, ENTRIES, LIMITS, NUMBERS, Limits
from nucleate.server.wire.requests import CHAT, COMPLETIONS, ENDPOINTS, Asked, Endpoint, read_body

DEFAULTS = nc.SamplingParams()
VOCABULARY = 50
HELLO = {"role": "user", "content": "Hello"}


def body(kind: Endpoint, **fields: Any) -> dict[str, Any]:
    return {**({"messages": [HELLO]} if kind is CHAT else {"prompt": "Hello"}), **fields}


def kind_of(field: str) -> Endpoint:
    return COMPLETIONS if field in COMPLETIONS.known else CHAT


def asked_of(kind: Endpoint, **fields: Any) -> Asked:
    return read_body(kind, body(kind, **fields), DEFAULTS)


def refusal(limits: Limits, kind: Endpoint, fields: Mapping[str, Any], *, early: bool) -> ParameterError | None:
    """What the limits say to a body: before it is read, or to what was read."""
    try:
        if early:
            limits.check_body(body(kind, **fields), VOCABULARY)
        else:
            limits.check(read_body(limits.endpoint(kind), body(kind, **fields), DEFAULTS), VOCABULARY)
    except ParameterError as error:
        return error
    return None


def ids(count: int) -> list[int]:
    return [1] * count


# limit: (its value, the field, a value with this size, how a message calls what is counted)
SIZES: list[tuple[str, int, str, Any, str]] = [
    ("max_tokens", 7, "max_tokens", lambda size: size, ""),
    ("max_tokens", 7, "max_completion_tokens", lambda size: size, ""),
    ("max_n", 3, "n", lambda size: size, ""),
    ("max_n", 3, "best_of", lambda size: size, ""),
    ("max_logprobs", 4, "logprobs", lambda size: size, ""),
    ("max_logprobs", 0, "logprobs", lambda size: size, ""),
    ("max_prompt_logprobs", 4, "prompt_logprobs", lambda size: size, ""),
    ("max_prompts", 3, "prompt", lambda size: ["a"] * size, "prompts"),
    ("max_prompts", 3, "prompt", lambda size: [[1]] * size, "prompts"),
    ("max_messages", 3, "messages", lambda size: [HELLO] * size, "entries"),
    ("max_stops", 3, "stop", lambda size: ["a"] * size, "entries"),
    ("max_stop_characters", 9, "stop", lambda size: ["a", "b" * (size - 1)], "characters"),
    ("max_stop_characters", 9, "stop", lambda size: "ä" * size, "characters"),
    ("max_patterns", 3, "stop_regex", lambda size: ["a"] * size, "entries"),
    ("max_pattern_characters", 5, "stop_regex", lambda size: ["a" * 5, "b" * size], "characters"),
    ("max_logit_bias", 3, "logit_bias", lambda size: dict.fromkeys(map(str, range(size)), 1.0), "entries"),
    ("max_breakers", 3, "dry_sequence_breakers", lambda size: ["a"] * size, "entries"),
    ("max_logprob_ids", 3, "logprob_token_ids", ids, "entries"),
    ("max_listed", 3, "stop_token_ids", ids, "entries"),
    ("max_listed", 3, "suppress_token_ids", ids, "entries"),
    ("max_listed", 3, "xtc_exempt_token_ids", ids, "entries"),
    ("max_listed", 3, "bad_words", lambda size: ["a", [1, 2], "b", "c", "d"][:size], "entries"),
    ("max_listed_characters", 7, "bad_words", lambda size: ["a", [1, 2], "b" * (size - 3)], "characters"),
    ("max_listed_characters", 7, "bad_words", lambda size: [[1] * size], "characters"),
    ("max_listed_characters", 7, "dry_sequence_breakers", lambda size: "b" * size, "characters"),
]


def told(value: Any) -> str:
    return "" if callable(value) else str(value)


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("limit", "allowed", "field", "sized", "noun"), SIZES, ids=told)
def test_one_more_than_allowed_is_refused_with_both_numbers(
    limit: str, allowed: int, field: str, sized: Any, noun: str, early: bool
) -> None:
    limits, kind = Limits(**{limit: allowed}), kind_of(field)
    assert refusal(limits, kind, {field: sized(allowed)}, early=early) is None
    assert refusal(Limits(), kind, {field: sized(allowed + 1)}, early=early) is None
    error = refusal(limits, kind, {field: sized(allowed + 1)}, early=early)
    assert error is not None
    assert error.field == field or (not early and field == "max_completion_tokens")
    assert f"at most {allowed} " in str(error)
    assert str(allowed + 1) in str(error)
    assert noun in str(error)


def test_every_limit_of_a_field_is_tested() -> None:
    sized = {limit for limit, *_ in SIZES}
    assert sized == {*ENTRIES.values(), *CHARACTERS.values(), *NUMBERS.values(), "max_prompts"}
    assert {name for name in LIMITS if name.startswith("max_")} == {
        *sized,
        *(name for name in LIMITS if name.startswith("max_form_")),  # in test_forms.py
        *("max_head", "max_body", "max_prompt_tokens", "max_answers", "max_told"),  # below, and where bytes come in
    }


def test_every_list_is_limited() -> None:
    lists = {name for name, field in FIELDS.items() if "tuple" in field.kind or "Mapping" in field.kind}
    texts = {name for name in lists if "str" in FIELDS[name].kind}
    for name in lists - {"allowed_token_ids"}:
        assert Limits().entries(name) is not None, name
    for name in texts:
        assert Limits().characters(name) is not None, name
    assert {*ENTRIES, *CHARACTERS, *NUMBERS} <= COMPLETIONS.known | CHAT.known


def test_every_order_that_there_is_fits() -> None:
    tight = Limits(max_listed=0, max_listed_characters=0)
    for order in (*FIELDS["order"].choices, [], [*WANTED], [*reversed(WANTED)]):
        for early in (True, False):
            assert refusal(tight, COMPLETIONS, {"order": order}, early=early) is None
    for order in ([*WANTED, "top_p"], "a" * 10**6, ["a" * 10**6]):
        error = refusal(Limits(), COMPLETIONS, {"order": order}, early=True)
        assert error is not None
        assert error.field == "order"


@pytest.mark.parametrize("early", [True, False])
def test_allowed_token_ids_may_be_as_long_as_the_vocabulary(early: bool) -> None:
    limits = Limits(max_listed=1)
    assert refusal(limits, COMPLETIONS, {"allowed_token_ids": ids(VOCABULARY)}, early=early) is None
    error = refusal(limits, COMPLETIONS, {"allowed_token_ids": ids(VOCABULARY + 1)}, early=early)
    assert error is not None
    assert str(error) == "allowed_token_ids has 51 entries, but at most 50 are allowed here"


def test_chat_has_its_own_names() -> None:
    limits = Limits(max_logprobs=2)
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}):
        assert refusal(limits, CHAT, fields, early=True) is refusal(limits, CHAT, fields, early=False) is None
    error = refusal(limits, CHAT, {"logprobs": True, "top_logprobs": 3}, early=True)
    assert str(error) == "top_logprobs must be at most 2 here, got 3"
    assert error is not None
    assert error.field == "top_logprobs"
    assert refusal(limits, CHAT, {"logprobs": True, "top_logprobs": 3}, early=False) is not None
    assert refusal(Limits(max_logprobs=0), CHAT, {"logprobs": True}, early=True) is None  # true is no 1


def test_parts_of_messages_and_values_for_the_template_are_counted() -> None:
    limits = Limits(max_messages=3, max_listed=4)
    part = {"type": "text", "text": ""}
    split = [{"role": "user", "content": [part] * 2}, {"role": "user", "content": [part]}]
    assert refusal(limits, CHAT, {"messages": split}, early=True) is None
    error = refusal(limits, CHAT, {"messages": [*split, {"role": "user", "content": [part]}]}, early=True)
    assert str(error) == "messages has 4 parts, but at most 3 are allowed here"
    assert refusal(limits, CHAT, {"chat_template_kwargs": {"a": [1, {"b": 2}]}}, early=True) is None
    for large in ({"a": [1, {"b": 2, "c": 3}]}, dict.fromkeys("abcde", 1), {"a": [1, 2, 3, 4]}):
        error = refusal(limits, CHAT, {"chat_template_kwargs": large}, early=True)
        assert error is not None
        assert error.field == "chat_template_kwargs"
        assert "at most 4" in str(error)


def test_answers_to_all_prompts_are_counted() -> None:
    limits = Limits(max_answers=6)
    limits.check(asked_of(COMPLETIONS, prompt=["a", "b"], n=3), VOCABULARY)
    limits.check(asked_of(COMPLETIONS, prompt=["a", "b"], n=1, best_of=3), VOCABULARY)
    limits.check(asked_of(CHAT, n=6), VOCABULARY)
    for field, asked in {
        "n": asked_of(COMPLETIONS, prompt=["a", "b"], n=4),
        "best_of": asked_of(COMPLETIONS, prompt=["a", "b"], n=2, best_of=4),
        "prompt": asked_of(COMPLETIONS, prompt=["a"] * 7),
    }.items():
        with pytest.raises(ParameterError, match=f"{field} asks for [78] answers .* at most 6 ") as caught:
            limits.check(asked, VOCABULARY)
        assert caught.value.field == field
    with pytest.raises(ParameterError, match=r"n asks for 7 answers \(1 prompts, 7 answers to each\)"):
        limits.check(asked_of(CHAT, n=7), VOCABULARY)


def test_prompts_are_counted_in_tokens() -> None:
    Limits().check_prompts([range(10**6)])
    Limits(max_prompt_tokens=3).check_prompts([[1, 2, 3], [], [1]])
    Limits(max_prompt_tokens=3).check_prompts([])
    with pytest.raises(ParameterError, match="prompt has 4 tokens, but at most 3 are allowed here"):
        Limits(max_prompt_tokens=3).check_prompts([[1], [1, 2, 3, 4]])


PROMPTS = [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize(
    ("fields", "told", "field"),
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
def test_what_is_told_is_counted(fields: dict[str, Any], told: int, field: str) -> None:
    asked = asked_of(COMPLETIONS, prompt=PROMPTS, **fields)
    Limits(max_told=max(told, 1)).check_told(asked, PROMPTS, 100)
    if told > 1:
        with pytest.raises(ParameterError, match=f"{field} has {told} .* at most {told - 1} are allowed") as caught:
            Limits(max_told=told - 1).check_told(asked, PROMPTS, 100)
        assert caught.value.field == field


def test_what_an_endpoint_gives_where_a_body_does_not_say() -> None:
    for url, usual in {COMPLETIONS.url: 16, CHAT.url: None}.items():
        for limit, expected in {None: usual, 5: 5, 30: usual or 30}.items():
            limits = Limits(max_tokens=limit)
            endpoint = limits.endpoint(ENDPOINTS[url])
            assert endpoint.max_tokens == expected
            asked = read_body(endpoint, body(ENDPOINTS[url]), DEFAULTS)
            assert asked.params.max_tokens == expected
            limits.check(asked, VOCABULARY)


def test_no_max_tokens_is_more_than_any_limit() -> None:
    with pytest.raises(ParameterError, match="max_tokens must be at most 5 here, got none"):
        Limits(max_tokens=5).check(asked_of(CHAT), VOCABULARY)


def test_defaults_of_the_server_are_checked_too() -> None:
    with pytest.raises(ParameterError, match="logprobs must be at most 20 here, got 21"):
        Limits().check(read_body(COMPLETIONS, body(COMPLETIONS), DEFAULTS.replace(logprobs=21)), VOCABULARY)


def test_limits_have_ranges() -> None:
    for name, parameter in LIMITS.items():
        assert getattr(Limits(), name) == parameter.default
        assert parameter.help
        if parameter.low is not None:
            with pytest.raises(ParameterError, match=f"^{name} must be "):
                Limits(**{name: parameter.low if parameter.open_low else parameter.low - 1})
        if parameter.high is not None:
            assert getattr(Limits(**{name: parameter.high}), name) == parameter.high
            with pytest.raises(ParameterError, match=f"^{name} must be "):
                Limits(**{name: parameter.high + 1})
    with pytest.raises(ParameterError):
        Limits(queue="many")
    with pytest.raises(ParameterError):
        Limits(max_stops=None)
    assert isinstance(Limits(request_seconds=5).request_seconds, float)


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats() | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=6),
    max_leaves=20,
)
SMALL = Limits(
    **dict.fromkeys(
        ["max_stops", "max_patterns", "max_logit_bias", "max_breakers", "max_logprob_ids", "max_listed"], 3
    ),
    **dict.fromkeys(["max_stop_characters", "max_pattern_characters", "max_listed_characters"], 6),
    **dict.fromkeys(["max_logprobs", "max_prompt_logprobs", "max_n", "max_tokens", "max_prompts", "max_messages"], 4),
)


def said(check: Callable[..., object], *given_: Any) -> ParameterError | None:
    try:
        check(*given_)
    except ParameterError as error:
        return error
    return None


@settings(max_examples=500, deadline=None)
@given(kind=st.sampled_from([COMPLETIONS, CHAT]), data=st.data())
def test_before_and_after_reading_the_same_is_refused(kind: Endpoint, data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(kind.known)), VALUES, max_size=2))
    given_body = body(kind, **fields)
    early = said(SMALL.check_body, given_body, 5)
    if said(read_body, SMALL.endpoint(kind), given_body, DEFAULTS) is not None:
        return  # whatever its size
    late = said(SMALL.check, read_body(SMALL.endpoint(kind), given_body, DEFAULTS), 5)
    only_early = early is not None and early.field in {"messages", "chat_template_kwargs"}
    assert (early is None) is (late is None) or only_early, (early, late)


@settings(max_examples=300)
@given(value=VALUES, names=st.lists(st.sampled_from(sorted(COMPLETIONS.known | CHAT.known)), max_size=4))
def test_no_json_is_more_than_a_parameter_error(value: Any, names: list[str]) -> None:
    for given_body in (value, dict.fromkeys(names, value)):
        assert len(str(said(SMALL.check_body, given_body, 5))) < 200


MILLION = 10**6
WORST: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "stop": (COMPLETIONS, {"stop": ["a"] * MILLION}),
    "one stop": (COMPLETIONS, {"stop": "a" * MILLION}),
    "bad words": (COMPLETIONS, {"bad_words": ["a"] * MILLION}),
    "bad ids": (COMPLETIONS, {"bad_words": [[1] * MILLION]}),
    "bias": (COMPLETIONS, {"logit_bias": dict.fromkeys(map(str, range(400_000)), 1.0)}),
    "allowed": (COMPLETIONS, {"allowed_token_ids": [1] * MILLION}),
    "order": (COMPLETIONS, {"order": ["top_p"] * MILLION}),
    "name in the order": (COMPLETIONS, {"order": ["a" * MILLION]}),
    "prompts": (COMPLETIONS, {"prompt": [""] * MILLION}),
    "lists of ids": (COMPLETIONS, {"prompt": [[1]] * MILLION}),
    "messages": (CHAT, {"messages": [HELLO] * 160_000}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 160_000}]}),
    "template": (CHAT, {"chat_template_kwargs": {"a": [1] * MILLION}}),
    "deep": (CHAT, {"chat_template_kwargs": {"a": [[[[1] * 1000] * 10] * 10] * 10}}),
    "unknown names": (COMPLETIONS, dict.fromkeys(map(str, range(400_000)), 1)),
}


@pytest.mark.parametrize("name", WORST)
def test_refusing_a_large_body_takes_no_time(name: str) -> None:
    kind, fields = WORST[name]
    large = body(kind, **fields)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        error = said(Limits().check_body, large, 128_256)
        if error is None:  # some are not for the limits to refuse
            error = said(read_body, kind, large, DEFAULTS)
        times.append(time.perf_counter() - start)
        assert error is not None
        assert len(str(error)) < 2000
    assert min(times) < 0.05  # without the limits up to 8 s


def test_the_most_that_is_allowed_is_read_soon() -> None:
    vocabulary = 128_256
    fields = {
        "prompt": ["a" * 10_000] * 256,
        "n": 2,
        "stop": [letter * 256 for letter in "abcdefghijklmnop"],
        "stop_regex": ["a" * 512] * 4,
        "bad_words": ["a" * 16] * 1024,
        "logit_bias": dict.fromkeys(map(str, range(1024)), 1.0),
        "stop_token_ids": [*range(1024)],
        "suppress_token_ids": [*range(1024)],
        "xtc_exempt_token_ids": [*range(1024)],
        "logprob_token_ids": [*range(128)],
        "dry_sequence_breakers": ["a"] * 32,
        "allowed_token_ids": [*range(vocabulary)],
    }
    best = 9.0
    for _ in range(3):
        start = time.thread_time()  # whatever else the machine does
        Limits().check_body(fields, vocabulary)
        Limits().check(read_body(COMPLETIONS, fields, DEFAULTS), vocabulary)
        best = min(best, time.thread_time() - start)
    assert best < 1.0  # 0.3 s on a slow machine


def test_where_a_chat_does_not_say_how_long_the_context_counts() -> None:
    asked = asked_of(CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=4)
    Limits(max_told=5 * 90).check_told(asked, [[1] * 10], 100)
    with pytest.raises(ParameterError, match=r"logprobs has 450 .* at most 449 are allowed"):
        Limits(max_told=5 * 90 - 1).check_told(asked, [[1] * 10], 100)
