"""Estimates the length of the texts of a regular expression, with its repetitions expanded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

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
