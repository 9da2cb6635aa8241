r"""Parses the regular expressions of JSON schemas, and estimates the length of the texts of any regular expression.

Syntax is parsed as far as it is common to all dialects. Dialects differ: ``\d`` may match other digits than ASCII's,
and ``$`` before a final line break. So a pattern has two sets of texts: those in which it is found in every dialect,
and in any. The estimates read only groups and repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    LAST_CHARACTER,
    Characters,
    Expression,
    choice,
    inverted,
    repetition,
    sequence,
)
from nucleate.structured_output.pattern_syntax import CLASSES

MAX_PATTERN_CHARACTERS: Final = 500
"""Maximum length of a pattern."""
_MAX_DEPTH: Final = 16

_ESCAPE = r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|[^a-zA-Z0-9\s])"
_TOKEN = re.compile(
    rf"(?P<open>\((?:\?(?:P?<[A-Za-z_]\w*>|:)|(?!\?)))|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])"
    rf"|(?P<count>(?:[*+?]|\{{(?P<low>[0-9]{{1,4}})(?P<comma>,?)(?P<high>[0-9]{{0,4}})\}})\??)"
    rf"|\[(?P<negated>\^?)(?P<set>(?:{_ESCAPE}|[^\\\[\]])+)\]|(?P<escape>{_ESCAPE})|(?P<one>[^\\\[\](){{}}*+?|])",
    re.DOTALL,
)
_SET_ITEM = re.compile(rf"(?P<first>{_ESCAPE}|.)(?:-(?P<last>{_ESCAPE}|[^-]))?", re.DOTALL)
_SET_OPERATOR = re.compile(r"&&|--|~~|\|\|")
_LETTERS: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_BEYOND_ASCII: Final = (0x80, LAST_CHARACTER)

Ranges = list[tuple[int, int]]


class UnknownPatternError(Exception):
    """A pattern has syntax that is not common to all dialects, or is too large."""


class _Group(NamedTuple):
    """Alternatives, each a sequence."""

    branches: list[list[_Node]]


class _Repeated(NamedTuple):
    part: _Node
    low: int
    high: int | None


_Node = Expression | _Group | _Repeated | str
"""A part of a pattern; a text is an anchor."""


def characters(ranges: Iterable[tuple[int, int]]) -> Characters:
    """Return one character of a set, given as inclusive ranges in any order."""
    return Characters(tuple(inverted(inverted(ranges))))


def _ranges(text: str) -> Ranges:
    """Return the characters of a class that ``pattern_syntax`` writes out."""
    items = [(item["first"], item["last"] or item["first"]) for item in _SET_ITEM.finditer(text)]
    return [(_code(first), _code(last)) for first, last in items]


def _code(text: str) -> int:
    """Return the character of an escape that is no class, or of one character."""
    if text[0] != "\\":
        return ord(text)
    return int(f"0x{text[2:]}", 0) if text[1] in "xu" else _LETTERS.get(text[1], ord(text[1]))


def _class_pair(name: str, ever: Ranges) -> dict[str, tuple[Ranges, Ranges]]:
    always = _ranges(CLASSES[name][0])
    return {name: (always, ever), name.upper(): (inverted(ever), inverted(always))}


_CLASSES: Final = {
    **_class_pair("d", [*_ranges(CLASSES["d"][0]), _BEYOND_ASCII]),
    **_class_pair("w", [*_ranges(CLASSES["w"][0]), _BEYOND_ASCII]),
    **_class_pair("s", _ranges(CLASSES["s"][1])),
}
"""The characters that a class matches in every dialect, and in any."""
_ANY = repetition(characters([(0, LAST_CHARACTER)]), 0, None)
_NOT_NEWLINE = characters(inverted([(10, 10)]))
_MAYBE_NEWLINE = repetition(characters([(10, 10)]), 0, 1)


@lru_cache(256)
def texts(pattern: str, *, certain: bool = False) -> Expression:
    """Return the texts in which a pattern is found in any dialect. Raises UnknownPatternError.

    certain: in every dialect.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UnknownPatternError
    return _choice(_parsed(pattern, certain), first=True, last=True, final=EMPTY if certain else _MAYBE_NEWLINE)


