"""Estimates the size of a regular expression with its repetitions expanded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

_ITEM = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w*>|[\w-]*:?))?)|(?P<close>\))|(?P<count>\{\s*(\d+)\s*(,?)\s*(\d*)\s*\})|(?P<loop>[*+?])"
    r"|(?P<class>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<one>\\[pPxu]\{[^}]*\}|\\.|.)",
    re.DOTALL,
)
_VERBOSE = re.compile(r"\(\?[\w-]*x")
MAX_SIZE: Final = 10**12
"""A size beyond any limit; larger ones are capped."""

Size = tuple[int, int]
"""Upper bounds of the (minimum, maximum) characters that a part matches, with * and + counted once."""
Item = Size | str
"""A part of an expression: a size, a bracket ``(`` or ``)``, an operator ``* + ?``, or a count ``{2,5}``."""


def unrolled(pattern: str) -> Size:
    """Return the size of a regular expression; for an invalid one, any numbers."""
    if _VERBOSE.search(pattern) and "#" in pattern:
        return MAX_SIZE, MAX_SIZE  # a comment can stand inside a count
    return size_of(items(pattern))


def items(pattern: str) -> Iterator[Item]:
    """Yield the parts of a regular expression."""
    for found in _ITEM.finditer(pattern):
        kind = found.lastgroup
        if kind in ("class", "one"):
            yield 1, 1
        elif kind == "count":
            yield f"{{{found[4][:12]}{found[5]}{found[6][:12]}}}"
        else:
            yield "(" if kind == "open" else found[0]


def size_of(parts: Iterable[Item]) -> Size:
    """Return the size of a sequence of parts; alternatives are added up."""
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
    return min(sum(least for least, _ in sizes), MAX_SIZE), min(sum(most for _, most in sizes), MAX_SIZE)


def _times(size: Size, operator: str) -> Size:
    if operator in "*+?":
        return (size[0] if operator == "+" else 0), size[1]
    low, comma, high = operator[1:-1].partition(",")
    least = int(low or 0)
    most = int(high) if high else max(least, 1) if comma else least
    return min(size[0] * least, MAX_SIZE), min(size[1] * max(most, least), MAX_SIZE)
