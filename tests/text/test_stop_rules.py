"""What stop rules refuse, in one line that names the field, its value and what is allowed."""

from __future__ import annotations

import pytest

from nucleate.text.stop_rules import MAX_PATTERNS, MAX_STRING_CHARACTERS, MAX_STRINGS, StopRules

REFUSED = [
    ({"stop": "ab"}, "stop='ab': must be a tuple of strings"),
    ({"stop": ("a", "")}, "stop[1]='': must be a non-empty string"),
    ({"stop": (3,)}, "stop[0]=3: must be a non-empty string"),
    ({"stop": ("a",) * (MAX_STRINGS + 1)}, "at most 4096 are allowed"),
    ({"stop": ("a" * (MAX_STRING_CHARACTERS + 1),)}, "at most 65536 in all are allowed"),
    ({"stop_regex": ("(a",)}, "stop_regex='(a': not a pattern: missing )"),
    ({"stop_regex": ("a*",)}, "stop_regex='a*': must not match the empty string"),
    ({"stop_regex": ("a" * 1025,)}, "at most 1024 characters, not 1025"),
    ({"stop_regex": ("a",) * (MAX_PATTERNS + 1)}, "at most 16 are allowed"),
    ({"stop_regex": ("((a{1000}){1000}){1000}",)}, "are too many"),
    ({"stop_regex": ("(?x)((a{1 000}){10 00}){1000}",)}, "are too many"),
    ({"stop_regex": ("(?x)a{1#\n0000000}",)}, "are too many"),
    ({"stop_regex": ("(?:" * 20 + "a" + "){2}" * 20,)}, "are too many"),
    ({"stop_regex": ("(" * 500 + "a" + ")" * 500,)}, "nested too deeply"),
    ({"stop_regex": (r"\L<x>",)}, "not a pattern"),
    ({"stop_token_ids": {-1}}, "stop_token_ids=-1: a token id is an integer, 0 or more"),
    ({"eos_token_ids": 5}, "eos_token_ids=5: must be a set of token ids"),
    ({"eos_token_ids": [True]}, "eos_token_ids=True"),
    ({"stop_token_ids": range(70_000)}, "at most 65536 are allowed"),
    ({"stop_json": 1}, "stop_json=1: must be True or False"),
    ({"max_tokens": -1}, "max_tokens=-1: must be None or an integer, 0 or more"),
    ({"max_tokens": 1.5}, "max_tokens=1.5"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5: must not exceed max_tokens, 4"),
    ({"regex_seconds": 0}, "regex_seconds=0: must be above 0 and at most 10.0"),
    ({"regex_seconds": float("nan")}, "regex_seconds=nan"),
    ({"regex_seconds": 11}, "regex_seconds=11"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        StopRules(**fields)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_rules_are_values() -> None:
    rules = StopRules(stop=["a"], stop_token_ids=[1, 2])
    assert rules == StopRules(stop=("a",), stop_token_ids=frozenset({1, 2}))
    assert hash(rules)
    assert StopRules(stop_regex=(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",))
