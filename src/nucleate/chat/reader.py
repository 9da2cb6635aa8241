"""``Reader``: reads text that comes in parts, for parsers that are written as generators.

A parser such as ``marker = yield from reader.until(markers)`` runs until it needs more text, and continues with it.
Nothing is read twice, so that a parser takes linear time, and its results do not depend on how the text is split. Text
that may still become a marker is held back, up to the length of the longest marker. If the text is cut there, the part
of the marker is dropped: a reader of the output would see half of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final, TypeVar, final

from nucleate.chat.json_scanner import JsonScanner

Value = TypeVar("Value")
Parsing = Generator[None, None, Value]
"""A parser: it yields when it needs more text."""

MAX_SPACES: Final = 64
"""Maximum length of white space between the parts of a tool call."""
_SPACES: Final = " \t\n\r"


@final
class Reader:
    """The text so far. ``closed``: there is no more text; ``cut``: because a limit was reached within it."""

    def __init__(self) -> None:
        self.closed = self.cut = False
        self._text = ""
        self._position = 0
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """Add text."""
        self._text, self._position = self._text[self._position :] + text, 0

    def record(self) -> None:
        """Record what is read from now on."""
        self._recorded = []

    def recorded(self) -> str:
        """Return what was recorded, and stop."""
        parts, self._recorded = self._recorded or [], None
        return "".join(parts)

    def _take(self, end: int) -> str:
        """Read up to a position."""
        text, self._position = self._text[self._position : end], end
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def character(self) -> Parsing[str]:
        """Return the next character without reading it; empty at the end."""
        while self._position == len(self._text) and not self.closed:
            yield
        return self._text[self._position : self._position + 1]

    def until(self, markers: Sequence[str], emit: Callable[[str], object], *, read: bool = True) -> Parsing[str | None]:
        """Pass text to ``emit`` until the first marker, and with ``read`` read that. Returns None at the end."""
        pattern = _any_of(tuple(markers))
        while True:
            match = pattern.search(self._text, self._position)
            if match is not None:
                start = match.start()
            else:
                start = len(self._text) - (0 if self.closed and not self.cut else self._held(markers))
            if start > self._position:
                emit(self._take(start))
            if match is not None:
                if read:
                    self._take(match.end())
                return match.group()
            if self.closed:
                self._take(len(self._text))
                return None
            yield

    def _held(self, markers: Sequence[str]) -> int:
        """Return the length of the longest end of the text that may become a marker."""
        text, room = self._text, len(self._text) - self._position
        for length in range(min(room, max(map(len, markers), default=1) - 1), 0, -1):
            if any(text.endswith(marker[:length]) for marker in markers if len(marker) > length):
                return length
        return 0

    def literal(self, *literals: str) -> Parsing[str | None]:
        """Read the first of some texts that is next. Returns None, without reading anything, if it is another text.

        At the end of a text that is cut, a part of one of them is read.
        """
        while True:
            rest = self._text[self._position : self._position + max(map(len, literals))]
            found = next((one for one in literals if rest.startswith(one)), None)
            may_become = any(one.startswith(rest) and one != rest for one in literals)
            if self.closed or not may_become:
                if found is not None:
                    self._take(self._position + len(found))
                elif may_become and self.cut:
                    self._take(len(self._text))
                return found
            yield

    def while_in(self, characters: str | frozenset[str], most: int) -> Parsing[str | None]:
        """Read the next characters that are all in a set. Returns None if there are more than ``most``."""
        taken = 0
        parts: list[str] = []
        while True:
            end = self._position
            while end < len(self._text) and self._text[end] in characters and taken + end - self._position <= most:
                end += 1
            taken += end - self._position
            parts.append(self._take(end))
            if taken > most:
                return None
            if end < len(self._text) or self.closed:
                return "".join(parts)
            yield

    def spaces(self) -> Parsing[bool]:
        """Read white space. Returns False if there is too much."""
        return (yield from self.while_in(_SPACES, MAX_SPACES)) is not None

    def json(self, emit: Callable[[str], object], most: int | None = None) -> Parsing[bool]:
        """Read a JSON value and pass its text to ``emit``. Returns False if it is invalid or longer than ``most``."""
        scanner, length = JsonScanner(), 0
        while True:
            text = self._text if most is None else self._text[: self._position + most + 1 - length]
            end = scanner.feed(text, self._position)
            length += end - self._position
            if end > self._position:
                emit(self._take(end))
            if scanner.failed or (most is not None and length > most):
                return False
            if scanner.done:
                return True
            if self.closed:
                return False
            yield


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")
