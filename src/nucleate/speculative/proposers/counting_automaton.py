"""A suffix automaton that counts how often each substring occurred, and what followed it most often.

Symbols are integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from nucleate.sampling.suffix_automaton import NOTHING, ROOT, SuffixAutomaton


class CountingAutomaton(SuffixAutomaton):
    """A growing text. The symbol NOTHING is never drafted: it may be pushed between texts.

    depth: pieces of up to so many symbols are counted. ``push`` costs what the suffixes of up to ``depth`` symbols are
    in different states: a few in most texts, ``depth`` at worst.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.size = depth, 0
        self._count, self._followed = [0], [0]  # occurrences, and those with a next symbol
        self._best = [NOTHING]  # the most frequent next symbol; ties: the latest
        self._mark = ROOT  # the state of the last ``depth`` symbols

    @property
    def states(self) -> int:
        """The number of symbols."""
        return len(self._link)

    def push(self, symbol: int) -> None:
        """Append a symbol."""
        super().push(symbol)
        before = self._mark
        self.size += 1
        self._mark = self._shortened(self._next[before][symbol], min(self.depth, self.size))
        self._tally(before, symbol)

    def _tally(self, before: int, symbol: int) -> None:
        """Count the suffixes of the text, and the symbol as what followed those it had before."""
        count, followed, best, link = self._count, self._followed, self._best, self._link
        state = self._mark
        while state != NOTHING:
            count[state] += 1
            state = link[state]
        state = before
        while state != NOTHING:
            followed[state] += 1
            favourite = best[state]
            if favourite != symbol:
                follows = self._next[state]
                if favourite not in follows or count[follows[symbol]] >= count[follows[favourite]]:
                    best[state] = symbol
            state = link[state]

    def _add(self, follows: dict[int, int], link: int, length: int, like: int) -> int:
        for numbers, at_first in ((self._count, 0), (self._followed, 0), (self._best, NOTHING)):
            numbers.append(at_first if like == NOTHING else numbers[like])
        return super()._add(follows, link, length, like)

    def matches(self, symbols: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The ends of some symbols that are in the text: (state, length), the longest first.

        Of those that were at the same places the longest only.
        """
        state = length = ROOT
        for symbol in symbols:
            while symbol not in self._next[state] and state != ROOT:
                state = self._link[state]
                length = self._length[state]
            if symbol in self._next[state]:
                state, length = self._next[state][symbol], length + 1
        while state != ROOT:
            yield state, length
            state = self._link[state]
            length = self._length[state]

    def continuation(self, state: int, most: int, least: float) -> tuple[list[int], float]:
        """The symbols that follow most often, one after the other, and the sum of their chances.

        Up to ``most``, as long as the chance of all of them is at least ``least``.
        """
        symbols: list[int] = []
        score, chance = 0.0, 1.0
        while len(symbols) < most and (symbol := self._best[state]) != NOTHING:
            after = self._next[state][symbol]
            chance *= self._count[after] / self._followed[state]
            if chance < least:
                break
            symbols.append(symbol)
            score += chance
            state = after
        return symbols, score

    def followers(self, state: int, most: int) -> list[tuple[int, float, int]]:
        """The most frequent next symbols, at most so many: (symbol, probability, state after it)."""
        follows, count, favourite = self._next[state], self._count, self._best[state]
        found = heapq.nlargest(
            most, ((count[after], symbol == favourite, symbol, after) for symbol, after in follows.items())
        )
        all_of = self._followed[state]
        return [(symbol, often / all_of, after) for often, _, symbol, after in found if symbol != NOTHING]


def extend(automaton: CountingAutomaton, symbols: Sequence[int], start: int, stop: int) -> None:
    """Push those from a place to another, or to the end."""
    for place in range(start, min(stop, len(symbols))):
        automaton.push(int(symbols[place]))
