"""Malformed, too large and slow grammars: a clear error in time, and the next request is served."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from bundled_grammars import TOKENIZER, allowed, grammar_of, tokens_of

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import GrammarLimits, StructuredOutputs
from nucleate.structured_output.json_schema import SUPPORTED, UNSUPPORTED
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.pattern_parser import expanded_size

SECONDS = 2.0
"""CPU seconds of this process, which do not depend on the load of the machine."""


def chain(count: int, **more: Any) -> dict[str, Any]:
    """Definitions, each of which refers to the next one."""
    made = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", **{k: v.format(i) for k, v in more.items()}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"items": made}
    return made


LINES = "\n".join
SCHEMAS: dict[str, Any] = {
    "no JSON": "{",
    "trailing comma": '{"type": "object",}',
    "twice the same name": '{"type": "object", "type": "array"}',
    "a list": "[]",
    "a number": "1",
    "false": "false",
    "empty text": "",
    "NaN": {"const": float("nan")},
    "NaN in text": '{"const": NaN}',
    "infinite": '{"minimum": 1e999, "type": "integer"}',
    "no JSON value": {"const": {1, 2}},
    "numbers as names": {"properties": {1: {}}},
    "half a character": {"const": "\ud800"},
    "half a character in text": '{"const": "\\ud800"}',
    "NUL": '{"type":\0"object"}',
    "deep": nested(200),
    "too deep to parse": '{"items":' * 100_000 + "{}" + "}" * 100_000,
    "large": {"const": ["x" * 1000] * 600},
    "one long string": {"const": "x" * 50_000},
    "unknown type": {"type": "strnig"},
    "type of a number": {"type": 1},
    "no types": {"type": []},
    "no values": {"enum": []},
    "enum of a number": {"enum": 1},
    "properties of a list": {"properties": []},
    "required of a string": {"required": "a"},
    "unsatisfiable": {"type": "integer", "minimum": 3, "maximum": 2},
    "contradiction": {"allOf": [{"type": "string"}, {"type": "object"}]},
    "required and forbidden": {"type": "object", "required": ["a"], "additionalProperties": False},
    "negative length": {"type": "string", "minLength": -1},
    "file": {"$ref": "file:///etc/passwd"},
    "itself": {"$ref": "#"},
    "one of itself": {"anyOf": [{"$ref": "#"}]},
    "round and round": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "own options": {"type": "object", "x-guidance": {"lenient": True}},
    "pattern of a gigabyte": {"type": "string", "pattern": "((((a{1000}){1000}){1000}){1000})"},
    "forced": {"type": "string", "pattern": "^(abc){30000}$"},
    "lazy": {"type": "string", "pattern": "^((a{1000}?){1000}?){10}$"},
    "verbose": {"type": "string", "pattern": "(?x)a{ # }\n 1000000}"},
    "many patterns at once": {"allOf": [{"type": "string", "pattern": f"a.*{i}"} for i in range(60)]},
    "many patterns by reference": chain(60, pattern="a.*{}"),
    "references in disguise": json.loads(json.dumps(chain(60, pattern="a.*{}")).replace("#/$defs", "#/%24defs")),
    "references by anchor": {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "not": {}}}},
    "another root": {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "$ref": "#/$defs/c"}, "c": {}}},
    "patterns that meet in a property": {"allOf": [{"properties": {"a": {"pattern": f"a.*{i}"}}} for i in range(60)]},
    "many alternatives of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(8)]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]},
    "large multiple": {"type": "integer", "multipleOf": 1_000_003},
    "small multiple": {"type": "number", "multipleOf": 1.0000019e-7},
    "multiple of nothing": {"type": "integer", "multipleOf": 0},
    "multiple with large bounds": {"type": "integer", "multipleOf": 19_997, "minimum": -1e15, "maximum": 1e15},
    "an array of arrays without end": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "an object of objects without end": {
        "$ref": "#/$defs/o",
        "$defs": {"o": {"type": "object", "properties": {"o": {"$ref": "#/$defs/o"}}, "required": ["o"]}},
    },
    "many patterns of names": {
        "type": "object",
        "patternProperties": {f"^k{i:04}": {"maxLength": i} for i in range(500)},
        "additionalProperties": False,
    },
    "many required names": {"type": "object", "required": [f"n{i}" for i in range(9000)]},
    "repetitions without a separator": {"type": "string", "pattern": r"^(\p{L}{0,500}\p{N}{0,500}){50}$"},
    "long array": {"type": "array", "minItems": 10**9},
    "long string": {"type": "string", "minLength": 10**15},
    "many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}},
    "many values": {"enum": list(range(15_000))},
    "many schemas": {"anyOf": [{}] * 20_000},
    "many to join": {"properties": {f"p{i}": {"$ref": "#", "minLength": 1, "pattern": f"{i}"} for i in range(950)}},
}
REGEXES = {
    "empty": "",
    "repetitions without a separator": "([a-z]{1,100}|[0-9]{1,100}){1,100}",
    "backwards class": "[z-a]",
    "unknown property": r"\p{Foo}",
    "not UTF-8": r"(?-u)\xff",
    "many digits": "a{" + "9" * 5000 + "}",
    "nothing": r"[^\s\S]",
    "NUL": "a\0b",
    "half a character": "\udc00",
    "deep": "(" * 2000 + "a" + ")" * 2000,
    "large": "a" * 100_000,
    "unrolled": "(((a{1000}){1000}){1000}){1000}",
    "unrolled to nothing": "(((a{0,1000}){0,1000}){0,1000}){0,1000}",
    "unrolled spaces": "((a{ 1000 }){ 1000 , }){1000}",
}
GRAMMARS = {
    "empty": "",
    "blank": "   \n ",
    "no start": 'foo: "a"',
    "unknown rule": "start: foo",
    "open string": 'start: "a',
    "broken regex": "start: /(/",
    "twice": 'start: "a"\nstart: "b"',
    "round terminals": "start: A\nA: B\nB: A",
    "endless": 'start: "a" start',
    "itself": "start: start",
    "broken schema": 'start: %json {"type": "strnig"}',
    "unknown import": "%import python.NAME\nstart: NAME",
    "unknown grammar": "start: @foo",
    "unknown token": "start: <|nope|>",
    "the engine's internal format": '{"grammars": [{"json_schema": {}}]}',
    "NUL": 'start: "a\0"',
    "deep": "start: " + "(" * 500 + '"a"' + ")" * 500,
    "large": 'start: "' + "a" * 100_000 + '"',
    "unrolled terminals": "start: D\nD: C{1000}\nC: B{1000}\nB: A{1000}\nA: /a/",
    "doubled terminals": LINES(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)), "R40: /z/"]),
    "doubled rules": LINES(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), "r40: /z/"]),
    "intersections": "start: A\nA: " + " & ".join(f"/(.*[abc]){{{i}}}.*/" for i in range(1, 30)),
    "alternatives": "start: " + "|".join(["A"] * 11_000) + "\nA: /a/",
    "unrolled by tildes": "start: D~1000\nD: C~1000\nC: B~1000..1001\nB: /a/",
    "unrolled with a sign": "start: D\nD: C{+1000}\nC: B{+1000}\nB: /a/",
    "unrolled by names": "start: A A A A A A\nA: B B B B B B B B B B\nB: C{1000}\nC: /a{10}/",
    "counts in a comment of an expression": "start: /a{ # }\n 1000000}/x",
    "bars behind a line break in an expression": 'start: /a\n"/ ' + '| "b" ' * 11_000 + '| "/x/"',
    "a policy within the grammar": 'start: %json {"type": "object", "x-guidance": {"lenient": true}}',
    "unsupported keyword, embedded": 'start: "a" %json {"items": {"not": {"items": {"type": "null"}}}}',
    "one of several, embedded": 'start: %json {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}',
    "fetch, embedded": 'start: %json {"$ref": "http://127.0.0.1:9/x"}',
    "large, embedded": 'start: %json {"required": [' + ",".join(f'"{i:x}"' for i in range(3100)) + "]}",
    "multiples, embedded": LINES(
        [
            "start: " + " ".join(f"a{i}" for i in (7, 11, 13, 17, 19)),
            *(f'a{i}: %json {{"type": "integer", "multipleOf": {i}}}' for i in (7, 11, 13, 17, 19)),
        ]
    ),
    "deep, embedded": "start: %json " + '{"items":' * 201 + "{}" + "}" * 201,
    "too deep to parse, embedded": "start: %json " + "[" * 15_000,
    "no object, embedded": "start: %json true",
    "no JSON, embedded": "start: %json {type: 1}",
    "NaN, embedded": 'start: %json {"const": NaN}',
    "unknown option": '%llguidance {"foo": 1}\nstart: "a"',
    "bytes that are no text": '%llguidance {"allow_invalid_utf8": true}\nstart: /a/',
    "options of no object": '%llguidance [1]\nstart: "a"',
    "unknown part": 'start: %regex {"foo": "a"}',
    "two parts": 'start: %regex {"substring_chars": "a", "substring_words": "b"}',
    "many parts": 'start: %regex {"substring_chars": "' + "ab" * 5000 + '"}',
    "tokens counted": "start: a\na[max_tokens=2]: /.*/",
    "tokens counted, spaced": "start: a\na[lazy, max_tokens = 2]: /.*/",
    "a temperature": "start: a\na[temperature=0.5]: /.*/",
    "text taken back": 'start: a "c"\na[stop="b"]: /.*/',
    "any token": 'start: <[*]> "a"',
    "any token but one": 'start: <[^7]> "a"',
    "a token that is none": "start: <[4100]>",
    "tokens that are none": "start: <[4000-999999999]>",
    "tokens backwards": "start: <[9-7]>",
    "no tokens": "start: <[]>",
    "GBNF, unrolled": 'root ::= d d\nd ::= c{1000}\nc ::= b{1000}\nb ::= a{1000}\na ::= "x"',
    "GBNF, endless rule": "root ::= \\",
}
CHOICES: dict[str, Any] = {
    "none": (),
    "empty": ("",),
    "one empty": ("a", ""),
    "a string": "abc",
    "numbers": (1, 2),
    "half a character": ("\ud83d",),
    "NUL": ("a\0",),
    "many": tuple(map(str, range(20_000))),
    "large": tuple("x" * 1000 + str(i) for i in range(600)),
    "one large": ("x" * 30_000,),
}
CASES = [
    (field, name, value)
    for field, cases in (("json_schema", SCHEMAS), ("regex", REGEXES), ("grammar", GRAMMARS), ("choice", CHOICES))
    for name, value in cases.items()
]


def error_of(**fields: Any) -> ParameterError:
    started = time.process_time()
    with pytest.raises(ParameterError) as caught:
        grammar_of(**fields)
    assert time.process_time() - started < SECONDS
    return caught.value


@pytest.mark.parametrize(("field", "name", "value"), CASES, ids=[f"{field}-{name}" for field, name, _ in CASES])
def test_a_hostile_constraint_is_a_clear_error_in_time(field: str, name: str, value: Any) -> None:
    error = error_of(**{field: value})
    assert error.field == field
    text = str(error)
    assert text.startswith(field)
    assert len(text) < 400
    assert "\n" not in text
    assert not any(word in text for word in (".rs", "site-packages", "panick", "<non-verbose", "Traceback"))
    assert grammar_of(regex="ok").matcher().jump_forward_tokens()  # the compiler still works


SLOW_BUT_FINE = {
    "optional properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}},
    "values": {"json_schema": {"enum": [f"v{i}" for i in range(9000)]}},
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 19_997}},
    "forced": {"regex": "(ab){9999}"},
    "alternatives": {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(1500))},
    "choices": {"choice": [f"choice {i}" for i in range(5000)]},
    "length": {"json_schema": {"type": "string", "minLength": 1000, "maxLength": 1_000_000}},
    "pattern of a long name": {"json_schema": {"propertyNames": {"pattern": "^(a|a)*b$"},
                                              "properties": {"a" * 150: {}}}},
    "patterns": {"json_schema": {"patternProperties": {f"^k{i:03}": {} for i in range(200)}, "type": "object",
                                 "additionalProperties": False}},
    "doubled": {"json_schema": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(24)},
        "d24": {"type": "string"}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW_BUT_FINE)
@pytest.mark.fast_cases(2)
def test_constraints_just_within_the_limits_compile_in_time(name: str) -> None:
    started = time.process_time()
    matcher = grammar_of(**SLOW_BUT_FINE[name]).matcher()
    assert time.process_time() - started < SECONDS
    for _ in range(12):  # and stays within the complexity limit
        matcher.accept_token(allowed(matcher)[-1])
    assert matcher.error is None


def test_limits_can_be_set() -> None:
    tight = GrammarLimits(
        max_characters=40,
        max_string_characters=10,
        max_depth=3,
        max_properties=1,
        max_enum_values=4,
        max_choices=2,
        max_repetitions=5,
        max_required_repetitions=3,
    )
    for fields, words in (
        ({"json_schema": {"title": "x" * 5, "description": "y" * 9}}, "characters"),
        ({"json_schema": {"const": "x" * 11}}, "11 characters"),
        ({"json_schema": {"items": {"items": {"items": {}}}}}, "depth"),
        ({"json_schema": {"properties": {"a": {}, "b": {}}}}, "properties"),
        ({"json_schema": {"enum": [1, 2, 3, 4, 5]}}, "values in enums"),
        ({"json_schema": {"items": {"maxItems": 6}}}, "6 in maxItems at /items"),
        ({"json_schema": {"items": {"pattern": "a{4}"}}}, "4 repetitions in a regex at least at /items"),
        ({"choice": ["a", "b", "c"]}, "texts"),
        ({"choice": ["x" * 11]}, "characters in one text"),
        ({"regex": "a{0,6}"}, "6 repetitions in a regex at most"),
        ({"grammar": "s:a|b|c|d"}, "alternatives"),
    ):
        with pytest.raises(ParameterError, match=words):
            tight.check(StructuredOutputs(**fields))
    tight.check(StructuredOutputs(json_schema={"enum": [1, 2, 3, 4]}))
    tight.check(StructuredOutputs(json_schema={"title": "x" * 15}))
    tight.check(StructuredOutputs(regex="a{3}"))


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


def different(**keywords: Any) -> dict[str, Any]:
    return array(uniqueItems=True, **keywords)


WITH_PLACES: list[tuple[Any, str]] = [
    ({"properties": {"a/b": {"items": {"uniqueItems": True}}}}, "at /properties/a~1b/items;"),
    ({"$ref": "#/x/X", "x": {"X": {"not": {"multipleOf": 2}}}}, "not at /x/X;"),
    ({"items": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}}, "may overlap at /items;"),
    ({"type": "strnig"}, "json_schema: Invalid type: strnig"),
    ({"nullable": True}, 'json_schema: cannot enforce nullable; write "null" as one of the types'),
    ({"const": 9007199254740993}, "json_schema: cannot enforce const with such a large number"),
    ({"type": "integer", "minimum": 1e19}, "json_schema: cannot enforce minimum with such a large number"),
    (array(contains={"type": "integer"}, minContains=9), "cannot enforce contains; set on_unsupported"),
    (array(contains={"type": "string", "pattern": r"\p{L}"}, maxContains=1), "cannot enforce contains; set on_"),
    (
        array(contains={"type": "integer"}, unevaluatedItems=False),
        "cannot enforce unevaluatedItems; set on_unsupported",
    ),
    *(
        ({"properties": {"a": {"$ref": reference}}}, "$ref at /properties/a must refer to a schema in this document")
        for reference in ("other.json", "#/$defs/none", "#none", "http://127.0.0.1:9/x", "#/type")
    ),
    *(
        (different(**keywords), "cannot enforce uniqueItems;")
        for keywords in (
            {"items": {"enum": [*range(6)]}, "minItems": 6},  # a ranking
            {"items": {"enum": [*range(10)]}},
            {"items": {"enum": [*range(99)]}, "maxItems": 2},
            {"items": {"enum": [1, 2], "multipleOf": 1}},
            {"items": {"type": "string"}, "maxItems": 2},
            {"prefixItems": [{"type": "string"}, {"const": "a"}], "items": False},
            {"prefixItems": [{"type": "boolean"}, {"type": "boolean"}]},
            {"prefixItems": [{"enum": [*range(8)]}] * 8, "items": False},
        )
    ),
    (
        {"properties": {name: different(items={"enum": [*"12345"]}) for name in "abcde"}},
        "cannot enforce uniqueItems at /properties/e;",
    ),
]


@pytest.mark.parametrize(("schema", "words"), WITH_PLACES, ids=str)
def test_errors_name_the_keyword_and_the_position(schema: dict[str, Any], words: str) -> None:
    assert words in str(error_of(json_schema=schema))


def test_a_grammar_error_names_the_line() -> None:
    def message_of(grammar: str) -> str:
        return str(error_of(grammar=grammar))

    json_in_lines = 'start: %json {\n\n"type": "null"}\n'
    assert message_of(json_in_lines + "a[max_tokens=2]: /b/").startswith(
        "grammar: in line 4: max_tokens is not supported"
    )
    assert message_of(json_in_lines + "a: (").startswith("grammar: 4(")
    assert message_of('start: a\na: %json {"not": {"multipleOf": 2}}') == "grammar: %json: cannot enforce not"
    assert message_of("start: foo") == 'grammar: at 1(8): unknown name: "foo"'
    assert message_of("start: A\nA: B\nB: A") == "grammar: terminals refer to one another: A"
    assert message_of("start: <[4100-4101]>") == "grammar: <[4100-4101]> is not a range of token ids of this model"


FINE = [
    'start: %json {"type": "object"} "\\n"',
    'start: %json {\n"type": "null"\n} # with a comment: | | |',
    "start: a\na[lazy]: /[a-z]*x/",
    'start: a "b"\na[suffix="y", capture="c"]: /[a-z]*/',
    'start: <[7]> "a" <[1,3-5]>',
    'start: "a" <|endoftext|> "b"',
    '%llguidance {"no_forcing": true}\nstart: "ab"',
    'start: %regex {"substring_words": "a few words"}',
    "%import common.INT\nstart: INT",
    'start: /[a-z]{1,500}/ A{3,5} (B | C)~2..4\nA: /x{1,9}/i\nB: "|&~" // | |\nC: /[|&~(]/',
    'start: %lark {\n start: "a"\n}',
    "start: " + "(" * 20 + '"a"' + ")" * 20,
]  # fmt: skip


@pytest.mark.parametrize("grammar", FINE)
def test_a_valid_grammar_is_accepted(grammar: str) -> None:
    matcher = grammar_of(grammar=grammar).matcher()
    assert matcher.error is None


def test_a_schema_in_a_grammar_has_bounded_whitespace() -> None:
    matcher = grammar_of(grammar='start: %json {"type": "array"}').matcher()
    for text, right in (("[", True), (" ", True), (" ", False), ("]", True)):
        [token] = tokens_of(text)
        if right:
            matcher.accept_token(token)
        else:
            with pytest.raises(ValueError, match="not allowed"):
                matcher.accept_token(token)
    assert matcher.terminated


@pytest.mark.parametrize(("grammar", "size"), [
    ("start: A\nA: B{3}\nB: /x{5}/", (15, 15)),
    ('start: A~2..7\nA: "abc"', (6, 21)),
    ("start: A{2,} [A] A?\nA: /x/", (2, 4)),
    ('start: (A | A A)+\nA: C D{,4}\nC: /a*/\nD: "dd"i', (2, 27)),
    ("A.1: B\nB: /[ab]{2}/ # {9}\nstart[lazy]: A{+3}", (6, 7)),
])  # fmt: skip
def test_repetitions_in_a_grammar_multiply(grammar: str, size: tuple[int, int]) -> None:
    assert parse_lark(grammar).size == size


def test_parse_lark() -> None:
    lark = parse_lark('start: <[7]> a | <[1,3-5]>\na: A // & ~ | (\nA: (~/a&/ & ~"~") | /|/~2\n')
    assert (lark.num_alternatives, lark.num_operators, lark.depth) == (2, 3, 1)
    assert lark.token_id_ranges == ((7, 7), (1, 1), (3, 5))
    embedding = parse_lark('start: %json {\n\n"const": 1}\nb: "x"', {"o": 1})
    assert embedding.schemas == ({"const": 1},)
    assert embedding.text.count("\n") == 3
    assert json.loads(embedding.text[len("start: %json ") : embedding.text.rindex("\nb")]) == {
        "const": 1,
        "x-guidance": {"o": 1},
    }


def test_an_unsupported_keyword_that_is_unreachable_is_ignored() -> None:
    grammar_of(json_schema={"type": "null", "$defs": {"a": {"not": {}}}, "default": {"not": 1}})
    grammar_of(json_schema={"const": {"not": 1, "uniqueItems": True}})
    grammar_of(json_schema={"properties": {"not": {"type": "null"}, "format": {"type": "null"}}})
    grammar_of(json_schema={"type": "integer", "format": "int32"})


def test_json_text_and_object_are_equal() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutputs(json_schema=schema) == StructuredOutputs(json_schema=json.dumps(schema, indent=4))


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("a{1,9}", 0),
        ("(ab){9}", 0),
        ("([a-z]{1,100}){1,100}", 9900),
        (r"(\w{1,20} ){1,50}", 0),
        (r"(\p{L}{0,5}\p{N}{0,5}){50}", 500),
        ("([a-z]{1,10}|[0-9]{1,10}){1,10}", 180),
        ("([a-z]{1,10}|x){1,10}", 90),
        ("((a{0,10}){0,10}){10}", 1000),
        ("([a-z]+)*", 1),
    ],
)
def test_repetitions_without_a_separator_are_ambiguous(pattern: str, size: int) -> None:
    assert expanded_size(pattern).ambiguous == size


def test_endless_alternatives_are_removed() -> None:
    endless = {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}
    schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/e"}], "$defs": {"e": endless}}
    matcher = grammar_of(json_schema=schema).matcher()
    assert TOKENIZER.decode(matcher.jump_forward_tokens()) == "null"


WRONG: list[Any] = [None, 1, -1, 2.5, "a", [], [1], [[]], {}, {"a": 1}, {"a": [1]}, {"a": None}, True]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.fast_cases(0)
def test_keywords_with_values_of_the_wrong_type_are_clear_errors(value: Any) -> None:
    for keyword in sorted(SUPPORTED | UNSUPPORTED):
        for others in ({}, {"type": "object", "properties": {"a": {}}}, {"oneOf": [{"const": 1}, {keyword: value}]}):
            for on_unsupported in ("error", "ignore"):
                try:
                    grammar_of(json_schema={**others, keyword: value}, on_unsupported=on_unsupported)
                    continue
                except ParameterError as raised:
                    error = raised
                assert error.field == "json_schema"
                assert len(str(error)) < 400
