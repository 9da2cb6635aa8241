"""Finds stop strings in streamed text with one Aho-Corasick automaton.

The cost is constant per character, regardless of the number of strings. It finds the earliest stop string that ends in
the new text, and how much of the text's end may be the beginning of one.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


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