def whole_texts(pattern: str) -> Expression:
    """Return what a pattern without anchors matches as a whole in every dialect. Raises UnknownPatternError."""
    return _choice(_parsed(pattern, certain=True), first=False, last=False, final=EMPTY)


def _parsed(pattern: str, certain: bool) -> _Group:
    stack, position = [_Group([[]])], 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None or len(stack) > _MAX_DEPTH:
            raise UnknownPatternError
        position = token.end()
        branch = stack[-1].branches[-1]
        if token["open"]:
            stack.append(_Group([[]]))
        elif token["close"]:
            if len(stack) == 1:
                raise UnknownPatternError
            group = stack.pop()
            stack[-1].branches[-1].append(group)
        elif token["bar"]:
            stack[-1].branches.append([])
        elif token["count"]:
            branch[-1:] = [_repeated(branch[-1:], token)]
        else:
            branch.append(token["anchor"] or _one_character(token, certain))
    if len(stack) > 1:
        raise UnknownPatternError
    return stack[0]


def _repeated(parts: list[_Node], token: re.Match[str]) -> _Repeated:
    if not parts or isinstance(parts[0], _Repeated | str):
        raise UnknownPatternError
    if token["low"] is None:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token["count"][0]]
    else:
        low = int(token["low"])
        high = int(token["high"]) if token["high"] else None if token["comma"] else low
    if high == 0 or (high is not None and high < low):
        raise UnknownPatternError
    return _Repeated(parts[0], low, high)


def _one_character(token: re.Match[str], certain: bool) -> Expression:
    if token["one"]:
        return _NOT_NEWLINE if token["one"] == "." else characters([(ord(token["one"]), ord(token["one"]))])
    if token["escape"]:
        return characters(_matched(token["escape"], certain))
    if _SET_OPERATOR.search(token["set"]):
        raise UnknownPatternError
    negated, found = bool(token["negated"]), Ranges()
    for item in _SET_ITEM.finditer(token["set"]):
        if item["last"] is None:
            found += _matched(item["first"], certain != negated)
            continue
        if any(each[0] == "\\" and each[1] in _CLASSES for each in item.groups()):
            raise UnknownPatternError
        found.append((_code(item["first"]), _code(item["last"])))
        if found[-1][0] > found[-1][1]:
            raise UnknownPatternError
    return characters(inverted(found) if negated else found)


def _matched(text: str, certain: bool) -> Ranges:
    """Return the characters of an escape or of one character, in any dialect, or in every one."""
    if text[0] == "\\" and text[1] in _CLASSES:
        return _CLASSES[text[1]][0 if certain else 1]
    return [(_code(text), _code(text))]


def _choice(group: _Group, *, first: bool, last: bool, final: Expression) -> Expression:
    return choice(_sequence(branch, first, last, final) for branch in group.branches)


def _sequence(nodes: Sequence[_Node], first: bool, last: bool, final: Expression) -> Expression:
    """Return the texts of a sequence. first, last: whether others may come before and after it in the whole text.

    final: what may come after the anchor ``$``.
    """
    inner = [*nodes]
    if first and inner[:1] == ["^"]:
        first = False
        del inner[0]
    end = [_ANY] if last else []
    if last and inner[-1:] == ["$"]:
        last, end = False, [final]
        del inner[-1]
    if not inner:
        return sequence([*([_ANY] if first else []), *end])
    before = [_ANY] if first and not isinstance(inner[0], _Group) else []
    if last and isinstance(inner[-1], _Group):
        end = []
    rest = len(inner) - 1
    parts = [_texts_of(each, first and not at, last and at == rest, final) for at, each in enumerate(inner)]
    return sequence([*before, *parts, *end])


