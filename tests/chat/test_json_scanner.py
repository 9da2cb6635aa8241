"""``JsonScanner`` accepts what ``json.loads`` accepts, up to its limits, in any parts."""

from __future__ import annotations

import json
import random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.chat.reader import MAX_DEPTH, MAX_NUMBER, JsonScanner, completed_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def scan(parts: list[str]) -> tuple[bool, bool, int]:
    """Whether the value is done, whether it failed, and the number of characters that were scanned."""
    scanner, length = JsonScanner(), 0
    for part in parts:
        end = scanner.feed(part)
        length += end
        if end < len(part):
            break
    return scanner.done, scanner.failed, length


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_reject)
    except ValueError:
        return False
    return True


def _reject(_: str) -> None:
    raise ValueError


@pytest.mark.slow
@settings(max_examples=tiers.count(60, 400))
@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]), st.randoms(use_true_random=False))
def test_a_value_ends_where_it_ends(
    value: object, ascii_only: bool, indent: int | str | None, rng: random.Random
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for after in (" ", ",x", "}", '"'):
        assert scan([text + after]) == (True, False, len(text))
        assert scan([*text, after])[:2] == (True, False)


@pytest.mark.slow
@settings(max_examples=tiers.count(150, 1000))
@given(VALUES, st.randoms(use_true_random=False))
def test_what_is_not_json_fails(value: object, rng: random.Random) -> None:
    text = list(json.dumps(value))
    for _ in range(rng.randrange(1, 3)):
        place = rng.randrange(len(text) + 1)
        text[place : place + rng.randrange(2)] = rng.choice(
            ['"', "\\", ",", "}", "]", "{", "1", "-", ".", "e", "u", " ", "\n", "é", ""]
        )
    changed = "".join(text)
    done, failed, length = scan([changed + " "])
    assert (done, failed) == scan([*changed, " "])[:2]
    assert length == sum(1 for _ in range(scan([*changed, " "])[2]))
    assert is_json(changed) == (done and not changed[length:].strip())


SYNTAX_ERRORS = [
    *("01", "1.", ".5", "-", "+1", "1e", "NaN", "Infinity", "nul", "'a'", '"\\x"', '"\\u12g4"', '"\n"'),
    *("[1,]", '{"a" 1}', "{1: 2}", '{"a": 1,}', "[1 2]"),
]


@pytest.mark.parametrize("text", SYNTAX_ERRORS)
def test_syntax_errors(text: str) -> None:
    assert scan([text + " "])[1]
    assert scan([*text, " "])[1]


def test_limits() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan([deep])[0]
    assert scan([f"[{deep}]"])[1]
    assert scan(["1" * MAX_NUMBER + " "])[0]
    assert scan(["1" * (MAX_NUMBER + 1) + " "]) == (False, True, MAX_NUMBER + 1)
    assert scan([*("1" * (MAX_NUMBER + 1)), " "]) == (False, True, MAX_NUMBER + 1)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.integers(0, 60))
@settings(max_examples=tiers.count(100, 1000), deadline=None)
def test_the_beginning_of_an_object_is_completed(value: dict[str, object], indent: int) -> None:
    """It has the members that are complete, as many as there are."""
    text = json.dumps(value, indent=indent % 3 or None)
    before: object = {}
    for end in range(len(text) + 1):
        found = json.loads(completed_object(text[:end]))
        assert _is_part(before, found)
        assert _is_part(found, value)
        before = found
    assert before == value


def _is_part(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _is_part(one, whole[key]) for key, one in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_is_part, part, whole))
    return part == whole
