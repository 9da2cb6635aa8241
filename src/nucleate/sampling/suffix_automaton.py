"""Finds earlier occurrences of the last tokens of a sequence, and the tokens that followed them.

``RepeatIndex`` and ``WindowRepeatIndex`` are updated per token; ``repeat_lengths`` is their reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import changed_copy

Ids = NDArray[np.int64]

ROOT = 0
NOTHING = -1
"""No state."""


def repeat_lengths(tokens: Sequence[int]) -> list[int]:
    """For each position, how many tokens before it equal the last tokens of the sequence (backward Z algorithm)."""
    backwards = list(reversed(tokens))
    size, left, right = len(backwards), 0, 0
    lengths = [0] * size
    for position in range(1, size):
        length = min(right - position, lengths[position - left]) if position < right else 0
        while position + length < size and backwards[length] == backwards[position + length]:
            length += 1
        if position + length > right:
            left, right = position, position + length
        lengths[position] = length
    return [lengths[size - position] if position else 0 for position in range(size)]


def longest_repeats(tokens: Iterable[int], lengths: Iterable[int], least: int, most: int) -> dict[int, int]:
    """{token: length of the longest repeat that it followed}, of at least ``least`` tokens, cut to ``most``."""
    found: dict[int, int] = {}
    for token, length in zip(tokens, lengths, strict=True):
        if min(length, most) >= least:
            found[token] = max(found.get(token, 0), min(length, most))
    return found


class SuffixAutomaton:
    """The suffix automaton of a growing sequence (Blumer et al. 1985).

    A state stands for all substrings that end at the same positions. Its link is the state of the longest suffix that
    ends at more positions. There are at most two states per symbol, and ``push`` takes amortised constant time.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._last = [NOTHING], [0], ROOT
        self._shared, self._owned = 0, set[int]()  # the states below the first share their dict, except the second

    def fork(self) -> Self:
        """A copy that grows on its own. What follows a state is shared until one of the two adds to it.

        Copies three lists with an entry per state: about a thousandth of the time that ``push`` took to make them.
        """
        self._shared, self._owned = len(self._next), set()
        lists = {"_next": self._next.copy(), "_link": self._link.copy(), "_length": self._length.copy()}
        return changed_copy(self, **lists, _owned=set())

    def push(self, symbol: int) -> None:
        """Append a token."""
        state, new = self._last, self._add({}, NOTHING, self._length[self._last] + 1)
        while state != NOTHING and symbol not in self._next[state]:
            self._follow(state, symbol, new)
            state = self._link[state]
        self._link[new] = ROOT if state == NOTHING else self._after(state, symbol)
        self._last = new

    def _shortened(self, state: int, length: int) -> int:
        """The state of the suffix with this length, given the state of a longer one."""
        while (shorter := self._link[state]) != NOTHING and self._length[shorter] >= length:
            state = shorter
        return state

    def _after(self, state: int, symbol: int) -> int:
        """The state of a suffix plus one symbol; cloned if it also stands for longer substrings."""
        old, length = self._next[state][symbol], self._length[state] + 1
        if self._length[old] == length:
            return old
        split = self._add(dict(self._next[old]), self._link[old], length)
        self._link[old] = split
        while state != NOTHING and self._next[state].get(symbol) == old:
            self._follow(state, symbol, split)
            state = self._link[state]
        return split

    def _follow(self, state: int, symbol: int, target: int) -> None:
        """Let a symbol lead from a state to another one."""
        if state < self._shared and state not in self._owned:
            self._next[state] = self._next[state].copy()
            self._owned.add(state)
        self._next[state][symbol] = target

    def _add(self, follows: dict[int, int], link: int, length: int) -> int:
        """Add a state."""
        self._next.append(follows)
        self._link.append(link)
        self._length.append(length)
        return len(self._length) - 1


class RepeatIndex(SuffixAutomaton):
    """Finds the tokens that followed earlier occurrences of the longest suffixes of a growing sequence.

    least: the minimum length of a repeat. most: the length to which longer repeats are cut. The states of the suffixes
    with these lengths are stored, so the cost of ``continuations`` depends on its result and on the states between.
    """

    def __init__(self, tokens: Iterable[int], least: int, most: int) -> None:
        super().__init__()
        self._marks = {least: ROOT, most: ROOT}
        self._least, self._most = least, most
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        super().push(token)
        for length, mark in self._marks.items():
            self._marks[length] = self._shortened(self._next[mark][token], length)

    def fork(self) -> Self:
        return changed_copy(super().fork(), _marks=self._marks.copy())

    def continuations(self, most: int) -> dict[int, int]:
        """{token: n}: the token followed an earlier occurrence of the last n tokens; n is maximal, at most ``most``."""
        found: dict[int, int] = {}
        most, state = min(most, self._most), self._link[self._last]
        if state == NOTHING or min(self._length[state], most) < self._least:
            return found
        if self._length[state] > self._most:
            state = self._marks[self._most]
        everything = self._next[self._marks[self._least]]  # the shortest suffix has all continuations of longer ones
        while len(found) < len(everything):
            after, length = self._next[state], min(self._length[state], most)
            if len(after) > len(found):
                for token in after:
                    found.setdefault(token, length)
            state = self._link[state]
        return found


class WindowRepeatIndex:
    """The same for the last ``size`` tokens only: one pass over them per token."""

    def __init__(self, tokens: Sequence[int], size: int, least: int, most: int) -> None:
        self._least, self._most = least, most
        last = tokens[max(0, len(tokens) - size) :]
        self._size, self._tokens = size, np.array(last, np.int64)
        self._lengths: Ids = np.array(repeat_lengths(last), np.int64)

    def fork(self) -> Self:
        """A copy that grows on its own. ``push`` replaces the arrays, so both share them until then."""
        return changed_copy(self)

    def push(self, token: int) -> None:
        longer = np.where(self._tokens == token, self._lengths + 1, 0)
        gone = max(0, len(longer) + 1 - self._size)
        self._tokens = np.append(self._tokens, token)[gone:]
        lengths = np.concatenate(([0], longer))[gone:]
        self._lengths = np.minimum(lengths, np.arange(len(lengths)))  # repeats begin within the window

    def continuations(self, most: int) -> dict[int, int]:
        """See ``RepeatIndex``."""
        chosen, most = np.flatnonzero(self._lengths >= self._least), min(most, self._most)
        return longest_repeats(self._tokens[chosen].tolist(), self._lengths[chosen].tolist(), self._least, most)
