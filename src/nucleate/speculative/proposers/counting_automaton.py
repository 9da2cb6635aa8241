"""A suffix automaton that counts the occurrences and the most frequent continuation of each substring."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from nucleate.sampling.suffix_automaton import NOTHING, ROOT, SuffixAutomaton


class CountingAutomaton(SuffixAutomaton):
    """A suffix automaton with counts. The symbol NOTHING separates texts and is never drafted.

    depth: maximum length of the counted substrings. ``push`` takes time in the number of states of the suffixes of up
    to ``depth`` symbols: a few in most texts, at most ``depth``.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.size = depth, 0
        self._count, self._continued = [0], [0]  # occurrences, and those with a next symbol
        self._top_next = [NOTHING]  # the most frequent next symbol; ties: the latest
        self._suffix_state = ROOT  # the state of the last ``depth`` symbols

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self._link)

    def push(self, symbol: int) -> None:
        """Append a symbol."""
        super().push(symbol)
        previous = self._suffix_state
        self.size += 1
        self._suffix_state = self._shortened(self._next[previous][symbol], min(self.depth, self.size))
        self._count_suffixes(previous, symbol)

    def _count_suffixes(self, previous: int, symbol: int) -> None:
        """Count the suffixes of the text, and the symbol as the continuation of the previous ones."""
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
        """The suffixes of ``symbols`` that occur in the text, the longest first: (state, length).

        Of suffixes that end at the same positions in the text, only the longest.
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
        """The most frequent continuation of a state, and its expected number of accepted symbols.

        It has at most ``max_length`` symbols, and an estimated probability of at least ``min_probability``.
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

    def next_symbols(self, state: int, count: int) -> list[tuple[int, float, int]]:
        """The ``count`` most frequent next symbols: (symbol, probability, state after it)."""
        top, total = self._top_next[state], self._continued[state]
        transitions = self._next[state].items()
        ranked = ((self._count[after], symbol == top, symbol, after) for symbol, after in transitions)
        best = heapq.nlargest(count, ranked)
        return [(symbol, occurrences / total, after) for occurrences, _, symbol, after in best if symbol != NOTHING]


def extend(automaton: CountingAutomaton, symbols: Sequence[int], start: int, stop: int) -> None:
    """Push ``symbols[start:stop]``."""
    for position in range(start, min(stop, len(symbols))):
        automaton.push(int(symbols[position]))
