"""Finds which earlier parts of a sequence its end repeats, and which tokens followed there.

``repeats`` is the slow twin: a pass over all tokens. ``Suffixes`` and ``Window`` follow a growing sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

ROOT = 0
NOTHING = -1
"""No state."""


def repeats(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens before it equal the last tokens of all (Gusfield's Z algorithm, from the end)."""
    back = list(reversed(tokens))
    size, left, right = len(back), 0, 0
    same = [0] * size
    for place in range(1, size):
        length = min(right - place, same[place - left]) if place < right else 0
        while place + length < size and back[length] == back[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        same[place] = length
    return [same[size - place] if place else 0 for place in range(size)]


def longest(tokens: Iterable[int], lengths: Iterable[int], least: int, most: int) -> dict[int, int]:
    """The longest repeat, of at least ``least`` tokens and cut to ``most``, that each token came after."""
    found: dict[int, int] = {}
    for token, length in zip(tokens, lengths, strict=True):
        if min(length, most) >= least:
            found[token] = max(found.get(token, 0), min(length, most))
    return found


class SuffixAutomaton:
    """A growing sequence. A state stands for all pieces of it that end at the same places (Blumer et al. 1985).

    Its link is the next shorter suffix that occurs at more places. There are at most two states per symbol, and
    ``push`` costs O(1) on average.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._last = [NOTHING], [0], ROOT

    def push(self, symbol: int) -> None:
        """Append a token."""
        state, new = self._last, self._add({}, NOTHING, self._length[self._last] + 1, NOTHING)
        while state != NOTHING and symbol not in self._next[state]:
            self._next[state][symbol] = new
            state = self._link[state]
        self._link[new] = ROOT if state == NOTHING else self._after(state, symbol)
        self._last = new

    def _shortened(self, state: int, length: int) -> int:
        """The state of the suffix of this length, from that of a longer one."""
        while (shorter := self._link[state]) != NOTHING and self._length[shorter] >= length:
            state = shorter
        return state

    def _after(self, state: int, symbol: int) -> int:
        """The state of a suffix and one more symbol, split off from longer ones where these do not occur with it."""
        old, length = self._next[state][symbol], self._length[state] + 1
        if self._length[old] == length:
            return old
        split = self._add(dict(self._next[old]), self._link[old], length, old)
        self._link[old] = split
        while state != NOTHING and self._next[state].get(symbol) == old:
            self._next[state][symbol] = split
            state = self._link[state]
        return split

    def _add(self, follows: dict[int, int], link: int, length: int, like: int) -> int:
        """A new state. like: one that occurred as often; or NOTHING."""
        self._next.append(follows)
        self._link.append(link)
        self._length.append(length)
        return len(self._length) - 1


class Suffixes(SuffixAutomaton):
    """Over the whole sequence: what followed its longest suffixes before.

    least, most: the shortest repeat that counts, and the length from which all count as equally long: the states of
    these two suffixes of the sequence are kept at hand. ``followers`` costs what it returns, and at most the states
    between the two.
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

    def followers(self, most: int) -> dict[int, int]:
        """``{token: n}``: what came after the last n tokens before; of several n, up to ``most``, the longest."""
        found: dict[int, int] = {}
        most, state = min(most, self._most), self._link[self._last]
        if state == NOTHING or min(self._length[state], most) < self._least:
            return found
        if self._length[state] > self._most:
            state = self._marks[self._most]
        everything = self._next[self._marks[self._least]]  # a shorter suffix has all followers that longer ones have
        while len(found) < len(everything):
            after, length = self._next[state], min(self._length[state], most)
            if len(after) > len(found):
                for token in after:
                    found.setdefault(token, length)
            state = self._link[state]
        return found


class Window:
    """Over the last ``size`` tokens only: one pass over them per token."""

    def __init__(self, tokens: Sequence[int], size: int, least: int, most: int) -> None:
        self._least, self._most = least, most
        last = tokens[max(0, len(tokens) - size) :]
        self._size, self._tokens = size, np.array(last, np.int64)
        self._lengths: Ids = np.array(repeats(last), np.int64)

    def push(self, token: int) -> None:
        longer = np.where(self._tokens == token, self._lengths + 1, 0)
        gone = max(0, len(longer) + 1 - self._size)
        self._tokens = np.append(self._tokens, token)[gone:]
        lengths = np.concatenate(([0], longer))[gone:]
        self._lengths = np.minimum(lengths, np.arange(len(lengths)))  # no further back than the window begins

    def followers(self, most: int) -> dict[int, int]:
        """As of ``Suffixes``."""
        places, most = np.flatnonzero(self._lengths >= self._least), min(most, self._most)
        return longest(self._tokens[places].tolist(), self._lengths[places].tolist(), self._least, most)
