"""Negations, complements of patterns and different items: never an invalid text, and what they leave out."""

from __future__ import annotations

import itertools
import json
import random
import re
from time import process_time
from typing import Any

import jsonschema
import pytest
import tiers
from bundled_grammars import can_write, can_write_value, grammar_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_schema_rewriting import check

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.pattern_automata import complement, disjoint_patterns, rejects_text
from nucleate.structured_output.pattern_parser import UnknownPatternError
from nucleate.structured_output.terminal_automata import Budget

INTEGER = {"type": "integer"}


ATOMS = st.sampled_from(
    [
        *(*"abc.-é1 ", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\.", r"\n", r"\x62", "[ab]", "[^a]", r"[^\d]"),
        *(r"[\w-]", "[a-c]", r"[^\W]", r"[^\s\w]", "(a|b)", "(?:ab)"),
    ]
)
TEXT_PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(st.one_of(inner, st.just("")), min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds(
            lambda part, mark: f"(?:{part}){mark}", inner, st.sampled_from(["*", "+", "?", "{2}", "{1,6}", "*?"])
        ),
    ),
    max_leaves=5,
)
PATTERNS = st.builds(
    lambda begin, inner, end: f"{begin}{inner}{end}",
    st.sampled_from(["", "^", "(^|b)", "(?:^a|)"]),
    TEXT_PATTERNS,
    st.sampled_from(["", "$", "(b|$)"]),
)
CHARACTERS = "abc1 -.\né٣\x1c"


def found(pattern: str, text: str) -> set[bool]:
    """Whether a pattern is found in a text, in two dialects."""
    return {re.search(pattern, text, flags) is not None for flags in (0, re.ASCII)}


@pytest.mark.slow
@settings(deadline=None, max_examples=tiers.count(60, 2000))
@given(pattern=PATTERNS, other=PATTERNS, seed=st.integers(0, 2**32))
def test_complements_and_comparisons_are_right_in_every_dialect(pattern: str, other: str, seed: int) -> None:
    try:
        texts = complement(pattern, Budget())
    except UnknownPatternError:
        assume(False)
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", texts or "(?!)")
    disjoint, rng = disjoint_patterns(pattern, other, Budget()), random.Random(seed)
    for _ in range(40):
        text = "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(0, 4)))
        taken = re.fullmatch(python, text) is not None
        assert not (taken and True in found(pattern, text)), (pattern, text)
        if not set(text) & set("\né٣\x1c"):  # the characters whose meaning differs between dialects
            assert taken or True in found(pattern, text), (pattern, text)
        if disjoint:
            assert found(pattern, text) == {False} or found(other, text) == {False}, (pattern, other, text)
        if rejects_text(pattern, text, Budget()):
            assert found(pattern, text) == {False}, (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\bab", "(?=a)b", r"(a)\1", "(?i)a", r"\p{L}", "a{,3}", "[[:alpha:]]", "[a&&b]", "(^a)*", "a$b", "[]a]"),
        *("(", ")", "[", "*", "a**", "a{2,1}", "a" * 501, "[z-a]", r"[\d-z]", r"\ud83d", "(" * 20 + "a" + ")" * 20),
    ],
)
def test_patterns_that_dialects_may_read_differently_are_unknown(pattern: str) -> None:
    with pytest.raises(UnknownPatternError):
        complement(pattern, Budget())
    assert not disjoint_patterns(pattern, "^$", Budget())
    assert not rejects_text(pattern, "", Budget())


@pytest.mark.parametrize("pattern", ["x{999}", "(a|b)*a(a|b){9}$", "(?:[ab]{9}c){30}"])
def test_large_patterns_have_no_complement(pattern: str) -> None:
    with pytest.raises(UnknownPatternError):
        complement(pattern, Budget())


VALUES: list[Any] = [1, 2, "a", None, True, 1.5, [], {"b": 1}, ""]


def arrays(values: list[Any], most: int) -> list[list[Any]]:
    """All arrays of at most ``most`` values, without those that have more than one of the last values."""
    return [[*each] for size in range(most + 1) for each in itertools.product(values, repeat=size)]


