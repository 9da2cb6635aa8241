"""``Reader`` reads text that comes in parts, for parsers written as generators; ``Emitter`` collects their events.

A parser such as ``marker = yield from reader.until(markers)`` runs until it needs more text, and continues with it.
Nothing is read twice, so that a parser takes linear time, and its results do not depend on how the text is split. Text
that may still become a marker is held back, up to the length of the longest marker. If the text is cut there, the part
of the marker is dropped: a reader of the output would see half of it. ``JsonScanner`` finds the end of a JSON value and
checks its syntax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar, final
from uuid import uuid4

from nucleate.outputs import ToolCallDelta

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


MAX_DEPTH: Final = 100
"""Maximum nesting: Python's parser is recursive."""
MAX_NUMBER: Final = 400
"""Maximum characters of a number: Python rejects integers of more than 4300 digits."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE_RUN = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_HEX = frozenset("0123456789abcdefABCDEF")


@final
class JsonScanner:
    """Scans one JSON value. ``done``: it is complete; ``failed``: it is not JSON."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self.valid_end = 0  #: the position after the last value or opening bracket
        self.missing: list[str] = []  #: closing brackets
        self._expects = "value"  # or "first value", "first key", "key", ":" or ","
        self._is_key = False
        self._word = ""  # a number or literal
        self._hex_digits = 0
        self._state: Callable[[str, int], int] = self._between

    def feed(self, text: str, position: int = 0) -> int:
        """Scan text from a position on, until its end or that of the value. Returns the position after it."""
        while position < len(text) and not (self.done or self.failed):
            position = self._state(text, position)
        return position

    def _fail(self, position: int) -> int:
        self.failed = True
        return position

    def _between(self, text: str, position: int) -> int:
        """Between strings, numbers and literals: white space, and one other character."""
        position = _end(_SPACE_RUN, text, position)
        if position == len(text):
            return position
        character, expects = text[position], self._expects
        if expects in ("first key", "first value", ",") and character == self.missing[-1]:
            self.missing.pop()
            self._end_value(position + 1)
        elif expects in (":", ","):
            if character != expects:
                return self._fail(position)
            self._expects = "key" if expects == "," and self.missing[-1] == "}" else "value"
        elif character == '"':
            self._is_key, self._state = expects.endswith("key"), self._string
        elif expects.endswith("key"):
            return self._fail(position)
        elif character in "{[":
            if len(self.missing) == MAX_DEPTH:
                return self._fail(position)
            self.missing.append("}" if character == "{" else "]")
            self._expects = "first key" if character == "{" else "first value"
            self.valid_end = position + 1
        else:
            self._state = self._plain_value
            return position
        return position + 1

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
            self._state, self._expects = self._between, ":"
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

    def _end_value(self, position: int) -> None:
        self.done = not self.missing
        self._state, self._expects = self._between, ","
        self.valid_end = position


def completed_object(text: str) -> str:
    """Return the beginning of a JSON object as an object: without the value that is incomplete, and what follows it."""
    scanner = JsonScanner()
    scanner.feed(text)
    return text[: scanner.valid_end] + "".join(reversed(scanner.missing)) or "{}"


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning section."""

    text: str


Event = Content | Reasoning | ToolCallDelta


MAX_HELD_SPACES: Final = 64
"""Maximum length of the white space that is held back."""


def call_id() -> str:
    """Return a new id of a tool call, in OpenAI's form."""
    return f"call_{uuid4().hex[:24]}"


@final
class Emitter:
    """names: the tools that can be called. new_id: makes the ids of calls."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self.names, self._new_id = names, new_id
        self._events: list[Event] = []
        self._skips_spaces = False  # at the start of a text after a marker
        self._spaces = ""  # held back at the end of a text
        self._gap = ""  # dropped after a text
        self._joins = False  # whether the next text follows a marker
        self._seen: set[type] = set()  # kinds of text so far
        self._num_calls = 0
        self.in_call = False  #: whether a call has started
        self.has_arguments = False  #: whether its arguments are complete

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def _add(self, kind: type[Content | Reasoning], text: str) -> None:
        if text := self._trimmed(text):
            gap = self._gap or "\n" if self._joins and kind in self._seen else ""
            self._gap, self._joins = "", False
            self._seen.add(kind)
            self._events.append(kind(gap + text))

    def marker(self) -> None:
        """Drop the white space at the end of the text so far, and at the start of the text that follows."""
        self._gap, self._spaces = self._spaces or self._gap, ""
        self._skips_spaces = self._joins = True

    def start_call(self, name: str) -> bool:
        """Start a call. Returns False if there is no such tool."""
        if name not in self.names:
            return False
        self.marker()
        self._events.append(ToolCallDelta(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self.in_call, self.has_arguments = True, False
        return True

    def arguments(self, text: str) -> None:
        self._events.append(ToolCallDelta(self._num_calls - 1, arguments=text))

    def end_call(self) -> None:
        """End the call. It is incomplete if its arguments are."""
        if not self.has_arguments:
            self._events.append(ToolCallDelta(self._num_calls - 1, incomplete=True))
        self.marker()
        self.in_call = False

    def not_a_call(self, raw: str) -> None:
        """Add the text of an attempt to read a call: it is text of the answer."""
        self._skips_spaces = False
        self.content(raw)

    def close(self, *, reasoning: bool = False) -> None:
        """End the text. Its white space at the end is part of it."""
        if self._spaces and not self._skips_spaces:
            self._events.append(Reasoning(self._spaces) if reasoning else Content(self._spaces))
        self._spaces = ""

    def _trimmed(self, text: str) -> str:
        if self._skips_spaces:
            text = text.lstrip()
            self._skips_spaces = not text
        text = self._spaces + text
        kept = text.rstrip()
        start = max(len(kept), len(text) - MAX_HELD_SPACES)
        self._spaces = text[start:]
        return text[:start]
