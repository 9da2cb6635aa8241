"""How large a regular expression is once its repetitions are written out, read off its text. Compiles nothing."""

from __future__ import annotations

import re

_ITEM = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w*>|[\w-]*:?))?)|(?P<close>\))|(?P<count>\{\s*(\d+)\s*(,?)\s*(\d*)\s*\})|(?P<loop>[*+?])"
    r"|(?P<class>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<one>\\[pPxu]\{[^}]*\}|\\.|.)",
    re.DOTALL,
)
_VERBOSE = re.compile(r"\(\?[\w-]*x")
_MOST = 10**12  # beyond any limit; keeps the numbers small


def unrolled(pattern: str) -> tuple[int, int]:
    """The (least, most) characters an expression stands for, with * and + as one; an upper bound of both.

    A sum over alternatives, not a maximum. What is no valid expression gives some numbers.
    """
    if _VERBOSE.search(pattern) and "#" in pattern:
        return _MOST, _MOST  # a comment can stand inside a count
    levels: list[list[tuple[int, int]]] = [[]]
    repeated = False  # a ? after a repetition makes it lazy, not optional
    for found in _ITEM.finditer(pattern):
        kind = found.lastgroup
        if kind == "open":
            levels.append([])
        elif kind == "close":
            inner = _sum(levels.pop())
            levels = levels or [[]]
            levels[-1].append(inner)
        elif kind in ("count", "loop"):
            if levels[-1] and not (repeated and found["loop"] == "?"):
                levels[-1].append(_times(levels[-1].pop(), found))
        else:
            levels[-1].append((1, 1))
        repeated = kind in ("count", "loop")
    return _sum([size for level in levels for size in level])


def _sum(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    return min(sum(least for least, _ in sizes), _MOST), min(sum(most for _, most in sizes), _MOST)


def _times(size: tuple[int, int], found: re.Match[str]) -> tuple[int, int]:
    if found["loop"]:
        return (size[0] if found["loop"] == "+" else 0), size[1]
    low, comma, high = found[4], found[5], found[6]
    least = int(low[:12])
    most = int(high[:12]) if high else max(least, 1) if comma else least
    return min(size[0] * least, _MOST), min(size[1] * max(most, least), _MOST)
