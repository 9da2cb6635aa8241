"""StructuredOutputs: a value with policies for unsupported keywords, and validation of the output."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import time
from typing import Any

import pytest
from bundled_grammars import grammar_of

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import StructuredOutputs
from nucleate.structured_output.guide import validate
from nucleate.structured_output.pattern_parser import expanded_size

FIELD_VALUES: list[dict[str, Any]] = [
    {"json_schema": {"type": "object", "properties": {"b": {"const": "é\u2028"}, "a": {}}}},
    {"json_schema": {"oneOf": []}, "on_unsupported": "approximate", "whitespace": "none"},
    {"json_schema": {}, "on_unsupported": "ignore"},
    {"json_object": True},
    {"json_object": True, "whitespace": "none"},
    {"regex": "a+"},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
]


@pytest.mark.parametrize("fields", FIELD_VALUES, ids=str)
def test_a_value_survives_json(fields: dict[str, Any]) -> None:
    made = StructuredOutputs(**fields)
    assert made.to_dict() == fields
    for again in (
        StructuredOutputs.from_json(made.to_json()),
        StructuredOutputs.from_dict(fields),
        pickle.loads(pickle.dumps(made)),
    ):
        assert again == made
        assert hash(again) == hash(made)
    assert eval(repr(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.on_unsupported = "ignore"  # type: ignore[misc]


def test_different_values_are_not_equal() -> None:
    values = [StructuredOutputs(**fields) for fields in FIELD_VALUES]
    assert len(set(values)) == len(values)
    one, other = ({"properties": {a: {}, b: {}}} for a, b in ("ab", "ba"))
    assert one == other
    assert StructuredOutputs(json_schema=one) != StructuredOutputs(json_schema=other)  # written in another order


ONE_KIND = "must have exactly one of .*; got"
LAZY = {"grammar": 'root ::= "a"', "grammar_lazy": True}
WORD = {"type": "word", "value": "a"}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "structured_outputs", f"{ONE_KIND} none"),
        ({"json_object": False}, "structured_outputs", f"{ONE_KIND} none"),
        ({"on_unsupported": "ignore"}, "structured_outputs", f"{ONE_KIND} none"),
        ({"regex": "a", "choice": ["a"]}, "choice", f"{ONE_KIND} regex and choice"),
        ({"json_schema": {}, "json_object": True}, "json_object", f"{ONE_KIND} json_schema and json_object"),
        ({"json_schema": "{"}, "json_schema", "json_schema must be JSON: "),
        ({"json_schema": "[]"}, "json_schema", "json_schema must be a JSON object, a boolean, or its text, got"),
        ({"json_schema": '{"a": 1, "a": 2}'}, "json_schema", "duplicate name 'a'"),
        ({"regex": 1}, "regex", "regex must be a non-empty string, got 1"),
        ({"regex": ""}, "regex", "regex must be a non-empty string, got ''"),
        ({"json_object": 1}, "json_object", "json_object must be true or false, got 1"),
        ({"choice": {"a": 1}}, "choice", "choice must be a non-empty list of non-empty strings"),
        ({"choice": ["a", ""]}, "choice", "choice must be a non-empty list of non-empty strings"),
        ({"grammar": "\udc80"}, "grammar", "grammar is not valid Unicode: surrogates not allowed at 0"),
        ({"json_schema": {}, "on_unsupported": "loose"}, "on_unsupported", "one of error, approximate, ignore, got"),
        ({"json_schema": {}, "on_unsupported": ["error"]}, "on_unsupported", "one of error, approximate, ignore, got"),
        ({"regex": "a", "on_unsupported": "ignore"}, "on_unsupported", "needs json_schema or structural_tag"),
        ({"json_object": True, "on_unsupported": "approximate"}, "on_unsupported", "needs json_schema or structural"),
        ({"regex": "a", "whitespace": "none"}, "whitespace", "whitespace needs json_schema or json_object"),
        ({"json_object": True, "whitespace": " "}, "whitespace", "must be one of flexible, none, got ' '"),
        ({"json_object": True, "whitespace": ""}, "whitespace", "must be one of flexible, none, got ''"),
        *(
            ({"json_object": True, "max_digits": wrong}, "max_digits", "max_digits must be an integer >= 0")
            for wrong in (-1, 1.5, True, "3", None)
        ),
        ({"regex": "a", "max_digits": 3}, "max_digits", "max_digits needs json_schema or json_object, got regex"),
        (LAZY, "grammar_lazy", "grammar_lazy needs grammar_triggers"),
        (LAZY | {"grammar_triggers": []}, "grammar_lazy", "grammar_lazy needs grammar_triggers"),
        ({"grammar": "a", "grammar_triggers": [WORD]}, "grammar_triggers", "grammar_triggers need grammar_lazy"),
        ({"regex": "a", "grammar_lazy": True, "grammar_triggers": [WORD]}, "grammar_lazy", "needs grammar, got regex"),
        (LAZY | {"grammar_triggers": [WORD] * 65}, "grammar_triggers", "must be a list of at most 64 triggers"),
        (LAZY | {"grammar_triggers": [WORD | {"x": 1}]}, "grammar_triggers", "unknown field 'x'"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field == field


def test_unknown_fields_and_non_objects_are_errors() -> None:
    with pytest.raises(ParameterError, match="unknown field 'jsonschema'; did you mean json_schema"):
        StructuredOutputs.from_json('{"jsonschema": {}}')
    with pytest.raises(ParameterError, match="must be a JSON object"):
        StructuredOutputs.from_json("[]")
    with pytest.raises(ParameterError, match="must be JSON"):
        StructuredOutputs.from_json("{")


def test_approximate_treats_one_of_as_any_of_and_lists_it() -> None:
    schema = {"items": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "type": "array"}
    for on_unsupported in ("approximate", "ignore"):
        compiled = grammar_of(json_schema=schema, on_unsupported=on_unsupported)
        assert compiled.ignored == ("oneOf treated as anyOf at /items",)
    with pytest.raises(ParameterError, match="cannot enforce not"):
        grammar_of(json_schema={"not": {"items": {"type": "null"}}}, on_unsupported="approximate")
    apart = {"oneOf": [{"type": "object"}, {"type": "array"}]}  # these alternatives can be distinguished
    assert grammar_of(json_schema=apart, on_unsupported="approximate").ignored == ()


def test_ignored_keywords_are_listed_and_validated_afterwards() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
            "b": {"type": "string", "format": "idn-email"},
            "c": {"not": {"multipleOf": 2}, "nullable": True},
            "d": {"contains": {"type": "null"}, "minContains": 9},
        },
    }
    compiled = grammar_of(json_schema=schema, on_unsupported="ignore")
    assert compiled.ignored == (
        "uniqueItems at /properties/a",
        "format 'idn-email' at /properties/b",
        "not at /properties/c",
        "nullable at /properties/c",
        "contains at /properties/d",
        "minContains at /properties/d",
    )
    assert compiled.validate('{"a": [1, 2]}', seconds=60) == []
    assert compiled.validate('{"a": [1, 1]}') == ["$.a: [1, 1] has non-unique elements"]
    assert len(compiled.validate('{"a": [1, 1], "c": 2, "d": []}')) == 3
    for wrong in ("", "{", '{"a": NaN}', '{"a": [], "a": []}', "[" * 100_000):
        assert compiled.validate(wrong)[0].startswith("not JSON: ")


DOUBLED = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}


@pytest.mark.parametrize(
    ("schema", "text", "words"),
    [
        ({"not": {"pattern": "^(a+)+$"}}, '"' + "a" * 40 + 'b"', None),
        ({"not": {"pattern": "^(a|a)*(a|a)*(a|a)*$(?<=b)"}}, '"' + "a" * 4000 + 'b"', "longer than"),
        ({"patternProperties": {"^(a|a)*(a|a)*(a|a)*$(?<=b)": {}}}, '{"' + "a" * 4000 + '": 1}', "longer than"),
        ({"patternProperties": {"^(a|a)*(a|a)*(a|a)*$(?<=b)": {}}, "additionalProperties": False},
         '{"' + "a" * 4000 + '": 1}', "longer than"),
        ({"$ref": "#/$defs/d0", "$defs": {**DOUBLED, "d40": {"type": "string"}}}, '"a"', "longer than"),
        ({"$ref": "#"}, "1", "endless reference"),
        ({"$ref": "http://127.0.0.1:9/x"}, "1", "cannot be applied"),
        ({"type": "nothing"}, "1", "cannot be applied"),
        ({"unevaluatedProperties": False, "patternProperties": {"a": {}}}, '{"a": 1}', "unevaluatedProperties with"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.fast_cases(2)
def test_validation_terminates_for_every_schema(schema: dict[str, Any], text: str, words: str | None) -> None:
    started = time.thread_time()
    found = validate(StructuredOutputs(json_schema=schema, on_unsupported="ignore"), text, seconds=0.3)
    assert time.thread_time() - started < 1.5
    assert (words is None and not found) or words in found[0]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^a"}, '"ab"', '"ba"'),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"x1": 1, "y": ""}', '{"x1": ""}'),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}, "additionalProperties": False},
         '{"a": 1, "x": 2}', '{"b": 1}'),
        ({"additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": ""}'),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, '{"a": ""}', '{"b": ""}'),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}'),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "3", "2"),
    ],
    ids=str,
)  # fmt: skip
def test_replacements_of_jsonschema_keywords_are_equivalent(schema: dict[str, Any], right: str, wrong: str) -> None:
    structured_outputs = StructuredOutputs(json_schema=schema, on_unsupported="ignore")
    assert validate(structured_outputs, right, seconds=60) == []
    assert len(validate(structured_outputs, wrong)) == 1


def test_only_json_is_validated() -> None:
    with pytest.raises(ValueError, match="only JSON"):
        validate(StructuredOutputs(regex="a"), "a")


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("abc", 3, 3),
        ("a{3}", 3, 3),
        ("(ab){3}c", 7, 7),
        ("(ab){2,5}", 4, 10),
        ("(?:a{10}){10}", 100, 100),
        ("a{2,}", 2, 2),
        ("a*b+c?", 1, 3),
        ("(ab)?{4}", 0, 8),
        ("a{3}?", 3, 3),
        ("(a{3}?){3}?", 9, 9),
        (r"\{3}", 3, 3),
        ("[a{9}]{2}", 2, 2),
        ("[]a]{4}", 4, 4),
        (r"\p{Lu}{4}", 4, 4),
        ("(?P<n>a){4}", 4, 4),
        ("(?<n>a){4}", 4, 4),
        ("(?i:a){4}", 4, 4),
        ("a{ 3 , 4 }", 3, 4),
        (")a{3}", 3, 3),
        ("(((a", 1, 1),
        ("{3}a", 1, 1),
    ],
)
def test_repetitions_are_counted(pattern: str, least: int, most: int) -> None:
    assert expanded_size(pattern)[:2] == (least, most)


def test_the_engine_is_imported_only_when_needed() -> None:
    code = "from nucleate.structured_output import StructuredOutputs; StructuredOutputs(regex='a'); import sys; "
    code += "print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