def _texts_of(node: _Node, first: bool, last: bool, final: Expression) -> Expression:
    if isinstance(node, str):
        raise UnknownPatternError  # an anchor inside of a text
    if isinstance(node, _Repeated):
        return repetition(_texts_of(node.part, False, False, final), node.low, node.high)
    return _choice(node, first=first, last=last, final=final) if isinstance(node, _Group) else node


_ITEM = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w*>|[\w-]*:?))?)|(?P<close>\))|(?P<count>\{\s*(\d+)\s*(,?)\s*(\d*)\s*\})|(?P<loop>[*+?])"
    r"|(?P<class>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<one>\\[pPxu]\{[^}]*\}|\\.|.)",
    re.DOTALL,
)
MAX_SIZE: Final = 10**12
"""Cap on sizes; it exceeds every limit."""


class Size(NamedTuple):
    """Upper bounds of the (minimum, maximum) number of characters of a part; * and + count as one repetition.

    ``lengths``: the number of its lengths but one. ``fixed``: whether each alternative has a part of fixed length.
    ``ambiguous``: how many ways there may be to divide a text among the repetitions of a group, as in
    ``([a-z]{1,9}){1,9}``. A part of fixed length usually separates the repetitions, so groups with one do not count.
    """

    low: int
    high: int
    lengths: int = 0
    fixed: bool = True
    ambiguous: int = 0

    def repeated(self, operator: str) -> Size:
        if operator in "*+?":
            low, high, more = int(operator == "+"), 1, 1
        else:
            given, comma, last = operator[1:-1].partition(",")
            low = int(given or 0)
            high = max(low, int(last or 1)) if comma else low
            more = high - low
        return Size(
            min(self.low * low, MAX_SIZE),
            min(self.high * high, MAX_SIZE),
            min(max(self.lengths * high, more), MAX_SIZE),
            self.fixed and not more,
            self.ambiguous if self.fixed else min(max(self.ambiguous, self.lengths * high), MAX_SIZE),
        )


Item = Size | str
"""A part of an expression: a size, a bracket ``(`` or ``)``, a bar, an operator ``* + ?``, or a count ``{2,5}``."""


def expanded_size(pattern: str) -> Size:
    """Return the size of a regular expression. The result for an invalid one is arbitrary."""
    return total_size(_items(pattern))


def _items(pattern: str) -> Iterator[Item]:
    for match in _ITEM.finditer(pattern):
        kind = match.lastgroup
        if kind in ("class", "one"):
            yield "|" if match[0] == "|" else Size(1, 1)
        elif kind == "count":
            yield f"{{{match[4][:12]}{match[5]}{match[6][:12]}}}"
        else:
            yield "(" if kind == "open" else match[0]


def total_size(parts: Iterable[Item]) -> Size:
    """Return the size of a sequence of parts. Alternatives are summed."""
    levels: list[list[list[Size]]] = [[[]]]
    repeated = False  # a ? after a repetition makes it lazy, not optional
    for part in parts:
        repeats = False
        if isinstance(part, Size):
            levels[-1][-1].append(part)
        elif part == "(":
            levels.append([[]])
        elif part == "|":
            levels[-1].append([])
        elif part == ")":
            inner = _sum(levels.pop())
            levels = levels or [[[]]]
            levels[-1][-1].append(inner)
        else:
            repeats = True
            if levels[-1][-1] and not (repeated and part == "?"):
                levels[-1][-1].append(levels[-1][-1].pop().repeated(part))
        repeated = repeats
    return _sum([branch for level in levels for branch in level])


def _sum(branches: list[list[Size]]) -> Size:
    parts = [part for branch in branches for part in branch]
    return Size(
        min(sum(part.low for part in parts), MAX_SIZE),
        min(sum(part.high for part in parts), MAX_SIZE),
        min(sum(part.lengths for part in parts), MAX_SIZE),
        all(any(part.fixed for part in branch) for branch in branches),
        max((part.ambiguous for part in parts), default=0),
    )
