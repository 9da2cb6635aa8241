"""Invalid stop regexes raise a one-line error that names the field, its value and the accepted values."""

from __future__ import annotations

import pytest

from nucleate.stopping.stop_matcher import MAX_PATTERNS, StopRules

INVALID = [
    ({"stop_regex": ("(a",)}, "stop_regex='(a': invalid pattern: missing )"),
    ({"stop_regex": ("a*",)}, "stop_regex='a*': must not match the empty string"),
    ({"stop_regex": ("a" * 1025,)}, "at most 1024 characters are allowed, got 1025"),
    ({"stop_regex": ("a",) * (MAX_PATTERNS + 1)}, "at most 16 are allowed"),
    ({"stop_regex": ("((a{1000}){1000}){1000}",)}, "too many repetitions"),
    ({"stop_regex": ("(?x)((a{1 000}){10 00}){1000}",)}, "too many repetitions"),
    ({"stop_regex": ("(?x)a{1#\n0000000}",)}, "too many repetitions"),
    ({"stop_regex": ("(?:" * 20 + "a" + "){2}" * 20,)}, "too many repetitions"),
    ({"stop_regex": ("(" * 500 + "a" + ")" * 500,)}, "nested too deeply"),
    ({"stop_regex": (r"\L<x>",)}, "invalid pattern"),
]


@pytest.mark.parametrize(("fields", "message"), INVALID, ids=[message[:30] for _, message in INVALID])
def test_an_invalid_regex_is_an_error(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        StopRules(**fields)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_valid_regex() -> None:
    assert StopRules(stop_regex=(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",))
