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

Size = tuple[int, int]
"""Upper bounds of the (minimum, maximum) number of characters that a part matches; * and + count as one repetition."""
Item = Size | str
"""A part of an expression: a size, a bracket ``(`` or ``)``, an operator ``* + ?``, or a count ``{2,5}``."""


def expanded_size(pattern: str) -> Size:
    """Return the size of a regular expression. The result for an invalid one is arbitrary."""
    return total_size(split_pattern(pattern))


def split_pattern(pattern: str) -> Iterator[Item]:
    """Yield the parts of a regular expression for ``total_size``."""
    for match in _ITEM.finditer(pattern):
        kind = match.lastgroup
        if kind in ("class", "one"):
            yield 1, 1
        elif kind == "count":
            yield f"{{{match[4][:12]}{match[5]}{match[6][:12]}}}"
        else:
            yield "(" if kind == "open" else match[0]


def total_size(parts: Iterable[Item]) -> Size:
    """Return the size of a sequence of parts. Alternatives are summed."""
    levels: list[list[Size]] = [[]]
    repeated = False  # a ? after a repetition makes it lazy, not optional
    for part in parts:
        repeats = False
        if not isinstance(part, str):
            levels[-1].append(part)
        elif part == "(":
            levels.append([])
        elif part == ")":
            inner = _sum(levels.pop())
            levels = levels or [[]]
            levels[-1].append(inner)
        else:
            repeats = True
            if levels[-1] and not (repeated and part == "?"):
                levels[-1].append(_times(levels[-1].pop(), part))
        repeated = repeats
    return _sum([size for level in levels for size in level])


def _sum(sizes: list[Size]) -> Size:
    return min(sum(low for low, _ in sizes), MAX_SIZE), min(sum(high for _, high in sizes), MAX_SIZE)


def _times(size: Size, operator: str) -> Size:
    if operator in "*+?":
        return (size[0] if operator == "+" else 0), size[1]
    low, comma, high = operator[1:-1].partition(",")
    minimum = int(low or 0)
    maximum = int(high) if high else max(minimum, 1) if comma else minimum
    return min(size[0] * minimum, MAX_SIZE), min(size[1] * max(maximum, minimum), MAX_SIZE)


def ambiguous_size(pattern: str) -> int:
    """Return how many ways there may be to divide a text among the repetitions of a group, as in ``([a-z]{1,9}){1,9}``.

    Groups with a part of fixed length do not count, because it usually separates the repetitions.
    """
    worst = 0
    levels: list[list[list[tuple[int, bool]]]] = [[[]]]  # alternatives of items: number of lengths, whether it is fixed
    for match in _ITEM.finditer(pattern):
        kind, items = match.lastgroup, levels[-1][-1]
        if kind == "open":
            levels.append([[]])
        elif kind == "close":
            alternatives = levels.pop()
            levels = levels or [[[]]]
            width = sum(width for each in alternatives for width, _ in each)
            levels[-1][-1].append((width, all(any(fixed for _, fixed in each) for each in alternatives)))
        elif match[0] == "|":
            levels[-1].append([])
        elif kind not in ("count", "loop"):
            items.append((0, True))
        elif items:
            width, fixed = items.pop()
            low, high = (int(match[4][:12]), int(match[6][:12] or 0)) if kind == "count" else (0, 1)
            high = max(low, high) if kind != "count" or match[5] else low
            if not fixed:
                worst = min(max(worst, width * high), MAX_SIZE)
            items.append((min(max(width * high, high - low), MAX_SIZE), fixed and low == high))
    return worst