@pytest.mark.parametrize("bounds", [{}, {"minItems": 2}, {"maxItems": 2}, {"minItems": 3, "maxItems": 3}], ids=str)
@pytest.mark.parametrize(
    "items",
    [
        {"enum": VALUES[:5]},
        {"oneOf": [{"const": each, "title": f"{each}"} for each in VALUES[:4]]},
        {"$ref": "#/$defs/e"},
        {"type": ["boolean", "null"]},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 4},
        {"type": ["integer", "string"], "enum": [1, 1.5, "a", None]},
        {"anyOf": [{"enum": ["a", 1]}, {"enum": [1, 2.0]}]},
        {"oneOf": [{"enum": ["a", 1]}, {"enum": [1, 2]}]},
        {"enum": []},
    ],
    ids=str,
)
@pytest.mark.fast_cases(7)
def test_different_items_of_few_values_are_exact(items: dict[str, Any], bounds: dict[str, int]) -> None:
    schema = {
        "type": ["array", "null"],
        "items": items,
        "uniqueItems": True,
        **bounds,
        "$defs": {"e": {"enum": ["a", 2]}},
    }
    check(schema, [None, 1, *arrays([1, 2, "a", None, True], 3), ["a", 1, 2, None, True]])


@pytest.mark.parametrize(
    ("number", "bounds"), [(20, {"maxItems": 2}), (8, {"maxItems": 3}), (8, {"minItems": 3, "maxItems": 3})]
)
def test_few_different_items_of_many_values_are_exact(number: int, bounds: dict[str, int]) -> None:
    schema = {"type": "array", "items": {"enum": [*range(number)]}, "uniqueItems": True, **bounds}
    check(schema, arrays([0, 3, number - 1, number], 3))


def test_many_different_items_have_the_order_of_the_enum() -> None:
    values = [f"v{i}" for i in range(9)]
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": 1}
    compiled = grammar_of(json_schema=schema)
    for each in itertools.chain.from_iterable(itertools.combinations(values, size) for size in (1, 2, 5, 9)):
        assert can_write(compiled, json.dumps(each))
    for wrong in ([], ["v1", "v0"], ["v0", "v0"], ["v0", "v2", "v1"], ["v0", "x"]):
        assert not can_write(compiled, json.dumps(wrong))


