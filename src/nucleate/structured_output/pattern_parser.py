"""Parses the regular expressions of property names, as far as they are regular and common.

A pattern is searched in a name: the result matches whole names.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Final, NamedTuple, final

from nucleate.structured_output.grammar_expressions import (
    ALL_CHARACTERS,
    EMPTY,
    Characters,
    Expression,
    Ranges,
    character_set,
    choice,
    repetition,
    sequence,
)

ANY_TEXT: Final = repetition(Characters(ALL_CHARACTERS), 0, None)
MAX_DEPTH: Final = 32
"""Maximum nesting of groups."""

_ESCAPE = re.compile(
    r"\\(?:(?P<short>[xu])(?P<digits>[0-9a-fA-F]+)|[xu]\{(?P<long>[0-9a-fA-F]{1,6})\}|(?P<one>.))", re.DOTALL
)
_COUNT = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")
_LOOPS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CONTROLS: Final = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_SPACES: Final = (
    *((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_CLASSES: Final[dict[str, Ranges]] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": _SPACES,
}


class UnknownSyntaxError(Exception):
    """A pattern has a part that this parser does not know."""


class _Branch(NamedTuple):
    """One alternative. from_start, to_end: whether it matches only at the start and only at the end of the text."""

    from_start: bool
    expression: Expression
    to_end: bool


def parse_pattern(pattern: str) -> Expression:
    """Return an expression of all texts in which a pattern is found. Raises UnknownSyntaxError."""
    parser = _Parser(pattern)
    branches = parser.alternatives()
    if not parser.at_end:
        raise UnknownSyntaxError
    return choice(
        sequence([*([] if from_start else [ANY_TEXT]), expression, *([] if to_end else [ANY_TEXT])])
        for from_start, expression, to_end in branches
    )


@final
class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text, self._position, self._depth = pattern, 0, 0

    @property
    def at_end(self) -> bool:
        return self._position == len(self._text)

    def alternatives(self) -> list[_Branch]:
        branches = self._sequence()
        while self._take("|"):
            branches += self._sequence()
        return branches

    def _sequence(self) -> list[_Branch]:
        from_start = to_end = False
        parts: list[list[_Branch]] = []
        while not self.at_end and self._text[self._position] not in "|)":
            if self._take("^"):
                if parts or to_end:
                    raise UnknownSyntaxError
                from_start = True
            elif self._take("$"):
                to_end = True
            elif to_end:
                raise UnknownSyntaxError
            else:
                parts.append(self._repeated(self._part()))
        if len(parts) == 1:
            return [_Branch(from_start or each[0], each[1], to_end or each[2]) for each in parts[0]]
        return [_Branch(from_start, sequence(map(_unanchored, parts)), to_end)]

    def _part(self) -> list[_Branch]:
        if self._take("("):
            return self._group()
        if self._take("["):
            return [_Branch(False, self._character_class(), False)]
        if self._take("."):
            return [_Branch(False, character_set([(0x0A, 0x0A)], negated=True), False)]
        return [_Branch(False, character_set(*self._character("*+?{}]")), False)]

    def _group(self) -> list[_Branch]:
        if self._take("?") and not self._take(":"):
            raise UnknownSyntaxError
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnknownSyntaxError
        inner = self.alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise UnknownSyntaxError
        return inner

    def _repeated(self, part: list[_Branch]) -> list[_Branch]:
        found = _COUNT.match(self._text, self._position)
        operator = self._text[self._position : self._position + 1]
        if found is not None:
            self._position = found.end()
            low = int(found[1])
            high = int(found[3]) if found[3] else None if found[2] else low
            if high is not None and (high < low or (not found[2] and found[3])):
                raise UnknownSyntaxError
        elif operator and operator in _LOOPS:
            self._position += 1
            low, high = _LOOPS[operator]
        else:
            return part
        self._take("?")  # a lazy repetition matches the same texts
        return [_Branch(False, repetition(_unanchored(part), low, high), False)]

    def _character_class(self) -> Expression:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while ranges == [] or not self._take("]"):
            if self._text.startswith(("&&", "--", "~~"), self._position):
                raise UnknownSyntaxError
            first, first_negated = self._character("[]")
            after = self._text[self._position + 1 : self._position + 2]
            if self._text.startswith("-", self._position) and after not in ("]", ""):
                self._position += 1
                last, last_negated = self._character("[]-")
                if first_negated or last_negated or not _single(first) or not _single(last):
                    raise UnknownSyntaxError
                first = ((first[0][0], last[0][0]),)
                if first[0][0] > first[0][1]:
                    raise UnknownSyntaxError
            if first_negated:
                inverse = character_set(first, negated=True)
                first = inverse.ranges if isinstance(inverse, Characters) else ()
            ranges += first
        return character_set(ranges, negated)

    def _character(self, excluded: str) -> tuple[Ranges, bool]:
        """Parse a character or a named class: its ranges, and whether they are negated."""
        if self.at_end or self._text[self._position] in excluded:
            raise UnknownSyntaxError
        if not self._take("\\"):
            self._position += 1
            return _one(ord(self._text[self._position - 1])), False
        found = _ESCAPE.match(self._text, self._position - 1)
        if found is None:
            raise UnknownSyntaxError
        self._position = found.end()
        if found["long"]:
            return _one(int(found["long"], 16)), False
        if found["short"]:
            length = 2 if found["short"] == "x" else 4
            if len(found["digits"]) < length:
                raise UnknownSyntaxError
            self._position = found.start() + 2 + length
            return _one(int(found["digits"][:length], 16)), False
        name = found["one"]
        if name.lower() in _CLASSES:
            return _CLASSES[name.lower()], name.isupper()
        if name in _CONTROLS:
            return _one(_CONTROLS[name]), False
        if name.isalnum() or not name.isascii() or name in "<>":
            raise UnknownSyntaxError
        return _one(ord(name)), False

    def _take(self, character: str) -> bool:
        found = self._text.startswith(character, self._position)
        self._position += found
        return found


def _one(code: int) -> Ranges:
    if code <= 1 or code > 0x10FFFF or 0xD800 <= code < 0xE000:  # expressions have no NUL: it must be like U+0001
        raise UnknownSyntaxError
    return ((code, code),)


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _unanchored(branches: list[_Branch]) -> Expression:
    if any(chain.from_iterable((each.from_start, each.to_end) for each in branches)):
        raise UnknownSyntaxError
    return choice(each.expression for each in branches) if branches else EMPTY
