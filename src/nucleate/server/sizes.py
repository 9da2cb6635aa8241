"""How large JSON is, counted no further than a limit. Knows no fields and no limits of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def values_of(value: Any, most: int) -> int:
    """How many values there are in lists and objects in one another; more than most, if there are more."""
    inner, count = [value], 0
    while inner and count <= most:
        last = inner.pop()
        if isinstance(last, list | Mapping):
            count += len(last)
            inner += (last.values() if isinstance(last, Mapping) else last) if count <= most else ()
    return count


def characters_of(value: Any, most: int) -> int:
    """How many characters the JSON of a value has at least; more than most, if there are more."""
    inner, count = [value], 0
    while inner and count <= most:
        last = inner.pop()
        if isinstance(last, Mapping):
            count += sum(map(len, last)) + 2
            inner += last.values()
        elif isinstance(last, list):
            count += 2
            inner += last
        else:
            count += len(last) if isinstance(last, str) else 1
    return count


def sizes_of(entries: Iterable[Any]) -> list[int]:
    """The lengths of those that have one."""
    return [len(entry) for entry in entries if isinstance(entry, str | list | tuple)]
