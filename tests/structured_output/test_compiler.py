"""Random walks over allowed tokens always produce text that satisfies the constraint."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import grammar_examples
import jsonschema
import pytest
from bundled_grammars import TOKENIZER, allowed, can_write, grammar_of
from grammar_examples import closed, integer
from grammar_examples import text as string

from nucleate.structured_output import CompiledGrammar

PERSON = closed(name=string(12), age=integer(0, 150))
TREE = closed(("children",), value=integer(-9, 9), children={"type": "array", "items": {"$ref": "#"}, "maxItems": 2})
SCHEMAS: list[dict[str, Any]] = [
    *grammar_examples.SCHEMAS.values(),
    {"type": "integer"},
    {"type": "string", "maxLength": 20},
    {"type": "object", "maxProperties": 3},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 1000},
    {"type": "string", "pattern": "^(ab|cd)+$", "maxLength": 10},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"], "additionalProperties": {"enum": [1]}},
    {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": {"type": "boolean"}},
    {"anyOf": [PERSON, {"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"maxProperties": 1}]},
    TREE,
    {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": closed(z={"type": "boolean"})}}},
    {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 4},
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}, {"const": "x"}],
     "type": "array", "additionalItems": False, "minItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"d": PERSON}, "$ref": "#/definitions/d"},
    {"title": "T", "description": "d", "type": "object", "properties": {"a": {"type": "integer", "default": 3,
     "examples": [1], "title": "A"}}, "required": ["a"], "additionalProperties": False, "x-mine": 1},
]  # fmt: skip
REGEXES = [
    *grammar_examples.PATTERNS,
    *("a", "(foo|bar)+", "[a-c]*z", r"[^\n]{0,8}!", "(a|b)*a(a|b){5}", r"\p{Lu}\p{Ll}{1,4}", "x{2,5}y?", "^anchored$"),
    *("[😀-😂]{2}", r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"),
]
CHOICES = [
    *(texts for texts in grammar_examples.CHOICES if len(texts[0]) < 26),  # ``draw`` ends longer texts in one way
    *(("same", "same"), (" leading", "trailing ", "\n", "\t\"\\/'", "\x7f\x01"), ("<|endoftext|>", "<|end|>")),
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
        ending = ('"', "}", "]", ")", "x", "!", "z", "a", "n")  # null ends a recursion
        closing = [token for token in choices if TOKENIZER.pieces.table[token] in ending]
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
@pytest.mark.fast_cases(13)
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


@pytest.mark.slow
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
