"""Validation means the same by patterns and formats as masks do, and says what nothing checked."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import regex
from bundled_grammars import allowed, can_write, grammar_of

from nucleate.outputs import Finish, Validation, validation_text
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import Guide, guide
from nucleate.structured_output.guide import unchecked_formats
from nucleate.structured_output.pattern_syntax import python_pattern

PATTERNS = [
    r"^\d$", r"^\w$", r"^\s$", r"^\W$", r"^\D$", r"^\S$", r"^[\w]$", r"^[^\w]$", r"^[\s.]$", r"^[^\s]$", "^a$", "^.$",
    r"^\p{L}$", r"^\pL$", r"^\PL$", "^[[:alpha:]]$", "^[[:^digit:]]$", r"^\u00e9$", r"^\u{e9}$", r"^[\x{e9}-\u{f0}$]$",
    r"^a\z", "^(?i)É$", "^(?i:k)$", r"^\$$", "^[$]$", r"^[\]$]$", "a$|b$", r"^\\d$", r"^[\\d]$",
    r"^[\d-z]$", r"^\_$", "^[a-z&&[^b]]$", "^(?s:.)$", "[a-z]+$", "^$",
]  # fmt: skip
TEXTS = [
    "4", "৪", "e", "é", "É", " ", "\u00a0", "\x1c", "\ufeff", "\x85", "a", "a\n", "\n", "\r", "\u2028", "K", "\u212a",
    "k", "$", "]", "\\d", "\\", "d", "b", "-", "z", "_", "a\nb", "",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_the_same_texts_as_masks(pattern: str) -> None:
    compiled = grammar_of(json_schema={"type": "string", "pattern": pattern})
    translated = python_pattern(pattern)
    for text in TEXTS:
        if any(ord(letter) < 32 and letter not in "\t\n\r" for letter in text):
            continue  # masks do not write other control characters
        found = regex.search(translated, text, flags=regex.V1) is not None
        assert found == can_write(compiled, json.dumps(text, ensure_ascii=False)), (pattern, text)
        assert (compiled.validate(json.dumps(text), seconds=60) == []) == found


IGNORED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"type": "string", "pattern": "^(?!x)[a-z]$"}, "pattern with look-around", '"a"', '"x"'),
    ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern with a backreference", '"aa"', '"ab"'),
    ({"items": {"type": "string", "pattern": r"\bowl\b"}},
     "pattern with a word boundary at /items", '["owl"]', '["owls"]'),
    (
        {"type": "object", "patternProperties": {r"^\p{L}": {"type": "integer"}, "b$": {"minimum": 3}},
         "additionalProperties": False},
        "patternProperties with overlapping patterns",
        '{"ab": 3, "a": 1}',
        '{"ab": 2}',
    ),
    (
        {"type": "object", "patternProperties": {"^(?=a)": {"type": "integer"}}, "properties": {"q": {"type": "null"}}},
        "patternProperties with look-around",
        '{"q": null, "a": 1}',
        '{"a": "x"}',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "what", "valid", "invalid"), IGNORED)
def test_unsupported_patterns_can_be_ignored_and_are_validated(
    schema: dict[str, Any], what: str, valid: str, invalid: str
) -> None:
    compiled = grammar_of(json_schema=schema, on_unsupported="ignore")
    assert compiled.ignored == (what,)
    for text, errors in ((valid, 0), (invalid, 1)):
        assert can_write(compiled, text)
        assert len(compiled.validate(text, seconds=60)) == errors
    with pytest.raises(ParameterError) as caught:
        grammar_of(json_schema=schema)
    if "overlapping" not in what:
        assert str(caught.value).startswith(f"json_schema: cannot enforce {what}: ")


def test_disjoint_patterns_are_enforced_where_others_are_ignored() -> None:
    patterns: dict[str, Any] = {f"^k{number:03}": {"type": "null"} for number in range(80)}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    assert grammar_of(json_schema=schema, on_unsupported="ignore").ignored == ()
    schema["patternProperties"] = {**patterns, r"^k\p{N}": {}}
    ignored = grammar_of(json_schema=schema, on_unsupported="ignore").ignored
    assert ignored == ("patternProperties with overlapping patterns",)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a/b": {"type": "string", "format": "idn-email"},
        "day": {"type": "string", "format": "date"},
        "size": {"type": "integer", "format": "int32"},
        "format": {"enum": [{"format": "x"}]},
    },
    "if": {"properties": {"y": {"format": "regex"}}},
    "then": {"required": ["a/b"]},
}


def test_formats_that_nothing_checks_are_listed() -> None:
    expected = ("format 'idn-email' at /properties/a~1b", "format 'regex' at /if/properties/y")
    assert unchecked_formats(SCHEMA) == expected
    compiled = grammar_of(json_schema=SCHEMA, on_unsupported="ignore")
    assert compiled.ignored == ("if", "then", expected[0])
    found = Guide(compiled).add_text('{"a/b": "no address"}', Finish("stop"))
    assert found == Validation(compiled.ignored, (), expected)
    assert validation_text(found).endswith(f"the output is valid, except that nothing checks {', '.join(expected)}")
    assert unchecked_formats({"format": "color"}) == ("format 'color'",)


def test_formats_are_validated_as_masks_enforce_them() -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "date"}, "uniqueItems": True}
    compiled = grammar_of(json_schema=schema, on_unsupported="ignore")
    assert compiled.validate('["2024-02-29"]') == []
    assert compiled.validate('["2023-02-29"]') == ["$[0]: does not have the format 'date': '2023-02-29'"]
    assert allowed(compiled.matcher())


def test_a_pause_fails_a_long_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection takes CPU time, too: a second passes between any two steps."""
    schema = {"type": "array", "items": {"allOf": [{"type": "integer"}]}, "uniqueItems": True}
    compiled, clock = grammar_of(json_schema=schema, on_unsupported="ignore"), itertools.count()
    monkeypatch.setattr(guide, "thread_time", lambda: float(next(clock)))
    assert compiled.validate("[1, 2, 1]", seconds=0.1) == ["$: [1, 2, 1] has non-unique elements"]
    long = json.dumps([*range(2 * guide.UNTIMED_STEPS)])
    assert compiled.validate(long, seconds=0.1) == ["validation took longer than 0.1 s"]
