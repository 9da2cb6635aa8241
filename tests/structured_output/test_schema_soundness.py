"""Cases that llguidance accepts although the schema forbids them: escaped names and characters, duplicate names."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import tiers
from bundled_grammars import can_write, grammar_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.schema_soundness import remove_control_characters

NULL, INTEGER = {"type": "null"}, {"type": "integer"}


OPEN = {"type": "object", "properties": {"a": NULL, "ab": NULL, 'q"': NULL, "ä": NULL}}
OTHERS = OPEN | {"additionalProperties": INTEGER}
PATTERNED = {
    "type": "object",
    "properties": {"xd": {"minimum": 2}, "d": NULL},
    "patternProperties": {"^x": INTEGER, "x$": NULL},
    "additionalProperties": {"type": "string"},
}
P = {"$defs": {"p": {"type": "object", "patternProperties": {"^x": NULL}}}}
EXTENDED = {"$ref": "#/$defs/p", "properties": {"a": INTEGER}, **P}
KNOWN: list[tuple[dict[str, Any], str, bool]] = [
    (OPEN, r'{"\u0061":1}', False),
    (OPEN, r'{"a\u0062":1}', False),
    (OPEN, r'{"q\u0022":1}', False),
    (OPEN, r'{"\u00e4":1}', False),
    (OPEN, '{"a":1}', False),
    (OPEN, '{"a":null,"b":1}', True),
    (OPEN, r'{"":[],"\n":{},"q\"q":0,"abc":1}', True),
    (OTHERS, r'{"\u0061":1}', False),
    (OTHERS, '{"a":null,"abc":1,"b":2,"":3}', True),
    (OTHERS, '{"ab":1}', False),
    (OTHERS, '{"b":null}', False),
    (OTHERS, r'{"q\"":1}', False),
    (OTHERS | {"required": ["z"]}, r'{"z":1,"\u007a":null}', False),
    (OTHERS | {"required": ["z"]}, '{"z":1,"y":2}', True),
    ({"allOf": [OPEN, {"properties": {"b": NULL}}]}, r'{"\u0062":1}', False),
    ({"allOf": [OPEN, {"properties": {"b": NULL}}]}, '{"a":null,"b":null,"c":1}', True),
    ({"$defs": {"o": OPEN}, "type": "array", "items": {"$ref": "#/$defs/o"}}, r'[{"\u0061":1}]', False),
    ({"type": "string", "pattern": '^[^"]*$'}, r'"\""', False),
    ({"type": "string", "pattern": '^[^"]*$'}, r'"a\n\\"', True),
    ({"type": "string", "pattern": r"^[^\\]*$"}, r'"\\"', False),
    ({"type": "string", "pattern": r"^[^\\]*$"}, r'"\""', True),
    ({"type": "string", "pattern": r'^[^\n"]$'}, r'"\""', False),
    ({"type": "string", "pattern": r"^[a\\](b)$"}, r'"\\b"', True),
    ({"type": "string", "pattern": r'^([^"]|b)*$'}, r'"\""', False),
    ({"type": "string", "pattern": r"^\P{Po}$"}, r'"\""', False),
    ({"type": "string", "pattern": r"^\PP$"}, r'"\\"', False),
    ({"type": "string", "pattern": r"^\p{Cc}$"}, r'"\""', False),
    ({"type": "string", "pattern": r"^[[:^punct:]]$"}, r'"\""', False),
    ({"type": "string", "pattern": r"^[\x00-!]$"}, r'"\""', False),
    ({"type": "string", "pattern": r'^[^\]"]$'}, '"]"', False),
    ({"type": "string", "pattern": r'^[^\]"]$'}, '"["', True),
    ({"type": "string", "pattern": r'^[^\d"]$'}, '"5"', False),
    ({"type": "string", "pattern": r'^[^\w"]$'}, '"-"', True),
    ({"type": "object", "patternProperties": {'^[^"]$': NULL}, "additionalProperties": False}, r'{"\"":null}', False),
    (PATTERNED, '{"x1":1,"x2":2,"ax":null,"b":"c"}', True),
    (PATTERNED, '{"x1":null}', False),
    (PATTERNED, r'{"\u0078":null}', False),
    (PATTERNED, '{"xx":1}', False),
    (PATTERNED, '{"xx":null}', False),
    (PATTERNED, '{"b":1}', False),
    (PATTERNED, '{"xd":3}', True),
    (PATTERNED, '{"xd":1}', False),
    (PATTERNED, '{"d":null,"b":"e"}', True),
    (PATTERNED, '{"d":"e"}', False),
    (PATTERNED, r'{"d":null,"\u0064":"e"}', False),
    (PATTERNED, '{"d":null,"d":"e"}', False),
    (PATTERNED, '{"":"e","\\t":"e","\\"":"e","é":"e"}', True),
    (EXTENDED, '{"a":1,"x":null,"b":2}', True),
    (EXTENDED, '{"a":null}', False),
    (EXTENDED, r'{"\u0061":null}', False),
    (EXTENDED, r'{"\u0078":1}', False),
    (EXTENDED | {"properties": {"x1": INTEGER}}, '{"x1":1}', False),
    ({"allOf": [EXTENDED, {"properties": {"b": NULL}}], **P}, r'{"\u0062":1}', False),
    ({"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"b": NULL}}], **P}, r'{"\u0062":1}', False),
    ({"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"b": NULL}}], **P}, '{"b":null,"x":null,"c":1}', True),
    ({"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"b": NULL}}], **P}, '{"b":null,"x":1}', False),
    ({"type": "object", "patternProperties": {"": NULL}}, '{"b":1}', False),
    ({"type": "object", "patternProperties": {".*": NULL}}, '{"":null,"b":null}', True),
    ({"type": "object", "patternProperties": {"^.*$": NULL}}, '{"b":1}', False),
    ({"type": "object", "patternProperties": {"^x": False}}, '{"b":1,"xb":1}', False),
    ({"type": "object", "patternProperties": {"^x": False}}, '{"b":1,"bx":1}', True),
    ({"type": "object", "patternProperties": {"[^\\x20-~]": NULL}}, r'{"\u0001":1}', False),
]


@pytest.mark.parametrize(("schema", "text", "right"), KNOWN, ids=lambda value: json.dumps(value)[:60])
def test_known_cases(schema: dict[str, Any], text: str, *, right: bool) -> None:
    assert can_write(grammar_of(json_schema=schema), text) == right


def test_schemas_in_a_grammar_are_enforced_too() -> None:
    compiled = grammar_of(grammar=f"start: %json {json.dumps(OPEN)}")
    assert not can_write(compiled, r'{"\u0061":1}')
    assert can_write(compiled, '{"b":1}')
    with pytest.raises(ParameterError, match="%json: cannot enforce minProperties, because"):
        grammar_of(grammar='start: %json {"type": "object", "minProperties": 2}')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"additionalProperties": NULL, "minProperties": 2},
            "minProperties at /items, because names can be repeated",
        ),
        ({"patternProperties": {r"^\p{L}": NULL}}, "patternProperties at /items with patterns of this kind or size"),
        ({"patternProperties": {"a.{9}$": NULL}}, "patternProperties at /items with patterns of this kind or size"),
        ({"properties": {"\n": NULL}}, "properties at /items with control characters in names"),
        (
            {"properties": {"a" * 65: NULL}, "additionalProperties": NULL},
            "additionalProperties at /items with declared names of 65 characters, 65 in total; the maximum is 64,",
        ),
        (
            {"properties": {f"{i:060}": NULL for i in range(40)}, "additionalProperties": NULL},
            "additionalProperties at",
        ),
        (
            {"pattern": "|".join(f"\\x{i:02x}" for i in range(32))},
            "pattern at /items with 32 different control characters or escapes; the maximum is 20",
        ),
    ],
)
def test_what_cannot_be_enforced_is_rejected_or_listed(schema: dict[str, Any], problem: str) -> None:
    nested = {"type": "array", "items": schema}
    with pytest.raises(ParameterError, match=f"json_schema: cannot enforce {problem}") as caught:
        grammar_of(json_schema=nested)
    assert caught.value.field == "json_schema"
    compiled = grammar_of(json_schema=nested, on_unsupported="ignore")
    assert [each.split(" ", 1)[0] for each in compiled.ignored] == [problem.split(" ", 1)[0].strip(",")]
    assert compiled.ignored[0].endswith("at /items")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"type": "object", "properties": {"a": NULL, "b": NULL}, "required": ["a", "b"], "additionalProperties": False,
         "minProperties": 2},
        {"type": "object", "patternProperties": {"^x": NULL}, "additionalProperties": False, "minProperties": 1},
        {"type": "object", "properties": {f"{i:060}": NULL for i in range(40)}},
    ],
)  # fmt: skip
def test_enforceable_schemas_are_accepted(schema: dict[str, Any]) -> None:
    assert grammar_of(json_schema=schema).ignored == ()


@pytest.mark.parametrize("pattern", ["^[a-z]+$", r"^\d{4}-\d\d$", r"[\w.-]+@[\w.-]+", r"a\[b\]", r"[\]\n]", "é|[ä-ü]"])
def test_ordinary_patterns_are_not_rewritten(pattern: str) -> None:
    assert remove_control_characters(pattern) == pattern


NAMES = ["a", "ab", "b", "", 'q"', "s\\", "ä", "x1", "/"]
VALUES = [None, 1, "x", {}]
SCHEMAS = st.sampled_from([NULL, INTEGER, {"type": "string"}, True])
RESTS = st.sampled_from([None, True, {}, False, NULL, INTEGER])
OBJECTS = st.builds(
    lambda names, rest, required, least, patterns: {
        "type": "object",
        "properties": names,
        "required": required,
        **({} if rest is None else {"additionalProperties": rest}),
        **({"minProperties": least} if least else {}),
        **({"patternProperties": patterns} if patterns else {}),
    },
    st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=4),
    RESTS,
    st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
    st.integers(0, 3),
    st.sampled_from([{}, {}, {"^x": NULL}, {'[^"]1': INTEGER}]),
)
NAME_PATTERNS = st.sampled_from(
    [
        *("^x", "x", "^", "b$", "^a.?$", "^[a-c]{1,2}$", "a|^b", "^(?:a|x1)$", "^[^a]*$"),
        *(r"^\w+$", r"\W", "(ab)+", "^(a|b)*x"),
    ]
)
PATTERNED_OBJECTS = st.builds(
    lambda names, patterns, rest, required: {
        "type": "object",
        "properties": names,
        "patternProperties": patterns,
        "required": required,
        **({} if rest is None else {"additionalProperties": rest}),
    },
    st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=2),
    st.dictionaries(NAME_PATTERNS, st.one_of(SCHEMAS, st.just(False)), min_size=1, max_size=3),
    RESTS,
    st.lists(st.sampled_from(NAMES), max_size=1),
)
CLASSES = st.lists(st.sampled_from(['"', r"\\", r"\n", "a", r"\x00", r"\s", r"\d", "x-z", r"\]", "!-/"]), min_size=1)
ATOMS = st.builds(lambda negated, parts: f"[{'^' * negated}{''.join(parts)}]", st.booleans(), CLASSES)
PATTERNS = st.builds(
    lambda parts, mark, bar: f"^({bar.join(parts)}){mark}$",
    st.lists(st.one_of(ATOMS, st.sampled_from([".", r"\S", r"\W", "b", r"\t"])), min_size=1, max_size=3),
    st.sampled_from(["", "*", "+", "{2}"]),
    st.sampled_from(["", "|"]),
)


def escaped(text: str, rng: random.Random) -> str:
    """A JSON string in which some characters have unusual escapes."""
    kinds = (
        lambda c: json.dumps(c, ensure_ascii=False)[1:-1],
        lambda c: f"\\u{ord(c):04x}",
        lambda c: f"\\u{ord(c):04X}",
    )
    return '"' + "".join(rng.choice(kinds)(c) if rng.random() < 0.4 else kinds[0](c) for c in text) + '"'


def hostile(schema: dict[str, Any], rng: random.Random) -> str:
    """An object whose members match the schema, or nearly, in the order in which they can be generated."""
    names = [*schema["properties"], *schema["required"]]
    member_names = [name for name in dict.fromkeys(names) if name in schema["required"] or rng.random() < 0.6]
    all_names = [*member_names, *(rng.choice([*NAMES, "x2"]) for _ in range(rng.randint(0, 3)))]
    return "{" + ",".join(f"{escaped(name, rng)}:{json.dumps(rng.choice(VALUES))}" for name in all_names) + "}"


@settings(deadline=None, max_examples=tiers.count(15, 60))
@given(schema=OBJECTS, seed=st.integers(0, 2**32))
def test_an_accepted_object_validates(schema: dict[str, Any], seed: int) -> None:
    try:
        compiled = grammar_of(json_schema=schema)
    except ParameterError:
        return
    validator, rng = jsonschema.Draft202012Validator(schema), random.Random(seed)
    for _ in range(60):
        text = hostile(schema, rng)
        if can_write(compiled, text):
            assert validator.is_valid(json.loads(text)), (schema, text)


@settings(deadline=None, max_examples=tiers.count(15, 60))
@given(schema=PATTERNED_OBJECTS, seed=st.integers(0, 2**32))
def test_names_of_patterns_are_exact(schema: dict[str, Any], seed: int) -> None:
    """Whatever matches a name, a member is accepted if and only if all schemas that apply accept its value."""
    rng, validator = random.Random(seed), jsonschema.Draft202012Validator(schema)
    try:
        compiled = grammar_of(json_schema=schema)
    except ParameterError as error:
        assert "nsatisfiable" in str(error)  # noqa: PT017 - most schemas have no error
        return
    for _ in range(40):
        names = [*schema["required"], *(rng.choice([*NAMES, "abab", "bx", "xb", "aa", "aé", "\tc"]) for _ in range(2))]
        write = (lambda name: escaped(name, rng)) if rng.random() < 0.3 else json.dumps
        members = [
            f"{write(name)}:{json.dumps(rng.choice(VALUES))}" for name in dict.fromkeys(names[: rng.randint(1, 2)])
        ]
        text = f"{{{','.join(members)}}}"
        valid, written = validator.is_valid(json.loads(text)), can_write(compiled, text)
        assert valid or not written, (schema, text)
        same = text.isascii() or not any("\\" in pattern for pattern in schema["patternProperties"])  # in all dialects
        assert written or not valid or "\\u" in text or len(members) > 1 or not same, (schema, text)


@settings(deadline=None, max_examples=tiers.count(15, 60))
@given(pattern=PATTERNS, seed=st.integers(0, 2**32))
def test_an_accepted_string_validates(pattern: str, seed: int) -> None:
    schema = {"type": "string", "pattern": pattern}
    try:
        compiled = grammar_of(json_schema=schema)
    except ParameterError:
        return
    validator, rng = jsonschema.Draft202012Validator(schema), random.Random(seed)
    for _ in range(60):
        text = escaped("".join(rng.choice('"\\\nab\0 5y]/\x01\x08\x7f!') for _ in range(rng.randint(1, 2))), rng)
        if can_write(compiled, text):
            assert validator.is_valid(json.loads(text)), (pattern, text)
