"""The routing key: equal for requests with the same prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nucleate.scale.asgi_relay import KEY_CHARACTERS, routing_key

SYSTEM = {"role": "system", "content": "You are a poet."}
FIRST = {"role": "user", "content": "Write about a fox."}
MORE = [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Please."}]


def key(**body: Any) -> str | None:
    return routing_key(json.dumps(body).encode())


def test_all_turns_of_a_conversation_have_one_key() -> None:
    keys = {
        key(messages=messages) for messages in ([SYSTEM, FIRST], [SYSTEM, FIRST, *MORE], [SYSTEM, FIRST, *MORE, *MORE])
    }
    assert len(keys) == 1
    assert None not in keys


def test_conversations_with_one_system_message_have_different_keys() -> None:
    other = {"role": "user", "content": "Write about a cat."}
    assert key(messages=[SYSTEM, FIRST]) != key(messages=[SYSTEM, other])
    assert key(messages=[SYSTEM, FIRST]) != key(messages=[FIRST])


def test_only_the_prompt_counts() -> None:
    assert key(messages=[FIRST], temperature=0.5, stream=True) == key(messages=[FIRST], model="m", seed=1)
    assert routing_key(b'{"prompt": "x", "seed": 1}') == routing_key(b'{ "seed": 2, "prompt":"x"}')


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_texts_that_differ_late_have_one_key(name: str) -> None:
    document = "word " * KEY_CHARACTERS
    assert key(**{name: document + "a question"}) == key(**{name: document + "another"})
    assert key(**{name: "a question " + document}) != key(**{name: "another " + document})
    ids = list(range(KEY_CHARACTERS))
    assert key(**{name: [*ids, 1]}) == key(**{name: [*ids, 2]})


def test_several_prompts_go_where_the_first_one_goes() -> None:
    assert key(prompt=["x", "y"]) == key(prompt="x") == key(prompt=["x"])
    assert key(prompt=[[1, 2], [3]]) == key(prompt=[[1, 2]])


def test_instructions_of_other_apis_count() -> None:
    assert key(input="x", instructions="a") != key(input="x", instructions="b")
    assert key(messages=[FIRST], system="a") != key(messages=[FIRST], system="b")
    assert key(messages=[SYSTEM, FIRST]) is not None


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"{}", b'{"prompt": ""}', b"\xff", b"[" * 100_000], ids=lambda body: str(body[:14])
)
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert routing_key(body) is None


@pytest.mark.parametrize("messages", [[1], [{}], [{"role": 3}], [{"role": "system"}], [SYSTEM, 5]], ids=str)
def test_invalid_messages_are_left_to_the_server(messages: list[Any]) -> None:
    routing_key(json.dumps({"messages": messages}).encode())