def test_what_negations_leave_out() -> None:
    """See "Valid texts that are not generated" in docs/structured.md."""
    even = {"properties": {"a": {"multipleOf": 2}}, "required": ["a"]}
    taken_and_left_out: list[tuple[Any, list[Any], list[Any]]] = [
        ({"not": INTEGER}, ["a", None, [1]], [1.5]),
        ({"type": "object", "oneOf": [even, {"required": ["b"]}]}, [{"a": 2}, {"b": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", "not": even}, [{}, {"b": 1}], [{"a": 1}]),
    ]
    for schema, taken, left_out in taken_and_left_out:
        compiled = grammar_of(json_schema=schema)
        for value in [*taken, *left_out]:
            assert can_write_value(compiled, value) == (value in taken), (schema, value)
            assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, value)


DIGITS = {"not": {"pattern": r"^\d+$"}}
NOT_X = {"not": {"$ref": "#/$defs/x"}}


@pytest.mark.parametrize(
    ("x", "wrong"),
    [
        (DIGITS, {"b": "é"}),  # left out of x
        ({"type": "array", "items": {"enum": [*range(6)]}, "uniqueItems": True}, {"b": [1, 0]}),
        ({"oneOf": [{"required": ["p"], "not": {"properties": {"p": {"format": "uri"}}}}, True]}, {"b": {}}),
        ({"type": "array", "contains": {"type": "string"}}, {"b": [1] * 8 + ["a"]}),
        ({"type": "object", "patternProperties": {r"^\w$": INTEGER}, "minProperties": 1}, {"b": {"é": 1}}),
        ({"type": "object", "patternProperties": {r"^\d$": INTEGER}, "maxProperties": 1}, {"b": {"٣": 1}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_rewritten_schema_is_negated_as_it_was(x: dict[str, Any], wrong: dict[str, Any], order: str) -> None:
    """A rewritten schema may allow less, so that its negation would allow invalid texts."""
    uses: dict[str, Any] = {"a": {"$ref": "#/$defs/x"}, "b": NOT_X}
    schema = {"type": "object", "properties": {name: uses[name] for name in order}, "$defs": {"x": x}}
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)
    try:
        compiled = grammar_of(json_schema=schema)
    except ParameterError:
        return
    assert not can_write_value(compiled, wrong)


def test_one_of_is_not_compared_in_its_rewritten_form() -> None:
    """The second alternative holds for every value without ``a``, or whose names are words, so both may hold."""
    inner = {"required": ["a"], "propertyNames": {"not": {"pattern": r"^\w*$"}}}
    first = {"allOf": [{"if": {"properties": {"a": {"const": "p"}}}, "then": INTEGER}, {"items": INTEGER}]}
    schema = {"oneOf": [first, {"oneOf": [True, inner]}]}
    value = {"a": 1}
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)
    with pytest.raises(ParameterError, match="cannot enforce oneOf whose alternatives may overlap at the root"):
        grammar_of(json_schema=schema)
    for on_unsupported in ("approximate", "ignore"):
        compiled = grammar_of(json_schema=schema, on_unsupported=on_unsupported)
        assert compiled.ignored == ("oneOf treated as anyOf at the root",)
        assert can_write_value(compiled, value)


def test_conditions_that_are_too_large_when_rewritten_can_be_ignored() -> None:
    many = {"type": "string", "allOf": [{"not": {"pattern": f"x{i}y"}} for i in range(20)], "maxLength": 4}
    with pytest.raises(ParameterError, match="json_schema is too large: 20 patterns intersected"):
        grammar_of(json_schema=many)
    compiled = grammar_of(json_schema=many, on_unsupported="ignore")
    assert compiled.ignored[0] == "not at /allOf/0"
    assert can_write(compiled, '"x1y"')
    assert not can_write(compiled, '"x1yyy"')
    nothing = {"type": "string", "not": {"type": "string"}}
    with pytest.raises(ParameterError, match="Unsatisfiable"):
        grammar_of(json_schema=nothing, on_unsupported="ignore")


@pytest.mark.slow
def test_comparisons_take_limited_time() -> None:
    def choice(name: str) -> dict[str, Any]:
        return {"anyOf": [{"$ref": f"#/$defs/{name}"} for _ in range(300)]}

    nested = {"a": choice("b"), "b": choice("c"), "c": choice("d"), "d": {"type": "string"}}
    patterns = [{"type": "string", "pattern": f"(x{i}|y{i}.*){{1,40}}z{i}$"} for i in range(60)]
    for schema in (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": nested},
        {"not": {"$ref": "#/$defs/a"}, "$defs": nested},
        {"oneOf": patterns},
        {"allOf": [{"not": each} for each in patterns]},
        {"items": {"oneOf": [{"items": {"$ref": "#"}}, {"prefixItems": [{"$ref": "#"}] * 20}]}, "not": {"$ref": "#"}},
    ):
        begin = process_time()
        with pytest.raises(ParameterError):
            grammar_of(json_schema=schema)
        assert process_time() - begin < 3


@pytest.mark.slow
def test_all_schemas_of_a_constraint_share_one_budget() -> None:
    schemas = [{"patternProperties": {f"{i}(a|b)*a(a|b){{6}}$": INTEGER, f"^{i}b": {}}} for i in range(200)]
    parts = [
        {"type": "tag", "begin": f"<{i}>", "end": ">", "content": {"type": "json_schema", "json_schema": schema}}
        for i, schema in enumerate(schemas)
    ]
    rules = [f'x{i}: "{i}" %json {json.dumps(schema)}' for i, schema in enumerate(schemas[:100])]
    text = "\n".join([f"start: {' | '.join(f'x{i}' for i in range(100))}", *rules])
    grammar = {"type": "grammar", "grammar": text}
    for fields, message in (
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": parts}}}, "of this kind"),
        ({"structural_tag": {"type": "structural_tag", "format": grammar}}, "its schemas take too many steps"),
        ({"grammar": text}, "grammar is too large: its schemas take too many steps to compare"),
    ):
        begin = process_time()
        with pytest.raises(ParameterError, match=message):
            grammar_of(**fields)
        assert process_time() - begin < 3
