"""Expressions of a context-free grammar over characters, with their regular expressions.

All character sets exclude NUL and surrogates, which no text contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points: sorted, disjoint and not adjacent."""

ALL_CHARACTERS: Final[Ranges] = ((0x1, 0xD7FF), (0xE000, 0x10FFFF))
MAX_REGEX_CHARACTERS: Final = 50_000
"""Maximum length of the regular expression of a terminal."""
MAX_DEPTH: Final = 64
"""Maximum nesting of an expression, with the rules that it includes."""


class Expression:
    """A part of a grammar. ``regular``: it has a regular expression of limited size, so no references and tokens."""

    parts: tuple[Expression, ...]

    @cached_property
    def regular(self) -> bool:
        own = self.regex_length <= MAX_REGEX_CHARACTERS and self.depth <= MAX_DEPTH
        return (
            own
            and not isinstance(self, Reference | TokenReference | Terminal)
            and all(part.regular for part in self.parts)
        )

    @cached_property
    def depth(self) -> int:
        return 1 + max((part.depth for part in self.parts), default=0)

    @cached_property
    def regex_length(self) -> int:
        """An upper bound of the length of the regular expression."""
        return sum(4 + part.regex_length for part in self.parts)

    @cached_property
    def references(self) -> frozenset[str]:
        """The names of the rules that the expression uses directly."""
        return frozenset().union(*(part.references for part in self.parts))

    @cached_property
    def regex(self) -> str:
        """The regular expression of a regular expression tree, in the syntax of Rust's regex crate."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Characters(Expression):
    """One character out of a set."""

    ranges: Ranges
    parts = ()

    @cached_property
    def regex_length(self) -> int:
        return len(self.regex)

    @cached_property
    def regex(self) -> str:
        texts = [_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in self.ranges]
        return texts[0] if texts == [_escaped(self.ranges[0][0])] else f"[{''.join(texts)}]"


@dataclass(frozen=True, eq=False)
class Sequence(Expression):
    """Its parts, one after the other. Without parts, the empty text."""

    parts: tuple[Expression, ...]

    @cached_property
    def regex(self) -> str:
        return "".join(f"(?:{part.regex})" if isinstance(part, Choice) else part.regex for part in self.parts)


@dataclass(frozen=True, eq=False)
class Choice(Expression):
    """One of its parts. Without parts, no text at all."""

    parts: tuple[Expression, ...]

    @cached_property
    def regex(self) -> str:
        return "|".join(part.regex for part in self.parts)


@dataclass(frozen=True, eq=False)
class Repetition(Expression):
    """``low`` to ``high`` texts of its only part; None: any number of them."""

    parts: tuple[Expression]
    low: int
    high: int | None

    @cached_property
    def regex_length(self) -> int:
        return 4 + len(self.operator) + self.parts[0].regex_length

    @property
    def operator(self) -> str:
        known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        high = "" if self.high is None else self.high
        return known.get((self.low, self.high)) or f"{{{self.low},{high}}}"

    @cached_property
    def regex(self) -> str:
        [part] = self.parts
        return f"{part.regex if isinstance(part, Characters) else f'(?:{part.regex})'}{self.operator}"


@dataclass(frozen=True, eq=False)
class Reference(Expression):
    """A rule, by its name."""

    name: str
    parts = ()

    @cached_property
    def references(self) -> frozenset[str]:
        return frozenset([self.name])


@dataclass(frozen=True, eq=False)
class TokenReference(Expression):
    """A special token: ``<[id]>`` or ``<name>``."""

    text: str
    parts = ()


@dataclass(frozen=True, eq=False)
class Terminal(Expression):
    """A use of a terminal: the number of the use, and of the terminal."""

    use: int
    number: int
    parts = ()


Rules = Mapping[str, Expression]
EMPTY: Final = Sequence(())
NOTHING: Final = Choice(())


def sequence(parts: Iterable[Expression]) -> Expression:
    """Return the shortest expression of a sequence. Characters and groups stay as they are."""
    kept = tuple(part for part in parts if part is not EMPTY)
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Sequence(kept) if kept else EMPTY


def choice(parts: Iterable[Expression]) -> Expression:
    """Return the shortest expression of a choice."""
    kept = tuple(part for part in dict.fromkeys(parts) if part is not NOTHING)
    return kept[0] if len(kept) == 1 else Choice(kept) if kept else NOTHING


def repetition(part: Expression, low: int, high: int | None) -> Expression:
    """Return the shortest expression of a repetition."""
    if high == 0 or part is EMPTY:
        return EMPTY
    if part is NOTHING:
        return NOTHING if low else EMPTY
    return part if (low, high) == (1, 1) else Repetition((part,), low, high)


def rebuilt(expression: Expression, parts: Iterable[Expression]) -> Expression:
    """Return an expression with other parts, simplified."""
    match expression:
        case Sequence():
            return sequence(parts)
        case Choice():
            return choice(parts)
        case Repetition():
            return repetition(next(iter(parts)), expression.low, expression.high)
    return expression


def character_set(ranges: Iterable[tuple[int, int]], negated: bool = False) -> Expression:
    """Return one character of a set, given as inclusive ranges in any order."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if negated:
        ends = [-1, *(end for pair in merged for end in pair), 0x110000]
        merged = [[before + 1, after - 1] for before, after in zip(ends[::2], ends[1::2], strict=True)]
    kept = tuple(_intersection(merged))
    return Characters(kept) if kept else NOTHING


def _intersection(ranges: Iterable[Iterable[int]]) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        for first, last in ALL_CHARACTERS:
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)


def _escaped(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
