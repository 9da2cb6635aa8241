"""Suffix and n-gram drafts in plain Python: the reference of the compiled draft methods."""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nucleate.sampling.suffix_automaton import NOTHING, ROOT, SuffixAutomaton
from nucleate.speculative.draft import Draft, DraftContext
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import SuffixProposer


class PlainAutomaton(SuffixAutomaton):
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

    def _add(self, follows: dict[int, int], link: int, length: int) -> int:
        self._count.append(0)
        self._continued.append(0)
        self._top_next.append(NOTHING)
        return super()._add(follows, link, length)

    def _after(self, state: int, symbol: int) -> int:
        old = self._next[state][symbol]
        after = super()._after(state, symbol)
        if after != old:
            for values in (self._count, self._continued, self._top_next):
                values[after] = values[old]
        return after

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


def extend(automaton: PlainAutomaton, symbols: Sequence[int], start: int, stop: int) -> None:
    """Push ``symbols[start:stop]``."""
    for position in range(start, min(stop, len(symbols))):
        automaton.push(int(symbols[position]))


class Node(NamedTuple):
    """A node of a tree."""

    token: int
    parent: int
    probability: float


class PlainSuffixProposer(SuffixProposer):
    """The reference of ``SuffixProposer``."""

    def __init__(
        self,
        max_suffix_length: int = 16,
        max_spec_factor: float = 1.0,
        min_probability: float = 0.1,
        max_cached_tokens: int = 1 << 16,
        **options: int,
    ) -> None:
        super().__init__(max_suffix_length, max_spec_factor, min_probability, max_cached_tokens, **options)
        self._automata: dict[int, PlainAutomaton] = {}
        self._recent = PlainRecentOutputs(2 * max_suffix_length, max_cached_tokens)

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        return [self._propose(context, count) for context, count in zip(contexts, max_tokens, strict=True)]

    def _propose(self, context: DraftContext, count: int) -> Draft:
        ids, own = context.token_ids, self._automata.get(context.key)
        if own is None or own.size > len(ids):
            own = self._automata[context.key] = PlainAutomaton(2 * self.max_suffix_length)
        extend(own, ids, own.size, own.size + self.index_chunk_size)
        suffix = [int(token) for token in ids[max(0, len(ids) - self.max_suffix_length) :]]
        if self.tree_width > 1:
            return self._propose_tree(own, suffix, count)
        best: list[int] = []
        best_score = 0.0
        for automaton in (own, *self._recent.automata):
            for state, length in automaton.matches(suffix):
                limit = min(count, self.max_suffix_length, int(self.max_spec_factor * length))
                tokens, score = automaton.continuation(state, limit, self.min_probability)
                if score > best_score:
                    best, best_score = tokens, score
        return Draft(tuple(best))

    def _propose_tree(self, own: PlainAutomaton, suffix: list[int], count: int) -> Draft:
        """Build the tree of the most likely nodes after each suffix, and return the best tree."""
        best: list[Node] = []
        best_score = 0.0
        for automaton in (own, *self._recent.automata):
            for state, length in automaton.matches(suffix):
                limit = min(self.max_suffix_length, int(self.max_spec_factor * length))
                nodes = self._best_first(automaton, limit, state, count)
                score = functools.reduce(operator.add, [node.probability for node in nodes], 0.0)  # in order
                if score > best_score:
                    best, best_score = nodes, score
        return Draft(tuple(node.token for node in best), tuple(node.parent for node in best))

    def _best_first(self, automaton: PlainAutomaton, max_depth: int, state: int, count: int) -> list[Node]:
        """The most likely nodes; of equally likely ones, the first one found."""
        nodes: list[Node] = []
        candidates: list[tuple[Node, int, int]] = []  # with their states and depths
        probability, depth = 1.0, 0
        while len(nodes) < count:
            for token, chance, after in automaton.next_symbols(state, self.tree_width) if depth < max_depth else ():
                if probability * chance >= self.min_probability:
                    candidates.append((Node(token, len(nodes) - 1, probability * chance), after, depth + 1))
            if not candidates:
                break
            best = max(candidates, key=lambda candidate: candidate[0].probability)
            candidates.remove(best)
            node, state, depth = best
            probability = node.probability
            nodes.append(node)
        return nodes

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._automata.pop(key, None)
        self.learn(output_ids)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Add a text to the cache, like the output of a finished sequence."""
        self._recent.add(token_ids)


class PlainRecentOutputs:
    """A cache of the last ``max_symbols`` symbols of texts, in two automata.

    When the newer automaton has half of the symbols, the older one is dropped and a new one is started.
    """

    def __init__(self, depth: int, max_symbols: int) -> None:
        self._depth, self._half = depth, max_symbols // 2
        self.automata: tuple[PlainAutomaton, ...] = ()  #: the newer one first

    def add(self, symbols: Sequence[int]) -> None:
        """Add a text; if it is too long, only its end."""
        symbols = symbols[max(0, len(symbols) - self._half + 1) :]
        if not len(symbols) or self._half < 2:
            return
        if not self.automata or self.automata[0].size + len(symbols) >= self._half:
            self.automata = PlainAutomaton(self._depth), *self.automata[:1]
        extend(self.automata[0], symbols, 0, len(symbols))
        self.automata[0].push(NOTHING)


class PlainNgramProposer(NgramProposer):
    """The reference of ``NgramProposer``."""

    def _propose(self, context: DraftContext, count: int) -> Draft:
        ids = list(context.token_ids)
        for n in range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1):
            for after in range(len(ids) - 1, n - 1, -1):
                if ids[after - n : after] == ids[len(ids) - n :]:
                    text = list(ids)
                    for index in range(after, after + count):
                        text.append(text[index])
                    return Draft(tuple(text[len(ids) :]))
        return Draft()
