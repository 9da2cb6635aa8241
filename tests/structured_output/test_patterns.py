r"""Patterns mean the same in all constraints, and errors name the part that is not supported and what to write."""

from __future__ import annotations

import itertools
import json
import re
import string
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import regex
from bundled_grammars import can_write, grammar_of

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.pattern_syntax import python_pattern, unsupported_syntax

ECMA = {"d": string.digits, "w": string.digits + string.ascii_letters + "_"}
ECMA["s"] = "\t\n\x0b\x0c\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B)))


WAYS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], str]]] = {
    "regex": (lambda pattern: {"regex": pattern}, str),
    "grammar": (lambda pattern: {"grammar": f"start: /{pattern}/"}, str),
    "tag": (
        lambda pattern: {"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}},
        str,
    ),
    "pattern": (
        lambda pattern: {"json_schema": {"type": "string", "pattern": f"^(?:{pattern})$"}},
        lambda text: json.dumps(text, ensure_ascii=False),
    ),
    "schema in a grammar": (
        lambda pattern: {"grammar": "start: %json " + json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})},
        lambda text: json.dumps(text, ensure_ascii=False),
    ),
    "patternProperties": (
        lambda pattern: {
            "json_schema": {
                "type": "object",
                "patternProperties": {f"^(?:{pattern})$": {"const": 1}},
                "additionalProperties": False,
                "minProperties": 1,
            },
            "whitespace": "none",
        },
        lambda text: json.dumps({text: 1}, ensure_ascii=False, separators=(",", ":")),
    ),
}
TEXTS = "4৪²eéſKk_- \t\n\xa0\u2028\x85\ufeff"
TABLE = [
    (r"\d", "4"),
    (r"\w", "4eKk_"),
    (r"\s", " \t\n\xa0\u2028"),
    (r"\D", "²eéſKk_- \t\n\xa0\u2028\x85\ufeff"),
    (r"\W", "- \t\n\xa0\u2028\x85\ufeff"),
    (r"\S", "4৪²eéſKk_-"),
    (r"[\d_]", "4_"),
    (r"[^\w-]", " \t\n\xa0\u2028\x85\ufeff"),
    (r"[\w-]", "4eKk_-"),
    (r"[\w-z]", "4eKk_-"),
    (r"[^\W]", "4eKk_"),
    (r"[^\D_]", "4"),
    (r"[^\S\n]", " \t\xa0\u2028"),
    (r"[\W\d]", "4- \t\n\xa0\u2028\x85\ufeff"),
    (r"[\w&&[^\d]]", "eKk_"),
    (r"(?i)\w", "4eſKk_"),
    (r"(?i:[\D])", "²eéſKk_- \t\n\xa0\u2028\x85\ufeff"),
    (r"(?i)\W", "- \t\n\xa0\u2028\x85\ufeff"),
    (r"(?i)k", "Kk"),
    (r"\\d|\-|[$]", "-"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("pattern", "accepted"), TABLE, ids=[pattern for pattern, _ in TABLE])
def test_classes_mean_the_same_everywhere(way: str, pattern: str, accepted: str) -> None:
    constraint, written = WAYS[way]
    grammar = grammar_of(**constraint(pattern))
    assert "".join(text for text in TEXTS if can_write(grammar, written(text))) == accepted


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", "dws")
def test_a_class_is_right_in_every_dialect(name: str) -> None:
    """A character of a class is in it by ECMA-262 and by Python, and so is one of a negated class not in it."""
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    python, ecma = set(re.findall(f"\\{name}", characters)), set(ECMA[name])
    inside, outside = (
        set(regex.findall(python_pattern(f"\\{each}"), characters, flags=regex.V1)) for each in (name, name.upper())
    )
    assert inside == python & ecma
    assert not outside & (python | ecma)
    assert set(string.printable) <= inside | outside


UNSUPPORTED = [
    (r"a\b", 1, "a word boundary", "[^0-9A-Za-z_]"),
    (r"\Ba", 0, "a word boundary", "[^0-9A-Za-z_]"),
    ("x(?=a)b", 1, "look-around", "alternatives"),
    ("(?!a)b", 0, "look-around", "alternatives"),
    ("(?<=a)b", 0, "look-around", "alternatives"),
    ("a(?<!b)", 1, "look-around", "alternatives"),
    (r"(a)\1", 3, "a backreference", "repeat the pattern"),
    (r"(?<n>a)\k<n>", 7, "a backreference", "repeat the pattern"),
    ("(?P<n>a)(?P=n)", 8, "a backreference", "repeat the pattern"),
    ("(?>a)b", 0, "an atomic group", "(?:...)"),
    ("a*+b", 2, "a possessive repetition", "remove it"),
    ("a{2}{3}", 4, "a repetition of a repetition", "(?:...)"),
    ("(a)?(?(1)b|c)", 4, "a conditional group", "alternatives"),
    ("(?#c)a", 0, "a comment", "remove it"),
    ("(?1)", 0, "a recursion", "grammar"),
    ("(?m)a", 0, "the flag m", "remove it"),
    ("(?i-u:a)", 0, "the flag u", "remove it"),
    ("(?x)a b", 0, "the flag x", "without spaces"),
    ("(?R)a", 0, "the flag R", "remove it"),
    (r"a\Z", 1, "an anchor", "write $"),
    (r"\Ga", 0, "an anchor", "remove it"),
    (r"\cA", 0, "a control escape", r"\x"),
    (r"\012", 0, "an octal escape", r"\x"),
    (r"[\b]", 1, "no character", r"\x08"),
    (r"é\h", 1, "a class of other dialects", r"[ \t]"),
    (r"\y", 0, "an unknown escape", "write y"),
    (r"[a-\d]", 3, "the end of a range", r"\-"),
    ("[[a]]", 1, "a class in a class", r"\["),
    ("[a--b]", 2, "a set operation", r"\-"),
    ("[a&&b]", 4, "a set operation", r"\&"),
    ("[^]a]", 2, "at the beginning of a class", r"\]"),
    ("a^b", 1, "an anchor after text", "beginning"),
    ("(a$|b)c", 2, "an anchor before text", "end"),
]
INVALID = [
    ("b(a", 1, "never closed", r"\("),
    ("b[a", 1, "never closed", r"\["),
    ("a)", 1, "never opened", r"\)"),
    ("a|*b", 2, "without a part to repeat", r"\*"),
    ("a{3,2}", 1, "reversed", "{2,3}"),
    ("a{,3}", 1, "no count", "{0,3}"),
    ("a{ 1, 2}", 1, "no count", "{1,2}"),
    (r"\x4", 0, "an incomplete escape", r"\x"),
]


@pytest.mark.parametrize(
    ("pattern", "offset", "kind", "hint"), UNSUPPORTED + INVALID, ids=lambda value: str(value)[:14]
)
def test_errors_name_the_place_and_what_to_write(pattern: str, offset: int, kind: str, hint: str) -> None:
    for way, place in (
        ("regex", f"regex: at offset {offset}: "),
        ("grammar", f"grammar: in line 1, column {offset + 9}: "),
        ("tag", f"structural_tag.format: at offset {offset}: "),
    ):
        with pytest.raises(ParameterError) as caught:
            grammar_of(**WAYS[way][0](pattern))
        assert str(caught.value).startswith(place)
        assert kind in str(caught.value)
        assert hint in str(caught.value)
    for keyword, schema in (
        ("pattern", {"items": {"pattern": pattern}}),
        ("patternProperties", {"items": {"patternProperties": {pattern: {}}, "additionalProperties": False}}),
    ):
        for field, constraint in (
            ("json_schema", {"json_schema": schema}),
            ("grammar: %json", {"grammar": f"start: %json {json.dumps(schema)}"}),
        ):
            with pytest.raises(ParameterError) as caught:
                grammar_of(**constraint)
            message = str(caught.value)
            assert message.startswith(f"{field}: ")
            assert f" {keyword} " in message
            assert " at /items: " in message
            assert f"at offset {offset}" in message
            assert kind in message
            assert hint in message


def test_a_place_in_a_grammar_is_a_line_and_a_column() -> None:
    with pytest.raises(ParameterError, match=r"^grammar: in line 3, column 14: \\b \(a word boundary\)"):
        grammar_of(grammar='start: a "é"\n\na: "é" /[a-z]\\b/ "b"')
    with pytest.raises(ParameterError, match=r"^grammar: in line 1: the flag x of a regex is not supported"):
        grammar_of(grammar="start: /a b/x")
    with pytest.raises(ParameterError, match=r"in line 1: unknown escape '\\\\d'; .*for \\d, write 0-9$"):
        grammar_of(grammar=r"root ::= [\d]")


def test_a_repeated_anchor_is_explained() -> None:
    with pytest.raises(ParameterError, match=r"^regex: an anchor \(\^ or \$\) in a pattern is repeated"):
        grammar_of(regex="(^a)+")


def test_an_invalid_pattern_is_never_ignored() -> None:
    schema = {"items": {"pattern": "(a"}}
    with pytest.raises(ParameterError, match=r"^json_schema: pattern at /items: at offset 0: \( is never closed"):
        grammar_of(json_schema=schema, on_unsupported="ignore")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?<n>a)(?:b)", r"\\1 \(?=a [(?=]", "^a$|^b$", "(^|x)a", "(^a)b", "a$$", "(a|b$)", "[(?)]", "[{]}", "a{2}?",
        "a??", "[[:alpha:]]", "[a-z&&[^b]]", r"\p{L}\pN\x41\u0041\u{41}\U00000041", r"\Aa\z", "(?i-s:a)b",
        r"[\[\]\-\^]", "a]}",
    ],
)  # fmt: skip
def test_supported_syntax(pattern: str) -> None:
    assert unsupported_syntax(pattern) is None
    grammar_of(regex=pattern)


