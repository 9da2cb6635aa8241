"""Finds the end of a JSON value in text that comes in parts, and checks its syntax, in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, final

MAX_DEPTH: Final = 100
"""Maximum nesting: Python's parser is recursive."""
MAX_NUMBER: Final = 400
"""Maximum characters of a number: Python rejects integers of more than 4300 digits."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACES = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_HEX = frozenset("0123456789abcdefABCDEF")


@final
class JsonScanner:
    """Scans one JSON value. ``done``: it is complete; ``failed``: it is not JSON."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._stack: list[str] = []  # the closing brackets that are missing
        self.valid_end = 0  #: the position after the last value or opening bracket
        self._word = ""  # a number or literal
        self._is_key = False
        self._hex_digits = 0
        self._state: Callable[[str, int], int] = self._value

    def feed(self, text: str, position: int = 0) -> int:
        """Scan text from a position on, until its end or that of the value. Returns the position after it."""
        while position < len(text) and not (self.done or self.failed):
            position = self._state(text, position)
        return position

    def _fail(self, position: int) -> int:
        self.failed = True
        return position

    def _value(self, text: str, position: int, closing: str = "") -> int:
        position = _end(_SPACES, text, position)
        character = text[position : position + 1]
        if not character:
            return position
        if character == closing:
            return self._close(position)
        if character in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail(position)
            self._stack.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_item
            self.valid_end = position + 1
            return position + 1
        if character == '"':
            self._is_key, self._state = False, self._string
            return position + 1
        self._state = self._plain_value
        return position

    def _first_item(self, text: str, position: int) -> int:
        return self._value(text, position, "]")

    def _first_key(self, text: str, position: int) -> int:
        position = _end(_SPACES, text, position)
        if text[position : position + 1] == "}":
            return self._close(position)
        return self._key(text, position)

    def _key(self, text: str, position: int) -> int:
        position = _end(_SPACES, text, position)
        if position == len(text):
            return position
        self._is_key, self._state = True, self._string
        return position + 1 if text[position] == '"' else self._fail(position)

    def _string(self, text: str, position: int) -> int:
        position = _end(_PLAIN, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._state = self._escape
            return position + 1
        if text[position] != '"':
            return self._fail(position)
        if self._is_key:
            self._state = self._colon
        else:
            self._end_value(position + 1)
        return position + 1

    def _escape(self, text: str, position: int) -> int:
        if text[position] == "u":
            self._hex_digits, self._state = 4, self._hexadecimal
        elif text[position] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._fail(position)
        return position + 1

    def _hexadecimal(self, text: str, position: int) -> int:
        if text[position] not in _HEX:
            return self._fail(position)
        self._hex_digits -= 1
        if not self._hex_digits:
            self._state = self._string
        return position + 1

    def _colon(self, text: str, position: int) -> int:
        position = _end(_SPACES, text, position)
        if position == len(text):
            return position
        self._state = self._value
        return position + 1 if text[position] == ":" else self._fail(position)

    def _plain_value(self, text: str, position: int) -> int:
        """A number, true, false or null. It ends before the next other character."""
        end = min(_end(_WORD, text, position), position + MAX_NUMBER + 1 - len(self._word))
        self._word += text[position:end]
        if len(self._word) > MAX_NUMBER:
            return self._fail(end)
        if end < len(text):
            if self._word not in ("true", "false", "null") and not _NUMBER.fullmatch(self._word):
                return self._fail(end)
            self._word = ""
            self._end_value(end)
        return end

    def _next(self, text: str, position: int) -> int:
        """After a value inside another one."""
        position = _end(_SPACES, text, position)
        if position == len(text):
            return position
        if text[position] == self._stack[-1]:
            return self._close(position)
        self._state = self._key if self._stack[-1] == "}" else self._value
        return position + 1 if text[position] == "," else self._fail(position)

    def _close(self, position: int) -> int:
        self._stack.pop()
        self._end_value(position + 1)
        return position + 1

    def _end_value(self, position: int) -> None:
        self.done = not self._stack
        self._state = self._next
        self.valid_end = position

    @property
    def closing(self) -> str:
        """The brackets that end the value after ``valid_end``."""
        return "".join(reversed(self._stack))


def completed_object(text: str) -> str:
    """Return the beginning of a JSON object as an object: without the value that is incomplete, and what follows it."""
    scanner = JsonScanner()
    scanner.feed(text)
    return text[: scanner.valid_end] + scanner.closing or "{}"


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
