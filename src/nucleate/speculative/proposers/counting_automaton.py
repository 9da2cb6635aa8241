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
        self._count, self._continued = [0], [0]  # occurrences, and those with a next symbol
        self._top_next = [NOTHING]  # the most frequent next symbol; ties: the latest
        self._suffix_state = ROOT  # the state of the last ``depth`` symbols

    @property
    def num_states(self) -> int:
        """The number of symbols."""
        return len(self._link)

    def push(self, symbol: int) -> None:
        """Append a symbol."""
        super().push(symbol)
        previous = self._suffix_state
        self.size += 1
        self._suffix_state = self._shortened(self._next[previous][symbol], min(self.depth, self.size))
        self._count_suffixes(previous, symbol)

    def _count_suffixes(self, previous: int, symbol: int) -> None:
        """Count the suffixes of the text, and the symbol as what followed those it had before."""
        count, followed, best, link = self._count, self._continued, self._top_next, self._link
        state = self._suffix_state
        while state != NOTHING:
            count[state] += 1
            state = link[state]
        state = previous
        while state != NOTHING:
            followed[state] += 1
            top = best[state]
            if top != symbol:
                transitions = self._next[state]
                if top not in transitions or count[transitions[symbol]] >= count[transitions[top]]:
                    best[state] = symbol
            state = link[state]

    def _add(self, transitions: dict[int, int], link: int, length: int, template: int) -> int:
        for values, initial in ((self._count, 0), (self._continued, 0), (self._top_next, NOTHING)):
            values.append(initial if template == NOTHING else values[template])
        return super()._add(transitions, link, length, template)

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

    def continuation(self, state: int, max_length: int, min_probability: float) -> tuple[list[int], float]:
        """The symbols that follow most often, one after the other, and the sum of their chances.

        Up to ``most``, as long as the chance of all of them is at least ``least``.
        """
        symbols: list[int] = []
        score, probability = 0.0, 1.0
        while len(symbols) < max_length and (symbol := self._top_next[state]) != NOTHING:
            after = self._next[state][symbol]
            probability *= self._count[after] / self._continued[state]
            if probability < min_probability:
                break
            symbols.append(symbol)
            score += probability
            state = after
        return symbols, score

    def next_symbols(self, state: int, max_length: int) -> list[tuple[int, float, int]]:
        """The most frequent next symbols, at most so many: (symbol, probability, state after it)."""
        transitions, count, top = self._next[state], self._count, self._top_next[state]
        top_symbols = heapq.nlargest(
            max_length, ((count[after], symbol == top, symbol, after) for symbol, after in transitions.items())
        )
        total = self._continued[state]
        return [(symbol, occurrences / total, after) for occurrences, _, symbol, after in top_symbols if symbol != NOTHING]


def extend(automaton: CountingAutomaton, symbols: Sequence[int], start: int, stop: int) -> None:
    """Push those from a place to another, or to the end."""
    for position in range(start, min(stop, len(symbols))):
        automaton.push(int(symbols[position]))
