"""Expressions of structural tags: terminals as regular languages in Lark, joined where they are adjacent.

A terminal that contains all of a regular part is exact: the lexer cannot divide it in the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Final

from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    Expression,
    Repetition,
    Sequence,
    choice,
    repetition,
    sequence,
)

_NUMBERS = count()
_RAW = re.compile(r"\\.|/|[\n\r]", re.DOTALL)
_ESCAPED: Final = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
ANY_CHARACTERS: Final = frozenset(map(chr, range(128))) | {"é"}
"""All ASCII characters, and one that stands for all others."""


@dataclass(frozen=True, eq=False)
class Pattern(Expression):
    """A terminal. ``body``: its definition in Lark, with the names of the terminals that it ``uses``.

    ``prefix``: a text with which all its texts begin. ``literal``: ``prefix`` is its only text. ``stops``: the texts at
    which free text ends; ``until``: that with which it does. ``at``: its place in the document.
    ``ends_itself``: no text of it begins with another one.
    """

    body: str
    uses: tuple[Pattern, ...] = ()
    prefix: str = ""
    literal: bool = False
    stops: frozenset[str] | None = None
    until: str | None = None
    at: str = ""
    ends_itself: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))
    parts = ()

    @property
    def name(self) -> str:
        return self.body if self.literal else f"T_{self.number}"

    def definitions(self, known: dict[str, str]) -> None:
        """Add the definitions of the terminal, and of those that it uses."""
        if not self.literal and self.name not in known:
            known[self.name] = self.body
            for pattern in self.uses:
                pattern.definitions(known)

    @property
    def first(self) -> frozenset[str]:
        """The characters with which it may begin, as in ``ANY_CHARACTERS``."""
        return frozenset(ascii_or_other(self.prefix[0])) if self.prefix else ANY_CHARACTERS


@dataclass(frozen=True, eq=False)
class Embedded(Expression):
    """A JSON schema (``%json``) or a grammar (``@name``) as ``text`` of a rule.

    ``first``: the characters with which it may begin. ``continues``: those that may follow a complete text within it.
    """

    text: str
    first: frozenset[str]
    continues: frozenset[str]
    at: str
    is_json: bool = False
    parts = ()


def ascii_or_other(characters: Iterable[str]) -> Iterator[str]:
    for character in characters:
        yield character if character.isascii() else "é"


def fixed(text: str, at: str = "") -> Pattern:
    """Return the terminal of one text that is not empty."""
    # ASCII, because Lark strings cannot contain control characters.
    return Pattern(json.dumps(text), prefix=text, literal=True, at=at, ends_itself=True)


def literal(text: str, at: str) -> Expression:
    return fixed(text, at) if text else EMPTY


def regex(pattern: str, at: str) -> Pattern:
    """Return the terminal of a regular expression in Rust's syntax."""
    escaped = _RAW.sub(lambda found: _ESCAPED.get(found[0], found[0]), pattern)
    return Pattern(f"/(?:{escaped})/", at=at)


ANY: Final = Pattern("/(?s:.*)/")
SOME: Final = Pattern("/(?s:.+)/")


def concatenation(patterns: Iterable[Pattern]) -> Pattern:
    parts = tuple(patterns)
    if len(parts) == 1:
        return parts[0]
    prefix = ""
    for part in parts:
        prefix += part.prefix
        if not part.literal:
            break
    else:
        return fixed(prefix, parts[0].at)
    ends = all(part.ends_itself for part in parts)
    return Pattern(" ".join(part.name for part in parts), parts, prefix, at=parts[0].at, ends_itself=ends)


def union(patterns: Iterable[Pattern]) -> Pattern:
    parts = tuple({pattern.name: pattern for pattern in patterns}.values())
    if len(parts) == 1:
        return parts[0]
    same = takewhile(lambda letters: len({*letters}) == 1, zip(*(part.prefix for part in parts), strict=False))
    prefix = "".join(letters[0] for letters in same)
    return Pattern(" | ".join(part.name for part in parts), parts, prefix, at=parts[0].at)


def without(pattern: Pattern, excluded: Pattern) -> Pattern:
    return Pattern(f"{pattern.name} & ~{excluded.name}", (pattern, excluded), pattern.prefix, at=pattern.at)


def intersection(pattern: Pattern, other: Pattern) -> Pattern:
    return Pattern(f"{pattern.name} & {other.name}", (pattern, other), pattern.prefix, at=pattern.at)


def first_match(pattern: Pattern) -> Pattern:
    """Return the texts of a terminal that have no shorter text of it at their beginning."""
    return replace(without(pattern, concatenation([pattern, SOME])), ends_itself=True)


def free_text(stops: frozenset[str], at: str) -> Pattern:
    """Return the texts that contain none of ``stops``."""
    if not stops:
        return Pattern(ANY.body, stops=stops, at=at)
    found = without(ANY, concatenation([ANY, _union_of(stops), ANY]))
    return Pattern(found.body, found.uses, stops=stops, at=at)


def text_until(stop: str, stops: frozenset[str], at: str) -> Pattern:
    """Return the texts that contain one of ``stops`` at their end only, namely ``stop``."""
    ending = concatenation([ANY, _union_of([stop])])
    found = without(ending, concatenation([ANY, _union_of(stops), SOME]))
    return Pattern(found.body, found.uses, stops=stops, until=stop, at=at, ends_itself=True)


def _union_of(texts: Iterable[str]) -> Pattern:
    return union(map(fixed, sorted(texts)))


def join(parts: Iterable[Expression]) -> Expression:
    """Return a sequence in which adjacent terminals are one.

    Free text stays apart: joined with another text, it could contain one of its stops.
    """
    flat: list[Expression] = []
    for part in parts:
        for inner in part.parts if isinstance(part, Sequence) else (part,):
            before = flat[-1] if flat else None
            if isinstance(before, Pattern) and isinstance(inner, Pattern) and before.stops is inner.stops is None:
                flat[-1] = concatenation([before, inner])
            else:
                flat.append(inner)
    return sequence(flat)


def either(parts: Iterable[Expression]) -> Expression:
    """Return a choice in which all terminals but free text are one."""
    patterns: list[Pattern] = []
    others: list[Expression] = []
    for part in parts:
        if isinstance(part, Pattern) and part.stops is None:
            patterns.append(part)
        else:
            others.append(part)
    return choice([*([union(patterns)] if patterns else []), *others])


def repeat(part: Expression, low: int, high: int | None) -> Expression:
    """Return a repetition. Repeated free text is free text."""
    if isinstance(part, Pattern) and part.stops is not None and part.until is None:
        return part
    repeated = repetition(part, low, high)
    if not isinstance(part, Pattern) or part.stops is not None or not isinstance(repeated, Repetition):
        return repeated
    return Pattern(f"{part.name}{repeated.operator}", (part,), part.prefix if low else "", at=part.at)
