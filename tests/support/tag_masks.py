"""Masks of small vocabularies, compared with a reference after all short texts, or along random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

import tokenizers
from bundled_grammars import allowed
from tag_twin import texts_of
from tokenizers import AddedToken, decoders, models

from nucleate.structured_output import CompiledGrammar, GrammarCompiler, GrammarMatcher
from nucleate.tokenization.tokenizer import Tokenizer

WORDS = ["a", "b", "<", "<t", ">", "t", "<t>a", "b<t", "/>", "/", "a/><", "<ta", "/><t>ba/>b"]
SPECIAL_WORDS = ["a", "b", "<", "|", "T", "E", ">", "<|", "T|>a", "|>", "/"]


class Reference(Protocol):
    def check(self, text: str) -> tuple[bool, bool]:
        """Return whether a text is the beginning of a valid text, and whether it is one."""


def tokenizer_of(words: list[str], special: tuple[str, ...] = ("</s>", "<|T|>", "<|E|>")) -> Tokenizer:
    """A tokenizer whose tokens are these texts."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id("</s>")])


def compiler_of(words: list[str]) -> GrammarCompiler:
    tokenizer = tokenizer_of(words)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, threads=1)


def check_node(matcher: GrammarMatcher, tokenizer: Tokenizer, twin: Reference, tokens: list[str]) -> list[int]:
    """Compare one mask with the reference; return the tokens that the reference allows."""
    names = tokenizer.pieces.tokens
    [eos] = tokenizer.eos_token_ids
    text = texts_of(tokens)
    expected = {i for i, name in names.items() if i != eos and twin.check(text + texts_of([name]))[0]}
    complete = twin.check(text)[1]
    forced = {*matcher.jump_forward_tokens()[:1]}
    actual = {*allowed(matcher)}
    assert matcher.accepting == complete, tokens
    assert actual - {eos} == (forced or expected), (tokens, [names[i] for i in actual ^ expected])
    assert forced <= expected
    assert (eos in actual) == complete
    assert matcher.terminated == (complete and not expected)
    return sorted(expected)


def walk_all(
    matcher: GrammarMatcher, tokenizer: Tokenizer, twin: Reference, tokens: list[str], depth: int
) -> Iterator[int]:
    found = check_node(matcher, tokenizer, twin, tokens)
    yield 1
    for token in found if depth else ():
        copied = matcher.copy()
        copied.accept_token(token)
        yield from walk_all(copied, tokenizer, twin, [*tokens, tokenizer.pieces.tokens[token]], depth - 1)


def walk_random(
    grammar: CompiledGrammar, tokenizer: Tokenizer, twin: Reference, rng: random.Random, steps: int
) -> None:
    """Check the masks along a random text, which prefers tokens that continue a trigger or a section."""
    matcher, tokens = grammar.matcher(), list[str]()
    for _ in range(steps):
        found = check_node(matcher, tokenizer, twin, tokens)
        if not found:
            break
        inside = [each for each in found if not twin.check(texts_of([*tokens, tokenizer.pieces.tokens[each]]))[1]]
        token = rng.choice(inside if inside and rng.random() < 0.7 else found)
        matcher.accept_token(token)
        tokens.append(tokenizer.pieces.tokens[token])
