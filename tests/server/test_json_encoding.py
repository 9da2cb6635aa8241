"""Encoding JSON in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.server.openai.json_encoding import SLICE, encode_json, json_parts, pieces

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=3), inner), max_leaves=60
)


def lazy(value: Any) -> Any:
    """The value with iterators in place of the lists that ``json_parts`` can reach."""
    if isinstance(value, dict):
        return {name: lazy(item) for name, item in value.items()}
    return map(lazy, value) if isinstance(value, list) and not any(isinstance(item, list) for item in value) else value


@settings(max_examples=tiers.count(60, 500))
@given(VALUES)
def test_parts_equal_the_whole(value: Any) -> None:
    expected = encode_json(value).decode()
    assert "".join(json_parts(value)) == expected
    assert "".join(json_parts(lazy(value))) == expected


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_pieces(size: int) -> None:
    value = {
        "choices": [{"index": index, "list": list(range(index))} for index in range(30)],
        "empty": [],
        "object": {},
    }
    made = list(pieces(json_parts({**value, "choices": iter(value["choices"])}), size))
    assert json.loads(b"".join(made)) == value
    assert all(len(piece) >= size for piece in made[:-1])
    assert list(pieces([])) == [b""]


def test_only_the_next_entries_are_made() -> None:
    made: list[int] = []

    def entries() -> Iterator[dict[str, Any]]:
        for index in range(100):
            made.append(index)
            yield {"text": "x" * 100, "more": [0] * (2 * SLICE)}

    first = next(pieces(json_parts({"choices": entries()}), 500))
    assert len(first) < 1000
    assert len(made) < 6
