"""Structural tags: masks against a reference that splits texts at triggers, special tokens, limits and errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from tag_twin import Content, Section, Twin, texts_of
from tokenizers import AddedToken, decoders, models

from nucleate.structured_output import GrammarCompiler, GrammarMatcher, StructuredOutputs
from nucleate.tokenization.tokenizer import Tokenizer

Document = dict[str, Any]


def tokenizer_of(words: list[str], special: tuple[str, ...] = ("</s>", "<|T|>", "<|E|>")) -> Tokenizer:
    """A tokenizer whose tokens are these texts."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id("</s>")])


def compiler_of(words: list[str]) -> GrammarCompiler:
    tokenizer = tokenizer_of(words)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, threads=1)


def allowed(matcher: GrammarMatcher, size: int) -> set[int]:
    mask_W = np.empty(-(-size // 32), np.int32)
    matcher.fill_bitmask(mask_W)
    return {*np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()}


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
WORDS = ["a", "b", "<", "<t", ">", "t", "<t>a", "b<t", "/>", "/", "a/><", "<ta"]
SPECIAL_WORDS = ["a", "b", "<", "|", "T", "E", ">", "<|", "T|>a", "|>", "/"]
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


def check_node(matcher: GrammarMatcher, tokenizer: Tokenizer, twin: Twin, tokens: list[str]) -> list[int]:
    """Compare one mask with the reference; return the tokens that the reference allows."""
    names = tokenizer.pieces.tokens
    [eos] = tokenizer.eos_token_ids
    text = texts_of(tokens)
    expected = {i for i, name in names.items() if i != eos and twin.check(text + texts_of([name]))[0]}
    complete = twin.check(text)[1]
    forced = {*matcher.jump_forward_tokens()[:1]}
    actual = allowed(matcher, tokenizer.vocab_size)
    assert matcher.accepting == complete, tokens
    assert actual - {eos} == (forced or expected), (tokens, [names[i] for i in actual ^ expected])
    assert forced <= expected
    assert (eos in actual) == complete
    return sorted(expected)


def walk_all(matcher: GrammarMatcher, tokenizer: Tokenizer, twin: Twin, tokens: list[str], depth: int) -> Iterator[int]:
    found = check_node(matcher, tokenizer, twin, tokens)
    yield 1
    for token in found if depth else ():
        copied = matcher.copy()
        copied.accept_token(token)
        yield from walk_all(copied, tokenizer, twin, [*tokens, tokenizer.pieces.tokens[token]], depth - 1)


@pytest.mark.parametrize("name", TWINS)
def test_masks_equal_the_reference_after_all_short_texts(name: str) -> None:
    words, twin = TWINS[name]
    grammars = compiler_of(words)
    tokenizer = tokenizer_of(words)
    matcher = grammars.compile(StructuredOutputs(structural_tag=document_of(twin))).matcher()
    assert sum(walk_all(matcher, tokenizer, twin, [], 2)) > 3


@pytest.mark.parametrize("name", TWINS)
def test_masks_equal_the_reference_along_random_texts(name: str) -> None:
    words, twin = TWINS[name]
    tokenizer = tokenizer_of(words)
    grammar = compiler_of(words).compile(StructuredOutputs(structural_tag=document_of(twin)))
    rng = random.Random(name)
    for _ in range(30):
        matcher, tokens = grammar.matcher(), list[str]()
        for _ in range(14):
            found = check_node(matcher, tokenizer, twin, tokens)
            if not found:
                break
            # prefer tokens that continue a trigger or a section
            inside = [
                token for token in found if not twin.check(texts_of([*tokens, tokenizer.pieces.tokens[token]]))[1]
            ]
            token = rng.choice(inside if inside and rng.random() < 0.7 else found)
            matcher.accept_token(token)
            tokens.append(tokenizer.pieces.tokens[token])
