"""The digits of numbers in JSON are limited, unless the schema requires more."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from bundled_grammars import TOKENIZER, allowed, bundled_compiler, grammar_of, mask_of

from nucleate.structured_output.llguidance_library import JsonPosition


def digits_first(steps: int = 60, **fields: Any) -> str:
    """The text of a model that prefers digits to everything else, in tokens of one character."""
    rank = {character: index for index, character in enumerate('123456789.0e-[]{}:,"')}
    order = sorted((rank[text], token) for token, text in TOKENIZER.pieces.table.items() if text in rank)
    matcher = grammar_of(**fields).matcher()
    text = ""
    for _ in range(steps):
        left = {*allowed(matcher)}
        token = next((token for _, token in order if token in left), None)
        if token is None:
            break
        matcher.accept_token(token)
        text += TOKENIZER.pieces.table[token]
    return text


@pytest.mark.parametrize(
    ("schema", "fields", "text"),
    [
        ({"type": "integer"}, {}, "1" * 16),
        ({"type": "integer"}, {"max_digits": 5}, "1" * 5),
        ({"type": "number"}, {"max_digits": 3}, "111.111e111"),
        ({"type": "integer", "minimum": 10**17}, {}, "1" * 18),
        ({"const": 1234567}, {"max_digits": 3}, "1234567"),
        ({"enum": [111, 1111112]}, {"max_digits": 3}, "1111112"),
    ],
    ids=str,
)
def test_digits_are_limited(schema: dict[str, Any], fields: dict[str, Any], text: str) -> None:
    assert digits_first(json_schema=schema, **fields) == text


def test_zero_means_no_limit() -> None:
    assert digits_first(steps=50, json_schema={"type": "integer"}, max_digits=0) == "1" * 50


def test_digits_of_strings_are_not_limited() -> None:
    schema = {"type": "string", "minLength": 30, "maxLength": 30}
    assert len(json.loads(digits_first(json_schema=schema, max_digits=2))) == 30


def test_copies_keep_the_number_of_digits() -> None:
    matcher = grammar_of(json_schema={"type": "integer"}, max_digits=2).matcher()
    one = next(token for token, text in TOKENIZER.pieces.table.items() if text == "1")
    for _ in range(2):
        matcher.accept_token(one)
        matcher = matcher.copy()
    assert one not in allowed(matcher)
    masks_RW = np.empty((1, 128), np.int32)
    bundled_compiler().fill_all([matcher], masks_RW)
    assert (masks_RW[0] == mask_of(matcher)).all()


def test_positions_in_json() -> None:
    text = r'{"a1\"2\\": [12, -345.6e78, "9\\", 1]}'
    position = JsonPosition()
    for index, character in enumerate(text):
        position = position.after(character.encode())
        before = re.sub(r'"(?:\\.|[^"\\])*"', "", text[: index + 1])
        if not position.in_string:
            assert position.digits == len(re.findall(r"\d*$", before)[0])
    assert position == JsonPosition().after(text.encode())
