"""Structural tags: masks against a reference that splits texts at triggers, special tokens, limits and errors."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest
import regex
import tiers
from bundled_grammars import TOKENIZER, allowed, can_write, grammar_of, tokens_of
from tag_twin import SPECIAL_WORDS, WORDS, Content, Section, Twin, compiler_of, tokenizer_of, walk_all, walk_random

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import GrammarMatcher, MatcherError, StructuredOutputs

Document = dict[str, Any]


def structural(form: Document) -> Document:
    return {"type": "structural_tag", "format": form}


def tag(begin: Any, content: Document, *ends: Any) -> Document:
    return {"type": "tag", "begin": begin, "content": content, "end": list(ends) if len(ends) > 1 else ends[0]}


def content_of(content: Content) -> Document:
    if content.pattern is not None:
        return {"type": "regex", "pattern": content.pattern}
    return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in content.texts]}


def document_of(twin: Twin) -> Document:
    return structural(
        {
            "type": "triggered_tags",
            "triggers": list(twin.triggers),
            "tags": [tag(each.begin, content_of(each.content), *each.ends) for each in twin.sections],
            "at_least_one": twin.at_least_one,
            "stop_after_first": twin.stop_after_first,
        }
    )


AB = Content(texts=("a", "ba"))
LOOP = Content(pattern="[ab<]*")
TWINS = {
    "one tag": (WORDS, Twin(("<t",), (Section("<t>", AB, ("/>",)),))),
    "two tags": (WORDS, Twin(("<t",), (Section("<t>", AB, ("/>",)), Section("<ta", LOOP, ("/>",))))),
    "the trigger is the begin": (WORDS, Twin(("<t",), (Section("<t", AB, ("/>",)),))),
    "two triggers": (WORDS, Twin(("<t", "b>"), (Section("<t>", AB, ("/>",)), Section("b>", AB, ("t", "/>"))))),
    "at least one": (WORDS, Twin(("<t",), (Section("<t>", AB, ("/>",)),), at_least_one=True)),
    "stop after first": (WORDS, Twin(("<t",), (Section("<t>", AB, ("/>",)),), stop_after_first=True)),
    "exactly one": (WORDS, Twin(("<",), (Section("<", LOOP, ("/>",)),), at_least_one=True, stop_after_first=True)),
    "an end in the content": (WORDS, Twin(("<t",), (Section("<t>", Content(pattern="[ab/]*"), ("a/", "bb")),))),
    "a trigger that overlaps itself": (WORDS, Twin(("aba",), (Section("aba", AB, ("ab",)),))),
    "a special token": (SPECIAL_WORDS, Twin(("<|T|>",), (Section("<|T|>", AB, ("<|E|>",)),))),
    "special tokens with text": (
        SPECIAL_WORDS,
        Twin(("<|T|>",), (Section("<|T|>a<|E|>", AB, ("/", "b<|E|>/")), Section("<|T|>b", AB, ("<|E|>",)))),
    ),
    "a special token inside a trigger": (SPECIAL_WORDS, Twin(("a<|T|>b",), (Section("a<|T|>b", AB, ("<|E|>",)),))),
    "a pattern up to a special token": (SPECIAL_WORDS, Twin(("<|T|>",), (Section("<|T|>", LOOP, ("<|E|>", "b/")),))),
}


@pytest.mark.parametrize("name", TWINS)
def test_masks_equal_the_reference_after_all_short_texts_and_along_random_ones(name: str) -> None:
    words, twin = TWINS[name]
    tokenizer, rng = tokenizer_of(words), random.Random(name)
    grammar = compiler_of(words).compile(StructuredOutputs(structural_tag=document_of(twin)))
    assert sum(walk_all(grammar.matcher(), tokenizer, twin, [], tiers.count(1, 3))) > 1
    for _ in range(tiers.count(4, 300)):
        walk_random(grammar, tokenizer, twin, rng, 14)


# ---- the embedded model's vocabulary

CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "look up"]}, "args": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name"],
    "additionalProperties": False,
}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<call"],
    "tags": [
        tag("<call>", {"type": "json_schema", "json_schema": CALL}, "</call>"),
        tag("<call=now>", {"type": "regex", "pattern": "[a-z ]{0,9}"}, "</call>", "<end/>"),
    ],
}
THINK = tag("<think>", {"type": "any_text"}, "</think>")
IN_PARTS = structural({"type": "sequence", "elements": [THINK, CALLS]})


def check_calls(text: str, complete: bool) -> int:
    """Check all sections of a text; return their number. An incomplete text may end in a section."""
    thought, end, rest = text.partition("</think>")
    assert thought.startswith("<think>"[: len(text)])
    if not end:
        assert not complete
        return 0
    count = 0
    while "<call" in rest:
        _, _, rest = rest.partition("<call")
        ends = [(rest.find(end), end) for end in ("</call>", "<end/>") if end in rest]
        if not ends:
            assert not complete
            return count
        position, end = min(ends)
        begin, _, content = rest[:position].partition(">")
        rest = rest[position + len(end) :]
        count += 1
        if begin == "":
            jsonschema.validate(json.loads(content), CALL)
        else:
            assert begin == "=now"
            assert regex.fullmatch("[a-z ]{0,9}", content)
    return count


@pytest.mark.slow
def test_sections_of_random_texts_are_valid() -> None:
    """Random tokens, with triggers and ends strewn in where they are allowed, also at the ends of other tokens."""
    grammar = grammar_of(structural_tag=IN_PARTS, whitespace="none")
    hints = [*map(tokens_of, ("</think>", "<call>", " a<call", "=now>", "]}</call>x"))]
    rng, found = random.Random(2), 0
    for _ in range(20):
        matcher, ids = grammar.matcher(), list[int]()
        while len(ids) < 120 and not matcher.terminated:
            options = sorted({*allowed(matcher)} - TOKENIZER.eos_token_ids)
            hint = rng.choice(hints) if rng.random() < 0.4 else [rng.choice(options)]
            for token in hint:
                if token not in allowed(matcher):
                    break
                matcher.accept_token(token)
                ids.append(token)
        found += check_calls(TOKENIZER.decode(ids), matcher.accepting)
    assert found > 20


@pytest.mark.slow
def test_a_model_generates_valid_sections() -> None:
    form = structural(
        {
            "type": "triggered_tags",
            "triggers": [" a"],
            "tags": [tag(" a ", {"type": "json_schema", "json_schema": {"enum": ["big", ["red"]]}}, " dog")],
        }
    )
    params = nc.SamplingParams(structured_outputs={"structural_tag": form}, max_tokens=60, n=4, seed=1)
    found = 0
    for output in nc.LLM().generate("Once upon a time there was", params)[0].outputs:
        *sections, last = output.text.split(" a")[1:] or [""]
        for section in sections:
            assert section.startswith((' "big" dog', ' ["red"] dog'))
        whole = [*sections, last] if output.finish_reason == "stop" else sections
        found += len(whole)
    assert found > 4


def matcher_of(words: str, form: Document) -> tuple[GrammarMatcher, dict[str, int]]:
    """A matcher for a vocabulary of these words and three special tokens, and the ids by their texts."""
    compiler = compiler_of(words.split())
    ids = {name: token for token, name in tokenizer_of(words.split()).pieces.tokens.items()}
    return compiler.compile(StructuredOutputs(structural_tag=structural(form))).matcher(), ids


def accept(matcher: GrammarMatcher, ids: dict[str, int], *names: str) -> None:
    """Accept tokens, all of which the masks must allow."""
    for name in names:
        assert ids[name] in allowed(matcher)
        matcher.accept_token(ids[name])


def names_allowed(matcher: GrammarMatcher, ids: dict[str, int]) -> set[str]:
    return {name for name, token in ids.items() if token in allowed(matcher)}


def test_sections_begin_with_a_special_token_where_free_text_may_not_have_others() -> None:
    tags = [tag("<|T|>", {"type": "regex", "pattern": "a"}, "b")]
    matcher, ids = matcher_of("a b c < | T E > / </", {"type": "triggered_tags", "triggers": ["<|T|>"], "tags": tags})
    assert names_allowed(matcher, ids) == {*"abc<|TE>/", "</", "<|T|>", "</s>"}  # not <|E|>


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<|T|>", "<|E|>"), ({"type": "token", "token": "<|T|>"}, {"type": "token", "token": "<|E|>"})],
    ids=["spelled", "token"],
)
def test_a_token_object_is_the_token_only(begin: Any, end: Any) -> None:
    matcher, ids = matcher_of("a b < | T E >", tag(begin, {"type": "regex", "pattern": "a"}, end))
    spelled = {"<"} if isinstance(begin, str) else set[str]()
    assert names_allowed(matcher, ids) == {"<|T|>"} | spelled
    accept(matcher, ids, "<|T|>", "a")
    assert names_allowed(matcher, ids) == {"<|E|>"} | spelled
    accept(matcher, ids, "<|E|>")
    assert matcher.terminated


@pytest.mark.parametrize("content", [{"type": "regex", "pattern": "a+"}, {"type": "any_text"}], ids=str)
def test_a_special_token_that_cannot_be_spelled_is_the_token_only(content: Document) -> None:
    matcher, ids = matcher_of("a b < >", tag("<|T|>", content, "<|E|>"))
    accept(matcher, ids, "<|T|>", "a", "<|E|>")
    assert matcher.terminated


def test_an_end_may_be_eos() -> None:
    matcher, ids = matcher_of("a b", tag("a", {"type": "any_text"}, {"type": "token", "token": "</s>"}))
    for name in ("a", "b"):
        assert ids["<|T|>"] not in allowed(matcher)
        accept(matcher, ids, name)
    assert not matcher.accepting
    accept(matcher, ids, "</s>")
    assert matcher.terminated


def test_a_failure_of_one_sequence_does_not_end_the_others() -> None:
    """llguidance 1.9.1 fails at the second EOS token inside a grammar, and then in all copies of its state."""
    inner = tag("<t>", {"type": "regex", "pattern": "#"}, {"type": "token", "token": "</s>"}, "x")
    form = several("sequence", {"type": "plus", "content": inner}, const("b"))
    failing, ids = matcher_of("< t > # x b", form)
    other = failing.copy()
    for name in ("<", "t", ">", "#", "</s>", "<", "t", ">", "#"):
        failing.accept_token(ids[name])
    with pytest.raises((MatcherError, ValueError)):
        failing.accept_token(ids["</s>"])
    for name in ("<", "t", ">", "#"):
        other.accept_token(ids[name])
    assert names_allowed(other, ids) == {"</s>", "x"}


# ---- formats

OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(text: str) -> Document:
    return {"type": "const_string", "value": text}


def several(kind: str, *elements: Document) -> Document:
    return {"type": kind, "elements": list(elements)}


TEXTS: list[tuple[Document, str, list[str], list[str]]] = [
    (several("sequence", const("a"), INTEGER, const("b")), "sequence", ["a1b", "a-20b"], ["a", "ab", "a1", "a1bb"]),
    (several("or", const("a"), const("ab"), OBJECT), "or", ["a", "ab", "{}"], ["", "b", "{"]),
    ({"type": "optional", "content": const("ab")}, "optional", ["", "ab"], ["a", "abab"]),
    ({"type": "star", "content": const("ab")}, "star", ["", "ab", "ababab"], ["a", "aba"]),
    ({"type": "plus", "content": tag("<", INTEGER, ">")}, "plus", ["<1>", "<1><-2>"], ["", "<1", "<1>2"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, "repeat", ["a", "aa"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": OBJECT}, "repeat objects", ["{}{}", "{}{}{}"], ["", "{}"]),
    (tag("<", {"type": "any_text", "excludes": ["a"]}, ">"), "excludes", ["<>", "<bb>"], ["<a>", "<b>>", "<b"]),
    (tag("", OBJECT, ""), "empty begin and end", ["{}"], ["", "{} "]),
    (
        tag("<", tag("(", {"type": "any_text"}, ""), ">"),
        "a tag without an end, up to that of the tag around it",
        ["<(>", "<(a(>"],
        ["<>", "<(>>", "<(a"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": ", "},
        "separator",
        ["", "<1>", "<1>, <2>"],
        ["<1><2>", "<1>, ", ", <1>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": ",", "stop_after_first": True},
        "one tag at most",
        ["", "<1>"],
        ["<1>,<2>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": "", "at_least_one": True},
        "without a separator",
        ["<1>", "<1><2>"],
        ["", "<1>,"],
    ),
    (
        tag("(", {"type": "grammar", "grammar": 'root ::= "[" root "]" | "a"*'}, ")"),
        "GBNF",
        ["()", "(aa)", "([a])"],
        ["([)", "(]"],
    ),
    (
        tag("(", {"type": "grammar", "grammar": 'start: "[" start "]" | /a+/'}, ")"),
        "Lark",
        ["(aa)", "([a])"],
        ["()", "([)"],
    ),
    (tag("(", {"type": "regex", "pattern": "a/b|\n"}, ")"), "a slash in a pattern", ["(a/b)", "(\n)"], ["(ab)"]),
    (
        tag("<a>", {**CALLS, "tags": [tag("<call>", INTEGER, "</call>")]}, "</a>"),
        "free text in a tag",
        ["<a></a>", "<a>x<call>1</call>y</a>", "<a><</a>"],
        ["<a><call></a>", "<a>x</a>y", "<a>x<call>1</call>"],
    ),
    ({"type": "any_text"}, "any text", ["", "abc <call>"], []),
]


@pytest.mark.parametrize(("form", "name", "valid", "invalid"), TEXTS, ids=[name for _, name, _, _ in TEXTS])
def test_formats_accept_their_texts(form: Document, name: str, valid: list[str], invalid: list[str]) -> None:
    grammar = grammar_of(structural_tag=structural(form), whitespace="none")
    assert [text for text in valid if not can_write(grammar, text)] == []
    assert [text for text in invalid if can_write(grammar, text)] == []


ERRORS: list[tuple[Document, str]] = [
    ({}, "structural_tag.type: must be 'structural_tag', got None"),
    ({"type": "structural_tag"}, "structural_tag: needs a format, or structures and triggers"),
    (structural({"type": "jsonschema"}), "structural_tag.format.type: must be one of const_string, json_schema, "),
    (structural({"type": "regex"}), "structural_tag.format: needs pattern"),
    (structural({"type": "any_text", "stop": 1}), "structural_tag.format: unknown field 'stop'"),
    (structural({"type": "any_text"}) | {"x": 1}, "structural_tag: unknown field 'x'"),
    (structural(several("sequence")), "structural_tag.format.elements: must be a non-empty list, got []"),
    (structural(several("or", const("a"), {"type": "tag"})), "structural_tag.format.elements[1]: needs begin"),
    (structural({**OBJECT, "style": "qwen_xml"}), "structural_tag.format.style: must be 'json', got 'qwen_xml'"),
    (structural(tag("a", OBJECT, "", "b")), "structural_tag.format.end: must be a string, a token, or a list"),
    (structural(tag("a", OBJECT, "b", "bc")), "structural_tag.format.end: 'bc' is never reached, because 'b' ends"),
    (structural({"type": "token", "token": "<|none|>"}), "structural_tag.format: '<|none|>' is not a token of this"),
    (structural({**CALLS, "triggers": ["<call", "<c"]}), "'<call' is never reached, because free text already ends"),
    (structural({**CALLS, "triggers": ["<call", "<x"]}), "structural_tag.format.triggers[1]: no tag begins with '<x'"),
    (structural({**CALLS, "triggers": ["<x"]}), "structural_tag.format.tags[0].begin: '<call>' begins with none of"),
    (
        {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["x"]},
        "structural_tag.structures[0].begin: 'a' begins with none of the triggers",
    ),
    (
        structural(several("sequence", {"type": "any_text"}, OBJECT)),
        "structural_tag.format.elements[0]: its end is ambi",
    ),
    (
        structural(several("sequence", INTEGER, const("1"))),
        "elements[0]: its end is ambiguous: what follows (format.el",
    ),
    (
        structural(several("or", {"type": "regex", "pattern": "[{]"}, OBJECT)),
        "cannot be told apart from format.elements[",
    ),
    (structural(several("sequence", CALLS, const("x"))), "structural_tag.format.elements[0]: its end is ambiguous"),
    (structural({"type": "regex", "pattern": "("}), "structural_tag.format: at "),
    (
        structural({"type": "regex", "pattern": "a{9000000}"}),
        "structural_tag.format: is too large: 9000000 repetitions",
    ),
    (
        structural(tag("a", {"type": "json_schema", "json_schema": {"uniqueItems": True}}, "b")),
        "structural_tag.format.content: cannot enforce uniqueItems",
    ),
    (
        structural({"type": "grammar", "grammar": "root ::= x"}),
        "structural_tag.format: in line 1: there is no rule 'x'",
    ),
    (structural(const("a" * 500_001)), "structural_tag is too large: 5000"),
]


@pytest.mark.parametrize(("document", "words"), ERRORS, ids=[words[:60] for _, words in ERRORS])
def test_an_error_names_the_place(document: Document, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        grammar_of(structural_tag=document)
    assert caught.value.field == "structural_tag"
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_ignored_keywords_are_listed_with_their_place() -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    form = structural(tag("<", {"type": "json_schema", "json_schema": schema}, ">"))
    compiled = grammar_of(structural_tag=form, on_unsupported="ignore")
    assert compiled.ignored == compiled.unchecked == ("uniqueItems at /properties/a in format.content",)
    assert compiled.validate("<{}>") == []


@pytest.mark.slow
def test_many_tags_compile_in_a_second() -> None:
    form = {**CALLS, "tags": [tag(f"<call={number}>", OBJECT, "</call>") for number in range(200)]}
    begin = time.thread_time()
    grammar_of(structural_tag=structural(form))
    assert time.thread_time() - begin < 2
    form = {**CALLS, "tags": [tag(f"<call={number}>", const("a"), "</call>") for number in range(1000)]}
    begin = time.thread_time()
    grammar_of(structural_tag=structural(form))
    assert time.thread_time() - begin < 2
