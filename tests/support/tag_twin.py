"""A slow reference for structural tags: it splits a text at the triggers, and looks for the first end of each section.

Masks of small vocabularies are compared with it, after all short texts or along random ones.

A special token is one character of ``SPECIAL``, so that texts with special tokens are plain strings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import regex
import tokenizers
from bundled_grammars import allowed
from tokenizers import AddedToken, decoders, models

from nucleate.structured_output import CompiledGrammar, GrammarCompiler, GrammarMatcher
from nucleate.tokenization.tokenizer import Tokenizer

SPECIAL = {"<|T|>": "\ue000", "<|E|>": "\ue001"}


@dataclass(frozen=True)
class Content:
    """The texts of a section: a finite set, or those of a regular expression."""

    texts: tuple[str, ...] = ()
    pattern: str | None = None

    def complete(self, text: str) -> bool:
        return text in self.texts or (self.pattern is not None and regex.fullmatch(self.pattern, text) is not None)

    def viable(self, text: str) -> bool:
        if any(character in text for character in SPECIAL.values()):
            return False
        found = self.pattern is not None and regex.fullmatch(self.pattern, text, partial=True) is not None
        return found or any(whole.startswith(text) for whole in self.texts)


@dataclass(frozen=True)
class Section:
    begin: str
    content: Content
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Twin:
    """Free text with sections that begin with triggers. ``check`` says what a text is."""

    triggers: tuple[str, ...]
    sections: tuple[Section, ...]
    at_least_one: bool = False
    stop_after_first: bool = False

    def check(self, text: str) -> tuple[bool, bool]:
        """Return whether a text is the beginning of a valid text, and whether it is one."""
        if self.at_least_one:
            return self._sections(text, 0, self.sections)
        return self._free_text(text, 0)

    def _free_text(self, text: str, start: int) -> tuple[bool, bool]:
        triggers = [(spelled, trigger) for trigger in self.triggers for spelled in spellings(trigger)]
        found = [
            (position + len(spelled), position, trigger)
            for spelled, trigger in triggers
            if (position := text.find(spelled, start)) >= 0
        ]
        if not found:
            rest = text[start:]
            begun = max((_overlap(rest, spelled) for spelled, _ in triggers), default=0)
            free = rest[: len(rest) - begun] if _special(rest) else rest
            return not _special(free), not _special(rest)
        _, position, trigger = min(found)
        if _special(text[start:position]):
            return False, False
        return self._sections(text, position, [each for each in self.sections if each.begin.startswith(trigger)])

    def _sections(self, text: str, start: int, sections: Iterable[Section]) -> tuple[bool, bool]:
        viable = complete = False
        for section in sections:
            for begin in spellings(section.begin):
                if not text.startswith(begin, start):
                    viable |= begin.startswith(text[start:])
                    continue
                more, end = self._content(text, start + len(begin), section)
                viable |= more
                if end is not None:
                    found = self._after(text, end)
                    viable, complete = viable | found[0], complete | found[1]
        return viable, complete

    def _after(self, text: str, end: int) -> tuple[bool, bool]:
        if self.stop_after_first:
            return end == len(text), end == len(text)
        return self._free_text(text, end)

    @staticmethod
    def _content(text: str, start: int, section: Section) -> tuple[bool, int | None]:
        """Return whether the content may go on at the end of the text, or where the first end of it ends."""
        ends = [spelled for end in section.ends for spelled in spellings(end)]
        found = [
            position + len(end)
            for position in range(start, len(text) + 1)
            if section.content.complete(text[start:position])
            for end in ends
            if text.startswith(end, position)
        ]
        if found:
            return False, min(found)
        begun = any(
            section.content.complete(text[start:position]) and any(end.startswith(text[position:]) for end in ends)
            for position in range(start, len(text) + 1)
        )
        return begun or section.content.viable(text[start:]), None


def spellings(text: str) -> list[str]:
    """Return a text with each name of a special token as the token, or spelled."""
    parts = regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text)
    return ["".join(each) for each in product(*({part, SPECIAL.get(part, part)} for part in parts))]


def _special(text: str) -> bool:
    return any(character in text for character in SPECIAL.values())


def _overlap(text: str, begun: str) -> int:
    """Return the length of the longest end of a text that is a proper beginning of another."""
    return max((size for size in range(len(begun)) if size and text.endswith(begun[:size])), default=0)


def texts_of(tokens: Sequence[str]) -> str:
    return "".join(SPECIAL.get(token, token) for token in tokens)


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
