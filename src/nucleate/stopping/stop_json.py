"""Finds the end of the first complete JSON object or array in streamed text.

A value starts at the first ``{`` or ``[``; text before it is skipped. It ends where all brackets are closed, ignoring
brackets in strings, and it counts if ``json.loads`` accepts it. Otherwise (``{name}`` in prose, or a wrong bracket) the
search continues after it.
"""

from __future__ import annotations

import json
import re

_OPEN = re.compile(r"[\[{]")
_MARK = re.compile(r'[\[\]{}"]')
_IN_STRING = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}


class JsonSearch:
    """A search in one text."""

    def __init__(self) -> None:
        self._closing: list[str] = []  # closing brackets still expected, innermost last; empty before a value
        self._parts: list[str] = []  # the value so far
        self._in_string = False
        self._escaped = False
        self._length = 0

    def push(self, text: str, ignore: bool = False) -> int | None:
        """Add text. Returns where the first complete value ends, in characters of all text so far, or None.

        With ``ignore``, complete values are ignored for good.
        """
        begin = index = 0  # the first character of the value in ``text``, and the next character to read
        while index < len(text):
            if not self._closing:
                opening = _OPEN.search(text, index)
                if opening is None:
                    break
                begin, index = opening.start(), opening.end()
                self._closing.append(_CLOSING[opening[0]])
                continue
            index, closed = self._read(text, index)
            if closed:
                self._parts.append(text[begin:index])
                complete = not self._closing and _is_json("".join(self._parts))
                self._parts.clear()
                self._closing.clear()
                if complete and not ignore:
                    return self._length + index
        if self._closing:
            self._parts.append(text[begin:])
        self._length += len(text)
        return None

    def _read(self, text: str, index: int) -> tuple[int, bool]:
        """Read to the next bracket, quote or escape. Returns the index after it, and whether the value has ended."""
        if self._escaped:
            self._escaped = False
            return index + 1, False
        mark = (_IN_STRING if self._in_string else _MARK).search(text, index)
        if mark is None:
            return len(text), False
        character = mark[0]
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif character == self._closing[-1]:
            self._closing.pop()
            return mark.end(), not self._closing
        else:
            return mark.end(), True
        return mark.end(), False


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)  # numbers as strings: Python limits their length
    except ValueError:
        return False
    except RecursionError:
        return True  # too deep for Python; accept it, as its brackets match
    return True
