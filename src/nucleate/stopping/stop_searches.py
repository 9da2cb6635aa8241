"""Searches in streamed text: for stop strings, for a stop regex, and for the first complete JSON value.

*Strings.* One Aho-Corasick automaton finds the earliest stop string that ends in the new text, and how much of the
text's end may be the beginning of one. The cost is constant per character, regardless of the number of strings.

*Regex.* The result equals a search of all text so far after each part: ``a+`` matches as soon as there is an ``a``, and
``$`` matches at the end of each part. Text is released when no match can start in it any more; lookbehind still sees
its last ``CONTEXT`` characters.

*JSON.* A value starts at the first ``{`` or ``[``; text before it is skipped. It ends where all brackets are closed,
ignoring brackets in strings, and it counts if ``json.loads`` accepts it. Otherwise (``{name}`` in prose, or a wrong
bracket) the search continues after it.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]


class StringMatch(NamedTuple):
    """A match: characters ``start`` to ``end`` of all text so far, and the stop string or regex."""

    start: int
    end: int
    detail: str


class StringAutomaton:
    """The trie of the strings. State 0 is the root; every state is a prefix of some string."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.follow: list[dict[str, int]] = [{}]
        self.fail = [0]  # the state of the longest proper suffix that is also a prefix
        self.longest: list[str | None] = [None]  # the longest string that ends in this state
        self.open = [0]  # length of the longest suffix of this state that is a proper prefix of a string
        for string in strings:
            state = 0
            for character in string:
                following = self.follow[state].get(character)
                if following is None:
                    following = self.follow[state][character] = len(self.follow)
                    self.follow.append({})
                    self.fail.append(0)
                    self.longest.append(None)
                    self.open.append(0)
                state = following
            self.longest[state] = string
        self.first = frozenset(self.follow[0])
        self._link()

    def _link(self) -> None:
        queue = deque((state, 1) for state in self.follow[0].values())
        while queue:  # breadth first: suffixes are shorter
            state, length = queue.popleft()
            suffix = self.fail[state]
            self.longest[state] = self.longest[state] or self.longest[suffix]
            self.open[state] = length if self.follow[state] else self.open[suffix]
            for character, following in self.follow[state].items():
                self.fail[following] = self.step(suffix, character)
                queue.append((following, length + 1))

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        following = self.follow[state].get(character)
        while following is None and state:
            state = self.fail[state]
            following = self.follow[state].get(character)
        return following or 0


@lru_cache(maxsize=16)
def automaton(strings: tuple[str, ...]) -> StringAutomaton:
    """The automaton of these strings; it is immutable and shared between requests."""
    return StringAutomaton(strings)


class StringSearch:
    """A search in one text. ``open``: how many characters at the end of the text may be the beginning of a match."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._automaton = automaton(strings)
        self._state = 0
        self._length = 0
        self.open = 0

    def push(self, text: str, ignore: bool = False) -> StringMatch | None:
        """Add text. Returns the match that ends in ``text`` and starts earliest, of these the longest.

        With ``ignore``, complete matches are ignored for good; a match that has only begun may complete later.
        """
        machine = self._automaton
        state, best = self._state, None
        if not state and machine.first.isdisjoint(text):  # no match begins here: the usual case
            self._length += len(text)
            return None
        follow, fail, longest = machine.follow, machine.fail, machine.longest
        for position, character in enumerate(text, self._length + 1):
            following = follow[state].get(character)  # machine.step inlined: the hot loop
            while following is None and state:
                state = fail[state]
                following = follow[state].get(character)
            state = following or 0
            found = longest[state]
            # A later end with the same start is the longer string, so "not later" keeps the longest.
            if found is not None and not ignore and (best is None or position - len(found) <= best.start):
                best = StringMatch(position - len(found), position, found)
        self._state, self._length = state, self._length + len(text)
        self.open = machine.open[state]
        return best


CONTEXT: Final = 4096  # characters
# The regex compiler unrolls repetitions with a lower bound, and compiles nested repeated groups once per level:
# (((a{1000}){1000}){1000}) would take all memory, and ((((a+)+)+)+)+ with 30 levels would take hours. An upper bound of
# the work is the product of all lower bounds, at least 2 (3 if unrolled) for a group, times the length of the pattern.
MAX_UNROLLED: Final = 500_000
_REPEAT = re.compile(r"(\)?)(?:[*+]|\{(\d*))")
_VERBOSE = re.compile(r"\(\?\w*x")


def unrolled(pattern: str) -> int:
    """An upper bound of the size of the compiled pattern."""
    if _VERBOSE.search(pattern) and "#" in pattern:
        return MAX_UNROLLED + 1  # a comment may be inside a number
    size = max(len(pattern), 1)
    for group, digits in _REPEAT.findall("".join(pattern.split())):
        count = int(digits[:10] or 0)  # ten digits exceed the limit anyway
        size *= max(count, 1 if not group else 2 if count < 2 else 3)
    return size


@lru_cache(maxsize=256)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern. Raises ValueError with the reason if it is invalid or too large."""
    import regex

    if unrolled(pattern) > MAX_UNROLLED:
        raise ValueError("too many repetitions")
    try:
        return regex.compile(pattern, cache_pattern=False)
    except regex.error as error:
        raise ValueError(f"{error.msg} at position {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (OverflowError, ValueError, KeyError, IndexError) as error:
        raise ValueError(str(error) or "it cannot be compiled") from None


class RegexSearch:
    """A search for one pattern in one text. ``open``: how many characters at the end may be part of a match."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._compiled = compiled(pattern)
        self._text = ""  # all text from self._base on
        self._base = 0
        self._from = 0  # the first index in self._text at which a match may still start
        self._ignored: set[int] = set()  # indices after it at which no match may start
        self.open = 0

    def push(self, text: str, seconds: float, ignore: bool = False) -> StringMatch | None:
        """Add text. Returns the match that starts earliest. Raises TimeoutError after ``seconds``.

        With ``ignore``, no match may start any more where the pattern matches now.
        """
        deadline = time.monotonic() + seconds
        self._text += text
        if not ignore and not self._ignored:
            found = self._compiled.search(self._text, self._from, partial=True, timeout=seconds)
            if found is not None and not found.partial:
                return self._match(found)
            self._release(len(self._text) if found is None else found.start())
            return None
        return self._push_with_ignored(deadline, ignore)

    def _push_with_ignored(self, deadline: float, ignore: bool) -> StringMatch | None:
        """The same, for one start index at a time: a search would stop at an ignored match."""
        first_open: int | None = None
        for start in range(self._from, len(self._text) + 1):
            if start in self._ignored:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            found = self._compiled.match(self._text, start, partial=True, timeout=left)
            if found is None:
                continue
            if found.partial:
                first_open = start if first_open is None else first_open
            elif ignore:
                self._ignored.add(start)
            else:
                return self._match(found)
        self._release(len(self._text) if first_open is None else first_open)
        return None

    def _match(self, found: regex.Match[str]) -> StringMatch:
        return StringMatch(self._base + found.start(), self._base + found.end(), self.pattern)

    def _release(self, start: int) -> None:
        self.open = len(self._text) - start
        self._from = start
        if start > 2 * CONTEXT:  # rarely, so that copying has a constant amortised cost
            cut = start - CONTEXT
            self._text, self._base, self._from = self._text[cut:], self._base + cut, CONTEXT
            self._ignored = {ignored - cut for ignored in self._ignored}
        self._ignored = {ignored for ignored in self._ignored if ignored >= self._from}


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
