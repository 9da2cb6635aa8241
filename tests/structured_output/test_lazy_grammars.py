"""Lazy grammars: masks against a reference that searches the first trigger, spellings of triggers, and errors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import regex
import tiers
from tag_twin import SPECIAL_WORDS, WORDS, compiler_of, spellings, tokenizer_of, walk_all, walk_random

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import GrammarCompiler, StructuredOutputs
from nucleate.structured_output.spec import GrammarTrigger


def word(value: str) -> dict[str, Any]:
    return {"type": "word", "value": value}


@dataclass(frozen=True)
class LazyTwin:
    """Text up to the first of some triggers, and from there on a match of ``pattern``."""

    triggers: tuple[str, ...]
    pattern: str

    def check(self, text: str) -> tuple[bool, bool]:
        spelled = [each for trigger in self.triggers for each in spellings(trigger)]
        found = [(at + len(trigger), at) for trigger in spelled if (at := text.find(trigger)) >= 0]
        free = text[: min(found)[1]] if found else text
        if not found:
            begun = [size for trigger in spelled for size in range(len(trigger)) if free.endswith(trigger[:size])]
            special = any(character >= "\ue000" for character in free[: len(free) - max(begun, default=0)])
            return not special, not any(character >= "\ue000" for character in free)
        rest = text[len(free) :]
        is_free = not any(character >= "\ue000" for character in free)
        complete = regex.fullmatch(self.pattern, rest) is not None
        return is_free and regex.fullmatch(self.pattern, rest, partial=True) is not None, is_free and complete


LAZY: dict[str, tuple[list[str], str, list[dict[str, Any]], LazyTwin]] = {
    "GBNF": (WORDS, 'root ::= "<t" [ab]+ ">" "a"?', [word("<t")], LazyTwin(("<t",), "<t[ab]+>a?")),
    "recursive GBNF": (
        WORDS,
        'root ::= "<" x\nx ::= "t" x | y\ny ::= "a" | y "b"',
        [word("<")],
        LazyTwin(("<",), "<t*ab*"),
    ),
    "two words": (
        WORDS,
        'root ::= ("<t" | "b<") "a"* "/"',
        [word("<t"), word("b<")],
        LazyTwin(("<t", "b<"), "(<t|b<)a*/"),
    ),
    "a pattern": (
        WORDS,
        'root ::= "<" [at] ">" | "<" [at] "/"',
        [{"type": "pattern", "value": "<[ta]"}],
        LazyTwin(("<t", "<a"), "<[at][>/]"),
    ),
    "a special token": (
        SPECIAL_WORDS,
        'root ::= "<|T|>" [ab]',
        [word("<|T|>")],
        LazyTwin(("<|T|>",), "(<\\|T\\|>|\ue000)[ab]"),
    ),
    "a token": (
        SPECIAL_WORDS,
        "root ::= <|T|> [ab]+ <|E|>?",
        [{"type": "token", "value": "<|T|>"}],
        LazyTwin(("\ue000",), "\ue000[ab]+\ue001?"),
    ),
    "a token in a word": (
        SPECIAL_WORDS,
        'root ::= "a<|T|>" "b"*',
        [word("a<|T|>")],
        LazyTwin(("a<|T|>",), "a(<\\|T\\|>|\ue000)b*"),
    ),
}


def lazy(grammar: str, triggers: list[dict[str, Any]]) -> StructuredOutputs:
    return StructuredOutputs(grammar=grammar, grammar_lazy=True, grammar_triggers=triggers)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAZY)
def test_masks_equal_the_reference(name: str) -> None:
    words, grammar, triggers, twin = LAZY[name]
    tokenizer = tokenizer_of(words)
    compiled = compiler_of(words).compile(lazy(grammar, triggers))
    assert sum(walk_all(compiled.matcher(), tokenizer, twin, [], tiers.count(1, 3))) > 1
    rng = random.Random(name)
    for _ in range(tiers.count(4, 200)):
        walk_random(compiled, tokenizer, twin, rng, 10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (word("a.b"), ["a.b"]),
        ({"type": 1, "value": "a"}, ["a"]),
        ({"type": "pattern", "value": "<(t|func)>"}, ["<t>", "<func>"]),
        ({"type": "pattern", "value": r"\{\"name\"|ab?c"}, ['{"name"', "ac", "abc"]),
        ({"type": "pattern", "value": r"[\s\S]*?(<a>|<b>)[\s\S]*"}, ["<a>", "<b>"]),
        ({"type": 3, "value": r"^[\s\S]*?(?:x{2,3}|[yz]\n)[\s\S]*$"}, ["xx", "y\n", "z\n"]),
        ({"type": "pattern", "value": "a|ab"}, ["a"]),
        ({"type": "pattern", "value": "[a-c]x"}, ["ax", "bx", "cx"]),
    ],
)
def test_a_pattern_is_a_list_of_words(given: dict[str, Any], words: list[str]) -> None:
    assert GrammarTrigger.read(given, "here").words("here") == words


@pytest.mark.parametrize(
    "pattern",
    [
        *["a*", "a+", ".", "[^a]", r"\S", "[a-z]{2}", "(a", "a)", "^a", "a$", "(?=a)", "(?i)a", "", "a?", "a{2,1}"],
        *["(a|b){99}", "[ab]{9}", "(" * 99 + "a" + ")" * 99, "a{1,}", "\\", "[", r"\1", r"\b"],
    ],
)
def test_other_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(ParameterError) as caught:
        GrammarTrigger.read({"type": "pattern", "value": pattern}, "grammar_triggers[0]").words("grammar_triggers[0]")
    assert caught.value.field == "grammar_triggers"
    assert str(caught.value).startswith("grammar_triggers[0]: ")


@pytest.mark.parametrize(
    ("grammar", "triggers", "field", "message"),
    [
        ('root ::= "a"', [word("b")], "grammar_triggers", "[0]: no text of the grammar begins with 'b'"),
        ('root ::= "a"', [word("a"), word("b")], "grammar_triggers", "[1]: no text of the grammar begins with 'b'"),
        ('start: "a"', [word("a")], "grammar", "grammar: with grammar_lazy, it must be in GBNF"),
        ('root ::= "ab"', [word("ab"), word("b")], "grammar_triggers", "'ab' is never reached, because free text"),
        ('root ::= "a"', [{"type": "token", "value": "<none>"}], "grammar_triggers", "'<none>' is not a token of"),
        ('root ::= "a"', [{"type": "token", "token": 10**9}], "grammar_triggers", "1000000000 is not a token of this"),
        ("root ::= ", [word("a")], "grammar_triggers", "no text of the grammar begins with 'a'"),
        ("root ::= x", [word("a")], "grammar", "there is no rule 'x'"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(grammar: str, triggers: list[dict[str, Any]], field: str, message: str) -> None:
    tokenizer = tokenizer_of([*"ab"])
    with pytest.raises(ParameterError) as caught:
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(lazy(grammar, triggers))
    assert message in str(caught.value)
    assert caught.value.field == field


def test_a_model_follows_a_lazy_grammar() -> None:
    llm = nc.LLM()
    constraint = lazy('root ::= " a" (" big" | " red")+ " dog."', [word(" a")])
    params = nc.SamplingParams(structured_outputs=constraint, max_tokens=60, n=6, seed=3)
    texts = [output.text for output in llm.generate("Once upon a time there was", params)[0].outputs]
    found = [text for text in texts if " a" in text]
    assert found
    for text in found:
        assert regex.fullmatch(r" a( big| red)+ dog\.", text[text.index(" a") :], partial=True)