def test_patterns_that_become_equal_are_no_longer_two_names() -> None:
    schema = {"patternProperties": {r"^\d": {"const": 1}, "^[0-9]": {"enum": [1, 2]}}, "additionalProperties": False}
    assert can_write(grammar_of(json_schema=schema), '{"4":1}')
    assert not can_write(grammar_of(json_schema=schema), '{"4":2}')
    unknown = {r"^\p{L}\d": {"const": 1}, r"^\p{L}[0-9]": {"const": 2}}
    with pytest.raises(ParameterError, match="patternProperties that match the same names"):
        grammar_of(json_schema={"patternProperties": unknown, "additionalProperties": False})


def matches(pattern: str, character: str, dialect: str) -> bool:
    """Whether a pattern of one class matches a character."""
    name = pattern.strip("[^]")
    if dialect == "Python" or len(name) != 2 or name[0] != "\\":
        return re.fullmatch(pattern, character) is not None
    return (character in ECMA[name[1].lower()]) == (name[1].islower() != pattern.startswith("[^"))


DECLARED = {"৪": {"enum": [1, 2, 3]}, "_": {"enum": [2, 3]}, "\ufeff": {"minimum": 2}}
PAIRS = [
    *itertools.combinations([r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[^\D]", "[4é]", "."], 2),
    (r"\w",),
    (r"\S",),
]


@pytest.mark.parametrize("rest", [True, False, {"enum": [1, 3]}], ids=str)
@pytest.mark.parametrize("patterns", PAIRS, ids=" ".join)
def test_a_name_satisfies_the_patterns_of_every_dialect(patterns: tuple[str, ...], rest: Any) -> None:
    """A name that matches a pattern in one dialect only is no additional name in it."""
    children = dict(zip(patterns, ({"enum": [1, 2]}, {"minimum": 2}), strict=False))
    schema = {
        "type": "object",
        "properties": DECLARED,
        "patternProperties": {f"^{pattern}$": child for pattern, child in children.items()},
        "additionalProperties": rest,
    }
    grammar = grammar_of(json_schema=schema, whitespace="none")
    for name, value in itertools.product(TEXTS.replace("\n", ""), (1, 2, 3)):
        valid = set[bool]()
        for dialect in ("ECMA-262", "Python"):
            given = [child for pattern, child in children.items() if matches(pattern, name, dialect)]
            applied = [*given, DECLARED[name]] if name in DECLARED else given or [rest]
            valid.add(jsonschema.Draft202012Validator({"allOf": applied}).is_valid(value))
        taken = can_write(grammar, json.dumps({name: value}, ensure_ascii=False, separators=(",", ":")))
        assert taken <= min(valid), (name, value)
        if name.isascii():
            assert taken == min(valid), (name, value)


@pytest.mark.parametrize("pattern", [r"^\W$", r"^\D$", r"^\w$", r"^\s$"])
def test_declared_names_satisfy_property_names_in_every_dialect(pattern: str) -> None:
    names = re.sub(r"[\t\n]", "", TEXTS)
    schema = {"propertyNames": {"pattern": pattern}, "properties": {name: {"const": 1} for name in names}}
    grammar = grammar_of(json_schema={"type": "object", **schema}, whitespace="none")
    for name in names:
        valid = [matches(pattern[1:-1], name, dialect) for dialect in ("ECMA-262", "Python")]
        taken = can_write(grammar, json.dumps({name: 1}, ensure_ascii=False, separators=(",", ":")))
        assert taken <= all(valid), name
        assert taken or not all(valid) or not name.isascii(), name
