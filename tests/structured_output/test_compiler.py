"""Random walks over allowed tokens always produce text that satisfies the constraint."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from bundled_grammars import TOKENIZER, allowed, can_write, grammar_of

import nucleate as nc
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": -9, "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value"],
    "additionalProperties": False,
}
LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "head": {"type": "boolean"},
                "tail": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["head", "tail"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string", "maxLength": 20},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 6},
    {"type": "object", "maxProperties": 3},
    {"const": {"a": [1, "ü", None]}},
    {"enum": ["red", "green", 3, None, [1, 2], {"k": "v"}]},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 1000},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(ab|cd)+$", "maxLength": 10},
    {"type": "string", "pattern": "[0-9]{4}", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a"]}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3},
    closed(),
    PERSON,
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"], "additionalProperties": {"enum": [1]}},
    {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": {"type": "boolean"}},
    closed(person=PERSON, tags={"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}),
    closed(a=closed(b=closed(c=closed(d={"type": "array", "items": closed(e={"type": "boolean"}), "maxItems": 2})))),
    {"anyOf": [PERSON, {"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"oneOf": [closed(kind={"const": "a"}, x={"type": "integer"}), closed(kind={"const": "b"}, y={"type": "boolean"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"maxProperties": 1}]},
    TREE,
    LIST,
    {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
    {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": closed(z={"type": "boolean"})}}},
    {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 4},
    closed(**{f"field_{i}": {"type": ["integer", "null"], "maximum": 99} for i in range(12)}),
    {"type": "object", "properties": {f"o{i}": {"type": "boolean"} for i in range(10)}, "additionalProperties": False},
    closed(**{'q"uo\\te': {"const": '\u2028 \n\t"'}, "ключ": {"enum": ["да", "нет"]}, "😀": {"type": "null"}}),
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}, {"const": "x"}],
     "type": "array", "additionalItems": False, "minItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"d": PERSON}, "$ref": "#/definitions/d"},
    {"type": "array", "items": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "maxLength": 2}]},
     "minItems": 1, "maxItems": 5},
    closed(mail={"type": "string", "format": "email", "maxLength": 40}, site={"type": "string", "format": "ipv6"}),
    closed(m={"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
              "minItems": 2, "maxItems": 2}),
    {"title": "T", "description": "d", "type": "object", "properties": {"a": {"type": "integer", "default": 3,
     "examples": [1], "title": "A"}}, "required": ["a"], "additionalProperties": False, "x-mine": 1},
    closed(price={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99},
           code={"type": "string", "pattern": "^\\d{2}[a-f]?$"}),
]  # fmt: skip
REGEXES = [
    "a",
    "(foo|bar)+",
    r"\d{3}-\d{4}",
    "[a-c]*z",
    r"(?i)yes|no",
    r"[^\n]{0,8}!",
    "(a|b)*a(a|b){5}",
    r"\p{Lu}\p{Ll}{1,4}",
    "x{2,5}y?",
    r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "^anchored$",
    "[😀-😂]{2}",
]
CHOICES = [
    ("yes", "no"),
    ("a", "ab", "abc"),
    ("same", "same"),
    (" leading", "trailing ", "\n", "\t\"\\/'", "\x7f\x01"),
    ("日本", "日本語", "é", "😀"),
    tuple(f"choice number {number}" for number in range(200)),
    ("<|endoftext|>", "<|end|>"),
]


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9+*()]+", text) is not None and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


GRAMMARS: list[tuple[str, Callable[[str], bool]]] = [
    ('start: "a" ("b" | "c")+', matches("a[bc]+")),
    ('start: s\ns: "(" s ")" | "x"', lambda text: text.count("(") == text.count(")") and text.strip("()") == "x"),
    ('start: e\ne: e "+" t | t\nt: t "*" f | f\nf: "(" e ")" | N\nN: /[0-9]{1,3}/', is_sum),
    (
        "start: A & B\nA: /[a-z]{1,9}/\nB: /.*x.*/".replace("start: A & B", "start: C\nC: A & B"),
        matches("[a-z]*x[a-z]*"),
    ),
    ('%ignore / /\nstart: "a" "b" "c"', lambda text: text.replace(" ", "") == "abc"),
    ('start: %json {"type": "boolean"}', lambda text: text in ("true", "false")),
    ('root ::= "a" | "b" root', matches("b*a")),
    ('root ::= item ("," item)*\nitem ::= [0-9]+ # numbers', matches(r"\d+(,\d+)*")),
    (r'root ::= "\u0041\U0001F600" [\u0062-\u0064]{2,3} "\x21\n"', matches("A😀[b-d]{2,3}!\n")),
    (r'root ::= "\"" [^"\\\x00-\x1f]{0,5} "\"" "\\u0041"', matches(r'"[^"\\\x00-\x1f]{0,5}"\\u0041')),
]


def draw(choices: list[int], late: bool, rng: random.Random) -> int:
    """A random allowed token; after many steps, one that is likely to end the text."""
    ends = [token for token in choices if token in TOKENIZER.eos_token_ids]
    if late and ends:
        return ends[0]
    if late:
        closing = [
            token for token in choices if TOKENIZER.pieces.table[token] in ('"', "}", "]", ")", "x", "!", "z", "a")
        ]
        choices = closing or choices
    return rng.choice(choices)


def walk(compiled: CompiledGrammar, seed: int) -> str:
    rng = random.Random(seed)
    matcher = compiled.matcher()
    tokens: list[int] = []
    for step in range(3000):
        token = draw(allowed(matcher), step > 25, rng)
        matcher.accept_token(token)
        if token in TOKENIZER.eos_token_ids:
            assert matcher.accepting
            assert matcher.terminated
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
    raise AssertionError(f"no end after {TOKENIZER.decode(tokens)[:200]!r}")


@pytest.mark.parametrize("whitespace", ["flexible", "none"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
@pytest.mark.fast_cases(21)
def test_text_with_a_schema_parses_and_validates(schema: dict[str, Any], whitespace: Any) -> None:
    compiled = grammar_of(json_schema=schema, whitespace=whitespace)
    assert compiled.ignored == ()
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for seed in range(6):
        text = walk(compiled, seed)
        value = json.loads(text)
        errors = [*validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(value)]
        assert not errors, text
        assert compiled.validate(text, seconds=60) == []
        if whitespace == "none":
            outside = re.sub(r'"(?:\\.|[^"\\])*"', "", text)
            assert not re.search(r"\s", outside), text


def test_json_objects() -> None:
    compiled = grammar_of(json_object=True)
    for seed in range(20):
        text = walk(compiled, seed)
        assert isinstance(json.loads(text), dict)
        assert not re.search(r"[ \t\n]{18}", re.sub(r'"(?:\\.|[^"\\])*"', '""', text))


@pytest.mark.parametrize("pattern", REGEXES)
def test_text_with_a_regex_matches(pattern: str) -> None:
    import regex

    for seed in range(6):
        text = walk(grammar_of(regex=pattern), seed)
        assert regex.fullmatch(pattern, text), text


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: repr(choice)[:30])
def test_text_with_choices_is_one_of_them_and_may_be_any(choice: tuple[str, ...]) -> None:
    compiled = grammar_of(choice=choice)
    walks = {walk(compiled, seed) for seed in range(40)}
    assert walks <= set(choice)
    assert len(walks) >= min(len(set(choice)), 2)
    assert [text for text in choice if not can_write(compiled, text)] == []


@pytest.mark.parametrize(("grammar", "right"), GRAMMARS, ids=[grammar[:30] for grammar, _ in GRAMMARS])
def test_text_with_a_grammar_conforms_to_it(grammar: str, right: Callable[[str], bool]) -> None:
    for seed in range(6):
        text = walk(grammar_of(grammar=grammar), seed)
        assert right(text), text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (PERSON, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 151}'),
        (PERSON, '{\n  "name": "Ann",\n  "age": 3\n}', '{"name":  "Ann", "age": 3}'),
        (PERSON, '{"name":"Ann","age":3}', '{"name":"Ann","age":3} '),
        (PERSON, '{\n\t"name": "Ann",\n\t"age": 3\n}', '{\n\n"name": "Ann", "age": 3}'),
        (TREE, '{"value":1,"children":[{"value":2,"children":[]}]}', '{"value":1,"children":[{}]}'),
        ({"type": "number"}, "-1.5e-3", "01"),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-13-01"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-02-30"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T23:59:59.5Z"', '"2024-02-29T24:00:00Z"'),
        ({"enum": [1, "1"]}, '"1"', "11"),
        ({"type": "array"}, "[\n" + " " * 16 + "1\n]", "[\n" + " " * 17 + "1\n]"),
        ({"type": "array"}, "[\n" + "\t" * 8 + "1\n]", "[\n" + "\t" * 9 + "1\n]"),
        ({"type": "array"}, json.dumps([[[[1]]]], indent=4), "[ \n]"),
        (TREE, json.dumps({"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}, indent=2), "{}"),
    ],
)
def test_valid_text_can_be_generated_and_invalid_text_cannot(schema: dict[str, Any], right: str, wrong: str) -> None:
    compiled = grammar_of(json_schema=schema)
    assert can_write(compiled, right)
    assert not can_write(compiled, wrong)


def test_the_sampler_accepts_masks() -> None:
    """Rows of one batch, each with its own constraint or none; high scores of banned tokens have no effect."""
    wide = GrammarCompiler(TOKENIZER, 4133)
    constraints = [
        StructuredOutputs(choice=("yes", "no")),
        None,
        StructuredOutputs(regex="[0-9]{3}"),
        StructuredOutputs(json_schema=PERSON),
    ]
    matchers = [None if constraint is None else wide.compile(constraint).matcher() for constraint in constraints]
    masks_RW = np.empty((4, wide.num_words), np.int32)
    logits_RV = np.random.default_rng(0).normal(size=(4, 4133)).astype(np.float32)
    logits_RV[:, 4096:] = 30  # ids beyond the tokenizer
    sampler = nc.Sampler(4133)
    rows = [sampler.add(nc.SamplingParams(seed=5 + index, repetition_penalty=1.3)) for index in range(4)]
    outputs: list[list[int]] = [[], [], [], []]
    for _ in range(12):
        wide.fill_all(matchers, masks_RW)
        sampled = sampler(logits_RV, rows, mask=masks_RW).token_ids
        for index, token in enumerate(int(token) for token in sampled):
            outputs[index].append(token)
            if matchers[index] is not None:
                matchers[index].accept_token(token)
    assert all(token >= 4096 for token in outputs[1])
    texts = [TOKENIZER.decode([token for token in row if token < 4096], skip_special_tokens=True) for row in outputs]
    assert texts[0] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", texts[2])
    assert all(token < 4096 for row in (0, 2, 3) for token in outputs[row])
