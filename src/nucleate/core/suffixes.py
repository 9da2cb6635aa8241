"""Which earlier text a sequence repeats at its end, and what came next there. Knows no penalty.

``repeats`` is the slow twin: a pass over all tokens. ``Suffixes`` and ``Window`` follow a growing sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


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


class Suffixes:
    """Over the whole sequence: a suffix automaton (Blumer et al. 1985).

    A state stands for all suffixes that occur at the same places; its link is the next shorter suffix that occurs at
    more. least, most: the shortest repeat that counts, and the length from which all count as equally long: the states
    of these two suffixes of the sequence are kept at hand. ``push`` costs O(1) on average; ``followers`` what it
    returns, and at most the states between the two.
    """

    def __init__(self, tokens: Iterable[int], least: int, most: int) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._last = [-1], [0], 0
        self._marks = {least: 0, most: 0}
        self._least, self._most = least, most
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        state, new = self._last, self._add({}, -1, self._length[self._last] + 1)
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state == -1 else self._after(state, token)
        self._last = new
        for length, mark in self._marks.items():
            place = self._next[mark][token]
            while (shorter := self._link[place]) != -1 and self._length[shorter] >= length:
                place = shorter
            self._marks[length] = place

    def _after(self, state: int, token: int) -> int:
        """The state of a suffix and one more token, split off from longer ones where these do not occur with it."""
        old, length = self._next[state][token], self._length[state] + 1
        if self._length[old] == length:
            return old
        split = self._add(dict(self._next[old]), self._link[old], length)
        self._link[old] = split
        while state != -1 and self._next[state].get(token) == old:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add(self, after: dict[int, int], link: int, length: int) -> int:
        self._next.append(after)
        self._link.append(link)
        self._length.append(length)
        return len(self._length) - 1

    def followers(self, most: int) -> dict[int, int]:
        """``{token: n}``: what came after the last n tokens before; of several n, up to ``most``, the longest."""
        found: dict[int, int] = {}
        most, state = min(most, self._most), self._link[self._last]
        if state == -1 or min(self._length[state], most) < self._least:
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
