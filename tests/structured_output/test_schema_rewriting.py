"""Rewritten JSON schemas accept exactly the valid texts: property counts, conditions, references, ``oneOf``."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
import tiers
from bundled_grammars import can_write, can_write_value, grammar_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.parameters.parameter import ParameterError

INTEGER, NULL = {"type": "integer"}, {"type": "null"}


def check(schema: Any, values: list[Any], **options: Any) -> None:
    """Compare the grammar of a schema with jsonschema, for some values."""
    compiled = grammar_of(json_schema=schema, **options)
    assert compiled.ignored == ()
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for value in values:
        assert can_write_value(compiled, value) == validator.is_valid(value), value


def objects(names: str, extra: bool = True) -> list[dict[str, int]]:
    chosen = [each for size in range(len(names) + 1) for each in itertools.combinations(names, size)]
    more: list[dict[str, int]] = [{}, {"x": 1}, {"x": 1, "y": 1}] if extra else [{}]
    return [{**dict.fromkeys(each, 1), **other} for each in chosen for other in more]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("required", ["", "b", "ac"])
@pytest.mark.parametrize(
    "counts",
    [
        {"minProperties": 1},
        {"minProperties": 2},
        {"maxProperties": 0},
        {"maxProperties": 1},
        {"maxProperties": 2},
        {"minProperties": 1, "maxProperties": 2},
        {"minProperties": 2, "maxProperties": 2},
        {"minProperties": 3.0, "maxProperties": 4.0},
    ],
    ids=str,
)
@pytest.mark.fast_cases(2)
def test_property_counts_are_exact(counts: dict[str, Any], required: str, *, closed: bool) -> None:
    schema = {"type": "object", "properties": dict.fromkeys("abcd", INTEGER), "required": [*required], **counts}
    if closed:
        schema["additionalProperties"] = False
    possible = closed or counts.get("minProperties", 0) <= max(1, len(required) + 1)
    if len(required) > counts.get("maxProperties", 4):
        with pytest.raises(ParameterError, match="required > maxProperties"):
            grammar_of(json_schema=schema)
    elif possible:
        check(schema, objects("abcd"))
    else:
        with pytest.raises(ParameterError, match="cannot enforce minProperties, because names can be repeated"):
            grammar_of(json_schema=schema)


def test_counts_beside_many_properties_are_reported_with_their_place() -> None:
    wide = {
        "type": "object",
        "properties": {f"p{i}": INTEGER for i in range(30)},
        "additionalProperties": False,
        "maxProperties": 9,
    }
    with pytest.raises(ParameterError, match="maxProperties at /items with 30 optional properties; set on_unsupported"):
        grammar_of(json_schema={"items": wide})
    lenient = grammar_of(json_schema=wide, on_unsupported="ignore")
    assert lenient.ignored == ("maxProperties",)
    assert can_write(lenient, json.dumps({f"p{i}": 1 for i in range(12)}))
    check(wide | {"maxProperties": 30, "minProperties": 1}, [{}, {"p3": 1}, {"p1": 1, "p2": 2}])


def test_counts_and_properties_in_different_schemas() -> None:
    schema = {"allOf": [{"maxProperties": 1}, {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}]}
    with pytest.raises(ParameterError, match="cannot enforce minProperties and maxProperties at /allOf/0 with"):
        grammar_of(json_schema=schema)
    compiled = grammar_of(json_schema=schema, on_unsupported="ignore")
    assert compiled.ignored == ("minProperties and maxProperties at /allOf/0",)
    assert can_write(compiled, '{"a":1}')


def conditions(count: int) -> list[dict[str, Any]]:
    """If an object has one property, it must have another one."""
    return [{"if": {"required": [f"k{i}"]}, "then": {"required": [f"v{i}"]}} for i in range(count)]


def test_the_combinations_of_conditions_are_limited() -> None:
    values = [{"k1": 1, "v1": 1}, {"k1": 1}, {"k1": 1, "v0": 1}]
    check({"type": "object", "allOf": conditions(4)}, values)
    schema = {"type": "object", "allOf": conditions(20)}
    with pytest.raises(ParameterError, match=r"cannot enforce if at /allOf/\d+; set on_unsupported"):
        grammar_of(json_schema=schema)
    compiled = grammar_of(json_schema=schema, on_unsupported="ignore")
    assert compiled.ignored[0].startswith("if at /allOf/")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of an enum", "of a string"])
def test_conditions_that_exclude_each_other_are_not_combined(kind: str) -> None:
    kinds = [f"k{i}" for i in range(30)]
    cases = [{"if": {"properties": {"kind": {"const": each}}}, "then": {"required": [f"v_{each}"]}} for each in kinds]
    child = {"enum": kinds} if kind == "of an enum" else {"type": "string"}
    schema = {"type": "object", "properties": {"kind": child}, "required": ["kind"], "allOf": cases}
    values = [
        {"kind": "k1", "v_k1": 1},
        {"kind": "k1"},
        {"kind": "k1", "v_k0": 1},
        {"kind": "x"},
        {"kind": "k", "a": 1},
    ]
    check(schema, values)


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 5, 10, -1, 1.5, "", "a", "b", "ab", "abc", "abcd", [], [1], [1, 2], [None]),
    *([1, 1], [2, 1], [2, 2], [None, 1], [None, None], [1, None, 2], [2, None, 2], [1, 2, 1], [1, 2, "a"], [1, "a"]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "c": 1}, {"kind": "p", "a": 1}),
    *({"kind": "q", "b": 1}, {"kind": "q", "a": 1}, {"c": 1}, {"a": 1, "b": 1, "c": 1}, {"kind": "r"}),
]
KIND = {"kind": {"enum": ["p", "q", "r"]}}
AB = {"type": "object", "properties": {"a": True, "b": True, "c": True}}
ANNOTATIONS = (
    *("propertyOrder", "enumNames", "example", "note", "errorMessage", "tsType", "defaultSnippets", "units", "widget"),
    "markdownDescription",
)
"""Words of other vocabularies."""
EXACT: dict[str, Any] = {
    "integer constants": {"oneOf": [{"const": 1}, {"const": 2}, {"enum": [3, 5.0]}]},
    "constants with titles": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "disjoint ranges": {"type": "integer", "oneOf": [{"maximum": 1}, {"minimum": 2, "maximum": 3}, {"minimum": 5}]},
    "touching ranges": {"type": "integer", "oneOf": [{"maximum": 2}, {"exclusiveMinimum": 2.0}]},
    "null or reference": {
        "oneOf": [NULL, {"$ref": "#/$defs/o"}, {"$ref": "#/$defs/s"}],
        "$defs": {"o": {"type": "object"}, "s": {"allOf": [{"type": "string"}]}},
    },
    "kinds": {
        "oneOf": [
            {"properties": {"kind": {"const": "p"}, "a": INTEGER}, "required": ["kind"], "type": "object"},
            {"properties": {"kind": {"enum": ["q"]}, "b": INTEGER}, "required": ["kind"], "type": "object"},
        ]
    },
    "lengths": {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 3}]},
    "item counts": {"type": "array", "oneOf": [{"maxItems": 0}, {"minItems": 2}]},
    "overlapping ranges": {"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 2}]},
    "one of two properties": {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of three properties": {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    "one of overlapping enums": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "ab", 1]}]},
    "not a type": {"not": {"type": ["string", "object"]}},
    "not some texts": {"type": "string", "not": {"enum": ["a", "ab", ""]}},
    "not some numbers": {"type": ["integer", "null"], "not": {"enum": [1, 3, None]}},
    "not a pattern": {"type": "string", "not": {"pattern": "^a|b$"}},
    "not a pattern in a text": {"not": {"pattern": "^a.?c?$", "type": "string"}},
    "not a closed object": {
        "type": "object",
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
        "not": {"properties": {"a": {"const": 1}}, "additionalProperties": False},
    },
    "not an item": {"type": "array", "not": {"prefixItems": [{"const": 1}, {"const": 2}]}},
    "no item": {"type": "array", "not": {"contains": {"const": 1}}},
    "not one": {"not": {"oneOf": [{"type": "string"}, {"maxLength": 1}, {"const": 1}]}},
    "not if": {"not": {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}},
    "not dependencies": {
        **AB,
        "not": {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"required": ["a"]}}},
    },
    "not counted": {"type": "object", "not": {"minProperties": 1}},
    "one of two closed objects": {
        "oneOf": [
            {"type": "object", "properties": {each: INTEGER}, "additionalProperties": False} for each in ("a", "b")
        ]
    },
    "one of disjoint patterns": {
        "type": "string",
        "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}, {"enum": ["", "c"]}],
    },
    "one of overlapping patterns": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "one of two arrays": {
        "type": "array",
        "minItems": 1,
        "oneOf": [{"items": {"type": "number"}}, {"items": {"type": "null"}}],
    },
    "different items": {"type": "array", "items": {"enum": [1, 2, None]}, "uniqueItems": True},
    "different items or a text": {
        "type": ["array", "string"],
        "items": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "exclusiveMaximum": 3}]},
        "uniqueItems": True,
    },
    "a tuple of different items": {
        "type": "array",
        "prefixItems": [{"enum": [1, 2]}, {"enum": [2, None]}, {"type": "string"}],
        "items": False,
        "uniqueItems": True,
    },
    "not both": {**AB, "not": {"required": ["a", "b"]}},
    "not any": {**AB, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "not a range": {"type": "integer", "not": {"minimum": 2, "maximum": 4}},
    "not a property value": {"type": "object", "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    "not not": {"not": {"not": {"type": "integer"}}},
    "nothing but": {"not": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string", "maxLength": 2}}},
    "if, then and else": {
        "type": "object",
        "properties": {**KIND, "a": INTEGER, "b": INTEGER},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "p"}}},
        "then": {"required": ["a"]},
        "else": {"not": {"required": ["a"]}},
    },
    "if and then": {"if": {"type": "number"}, "then": {"minimum": 2}},
    "if and else": {"if": {"required": ["a"]}, "else": {"required": ["b"]}},
    "if only": {"if": {"pattern": "a"}, "type": "null"},
    "dependencies": {**AB, "dependentRequired": {"a": ["b"], "c": ["a"]}},
    "dependent schemas": {**AB, "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}, "required": ["b"]}}},
    "old dependencies": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **AB,
        "dependencies": {"a": ["b"], "b": {"properties": {"a": {"const": 2}}}},
    },
    "names of a list": {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    "names of a pattern": {**AB, "propertyNames": {"pattern": "^[ab]$"}},
    "names of no pattern": {**AB, "propertyNames": {"not": {"pattern": "^[ax]"}}},
    "no names": {"type": "object", "propertyNames": {"maxLength": 0}, "properties": {"a": True}},
    "all texts are names": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
    "names of a length": {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER},
    "all names": {"type": "object", "not": {"required": ["a"]}, "additionalProperties": INTEGER},
    "forbidden beside typed names": {**AB, "additionalProperties": INTEGER, "not": {"required": ["kind"]}},
    "closed by unevaluated": {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
    "contains anything": {"type": "array", "contains": True, "maxContains": 1},
    "unused contains": {"type": "array", "contains": INTEGER, "minContains": 0},
    "contains": {"type": ["array", "null"], "contains": INTEGER},
    "contains some": {"type": "array", "contains": {"minimum": 2}, "minContains": 1, "maxContains": 1},
    "contains few": {
        "type": "array",
        "items": {"type": ["integer", "null"]},
        "contains": {"type": "null"},
        "minContains": 0,
        "maxContains": 1,
    },
    "contains nothing": {"contains": False},
    "contains in few items": {"items": INTEGER, "contains": {"maximum": 1}, "maxItems": 2},
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [INTEGER],
        "additionalItems": False,
        "type": "array",
    },
    "reference to an item of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, {"$ref": "#/items/0"}],
    },
    "exclusive bound of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 1,
        "exclusiveMinimum": True,
    },
    "siblings of a reference in draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"i": INTEGER},
        "$ref": "#/definitions/i",
        "maximum": 1,
    },
    "overlapping patterns of equal schemas": {
        "type": "object",
        "patternProperties": {"a": INTEGER, "^a": INTEGER, "b$": INTEGER},
        "additionalProperties": False,
    },
    "overlapping patterns": {
        "type": "object",
        "patternProperties": {"a": INTEGER, "^[a-c]": {"maximum": 1}},
        "additionalProperties": False,
    },
    "patterns and others": {"type": "object", "patternProperties": {"^[ab]": INTEGER}, "minProperties": 1},
    "patterns and a schema of others": {
        "properties": {"c": True},
        "patternProperties": {"^[ab]": INTEGER, "a": {"minimum": 2}},
        "additionalProperties": {"type": "string"},
    },
    "inner identifier": {
        "$id": "http://example.com/root.json",
        "properties": {"a": {"$ref": "item.json"}, "b": {"$ref": "http://example.com/root.json#/$defs/i"}},
        "$defs": {"i": {"$id": "item.json", "type": "integer"}},
    },
    "anchor": {"items": {"$ref": "#i"}, "$defs": {"i": {"$anchor": "i", "type": "integer"}}},
    "pointer of an inner identifier": {
        "items": {"$ref": "http://x.com/a#/$defs/j"},
        "$defs": {"i": {"$id": "http://x.com/a", "$defs": {"j": {"$ref": "#/$defs/k"}, "k": INTEGER}}},
    },
    "own identifier": {
        "$id": "http://example.com/tree",
        "type": "array",
        "items": {"anyOf": [INTEGER, {"$ref": "http://example.com/tree"}]},
    },
    "dynamic reference": {"$dynamicAnchor": "n", "anyOf": [INTEGER, {"items": {"$dynamicRef": "#n"}, "type": "array"}]},
    "everything": True,
    "counts with fractions": {"type": "string", "minLength": 1.0, "maxLength": 2.0},
    "integer constants with fractions": {"type": "integer", "enum": [1.0, 3.0]},
    "annotations": {"type": "integer", "x-order": 1, "examples": [1], **{word: {"not": 1} for word in ANNOTATIONS}},
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.fast_cases(36)
def test_a_rewritten_schema_is_exact(name: str) -> None:
    check(EXACT[name], VALUES)


ITEMS: list[Any] = [1, 2, None, "a", 3]
CONTAINS: list[dict[str, Any]] = [
    {"contains": INTEGER},
    {"contains": {"minimum": 2}, "minContains": 2},
    {"contains": {"type": "number", "minimum": 2}, "maxContains": 1},
    {"contains": {"enum": ["a", 2]}, "minContains": 0, "maxContains": 2},
    {"contains": {"const": None}, "minContains": 2, "maxContains": 3, "items": {"type": ["integer", "null"]}},
    {"contains": INTEGER, "prefixItems": [{"type": "string"}, {"const": 2}], "maxItems": 3},
    {"contains": {"type": "string"}, "minContains": 3, "maxItems": 2, "type": ["array", "null"]},
    {"contains": {"$ref": "#/$defs/s"}, "items": {"anyOf": [INTEGER, {"$ref": "#/$defs/s"}]}, "$defs": {"s": NULL}},
]


@pytest.mark.parametrize("schema", CONTAINS, ids=str)
def test_the_items_of_contains_are_counted(schema: dict[str, Any]) -> None:
    rng = random.Random(0)
    arrays = [[rng.choice(ITEMS) for _ in range(rng.randint(0, 5))] for _ in range(40)]
    check({"type": "array", **schema}, [[], None, 1, *arrays])


def test_the_counted_items_are_among_the_first() -> None:
    strings = {"type": "array", "contains": {"type": "string"}}
    compiled = grammar_of(json_schema=strings)
    assert can_write_value(compiled, [1] * 7 + ["a", 2, 2])
    assert not can_write_value(compiled, [1] * 8 + ["a"])  # valid, but not generated
    for schema in (  # so its negation must not be what is left
        {"prefixItems": [{"$ref": "#/$defs/s"}, {"not": {"$ref": "#/$defs/s"}}]},
        {"prefixItems": [{"$ref": "#/$defs/s"}, {"oneOf": [{"type": "array"}, {"$ref": "#/$defs/s"}]}]},
        {"prefixItems": [{"$ref": "#/$defs/s"}, {"if": {"$ref": "#/$defs/s"}, "else": {"minItems": 1}, "then": False}]},
    ):
        with contextlib.suppress(ParameterError):
            compiled = grammar_of(json_schema={**schema, "$defs": {"s": strings}})
            assert not can_write_value(compiled, [["a"], [1] * 8 + ["a"]])


@pytest.mark.parametrize(
    "schema",
    [EXACT["all names"], EXACT["forbidden beside typed names"], EXACT["not both"] | {"required": ["a"]}],
    ids=str,
)
def test_forbidden_names_cannot_be_escaped(schema: dict[str, Any]) -> None:
    compiled = grammar_of(json_schema=schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in (r'{"\u0061":1}', r'{"kin\u0064":1}', r'{"a":1,"\u0062":1}', r'{"c":1,"\u0061":1}'):
        assert not can_write(compiled, text) or validator.is_valid(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        ({"requird": ["a"]}, "requird; did you mean required?"),
        ({"items": {"minlength": 3}}, "minlength at /items; did you mean minLength?"),
        ({"max_length": 3}, "max_length; did you mean maxLength?"),
        ({"propertes": {}}, "propertes; did you mean properties?"),
        ({"ref": "#"}, "ref; did you mean "),
        ({"type": "string", "_format": "date"}, "_format; did you mean format?"),
        ({"type": "array", "item": {"type": "null"}}, "item; did you mean items?"),
        ({"types": "string"}, "types; did you mean type?"),
        ({"require": ["a"]}, "require; did you mean required?"),
        ({"requiredIf": {}}, "requiredIf; did you mean "),
        ({"anyOf": [{"formats": ["date"]}]}, "formats at /anyOf/0; did you mean format?"),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_that_look_misspelled_are_ignored_and_named(schema: dict[str, Any], hint: str) -> None:
    """JSON Schema ignores unknown keywords: what is enforced is the schema without them."""
    compiled = grammar_of(json_schema=schema)
    assert (compiled.ignored, len(compiled.unknown)) == ((), 1)
    assert hint in compiled.unknown[0]
    validator = jsonschema.Draft202012Validator(schema)
    for text in ("null", "[null]", "[]", '"x"', "{}", '{"a":1}', '"2020-01-01"', "[1]"):
        assert can_write(compiled, text) == validator.is_valid(json.loads(text)), text
    with pytest.raises(ParameterError, match=r"json_schema: unknown keyword .*; did you mean") as caught:
        grammar_of(json_schema=schema, strict_keywords=True)
    assert hint in str(caught.value)


NAMES = st.sampled_from(["a", "b", "c"])
LEAVES = st.sampled_from(
    [
        *({"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": ["a", 2]}, {"minimum": 2}, {"maximum": 2}),
        *({"maxLength": 1}, {"required": ["a"]}, {"required": ["b", "c"]}, {"type": ["object", "null"]}, True),
        *({"properties": {"a": {"const": 1}}}, {"minProperties": 1}, {"maxProperties": 1}, {"type": "array"}),
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a: {"not": a}, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, n, m: {"dependentRequired": {n: [m]}, "allOf": [a]}, inner, NAMES, NAMES),
        st.builds(
            lambda names, rest, counts: {"type": "object", "properties": names, "additionalProperties": rest, **counts},
            st.dictionaries(NAMES, inner, max_size=3),
            st.sampled_from([True, False, {"type": "integer"}]),
            st.sampled_from([{}, {"minProperties": 1}, {"maxProperties": 1}, {"minProperties": 2}]),
        ),
        st.builds(
            lambda patterns, rest: {"patternProperties": patterns, "additionalProperties": rest},
            st.dictionaries(st.sampled_from(["^a", "[bc]", "^c$"]), inner, min_size=1, max_size=2),
            st.sampled_from([True, False, {"type": "integer"}]),
        ),
        st.builds(
            lambda a, counts: {"contains": a, **counts},
            inner,
            st.sampled_from([{}, {"minContains": 0}, {"minContains": 2}, {"maxContains": 1}]),
        ),
    ),
    max_leaves=5,
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=tiers.count(60, 1500))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_random_schemas_accept_no_invalid_text(schema: Any, seed: int) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    values = random.Random(seed).sample(VALUES, 12)
    try:
        compiled = grammar_of(json_schema=schema, whitespace="none")
    except ParameterError:
        return
    text = json.dumps(schema)
    exact = "additionalProperties" not in text or ("required" not in text and "patternProperties" not in text)
    for value in values:
        taken, valid = can_write_value(compiled, value), validator.is_valid(value)
        assert taken <= valid, (schema, value)
        if exact and value != 1.5:  # see "Valid texts that are not generated" in docs/structured.md
            assert taken == valid, (schema, value)
