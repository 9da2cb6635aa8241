"""Suffix decoding: the most frequent continuations of repeated suffixes, in this sequence and in recent outputs.

The method is that of Oliaro, Jia, Campos and Qiao, SuffixDecoding (arXiv 2411.04975), with automata in place of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nucleate.sampling.suffix_automaton import NOTHING
from nucleate.speculative.draft import PACE, Draft, DraftContext, Proposer
from nucleate.speculative.proposers.counting_automaton import CountingAutomaton, extend
from nucleate.speculative.tree import Node, Offer, best_first, draft_of

REMEMBERED = 1 << 16
"""Default number of remembered output tokens: some 30 MB."""


class SuffixProposer(Proposer):
    """Drafts whose length depends on their probability.

    Each suffix of the last ``longest`` tokens that was there before is continued by what followed it most often, for at
    most ``factor`` times its length, while the chance of the whole is at least ``least``: the product of how often each
    token followed, of all times that something did. The continuation with the highest sum of chances is the draft.
    With ``tree_width`` > 1, the draft is the tree of the likeliest tokens, with at most that many children per token.
    Suffixes are looked for in the sequence itself, and in the last ``remembered`` tokens that ``forget`` or ``learn``
    was given (0: none, so that nothing of a sequence outlives it).

    pace: see ``PACE``. Raises ValueError.
    """

    def __init__(
        self,
        longest: int = 16,
        factor: float = 1.0,
        least: float = 0.1,
        remembered: int = REMEMBERED,
        pace: int = PACE,
        tree_width: int = 1,
    ) -> None:
        if longest < 1 or not factor > 0 or not 0 <= least <= 1 or remembered < 0 or pace < 1:
            message = "longest and pace must be >= 1, factor > 0, least in 0..1 and remembered >= 0, got "
            raise ValueError(message + f"{longest}, {pace}, {factor}, {least} and {remembered}")
        if tree_width < 1:
            raise ValueError(f"tree_width must be >= 1, got {tree_width}")
        self.longest, self.factor, self.least, self.pace, self.tree_width = longest, factor, least, pace, tree_width
        self._own: dict[int, CountingAutomaton] = {}
        self._past = Generations(2 * longest, remembered)

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        return [self._propose(state, k) for state, k in zip(states, counts, strict=True)]

    def _propose(self, state: DraftContext, k: int) -> Draft:
        ids, own = state.token_ids, self._own.get(state.key)
        if own is None or own.size > len(ids):
            own = self._own[state.key] = CountingAutomaton(2 * self.longest)
        extend(own, ids, own.size, own.size + self.pace)
        end = [int(token) for token in ids[max(0, len(ids) - self.longest) :]]
        if self.tree_width > 1:
            return self._tree(own, end, k)
        best: list[int] = []
        best_score = 0.0
        for automaton in (own, *self._past.automata):
            for place, length in automaton.matches(end):
                most = min(k, self.longest, int(self.factor * length))
                tokens, score = automaton.continuation(place, most, self.least)
                if score > best_score:
                    best, best_score = tokens, score
        return Draft(tuple(best))

    def _tree(self, own: CountingAutomaton, end: list[int], k: int) -> Draft:
        """The same of trees: the likeliest nodes after each suffix, and of these trees the best."""
        best: list[Node] = []
        best_score = 0.0
        for automaton in (own, *self._past.automata):
            for place, length in automaton.matches(end):
                most = min(self.longest, int(self.factor * length))
                nodes = best_first(partial(self._offers, automaton, most), place, k, self.least)
                score = sum(node.probability for node in nodes)
                if score > best_score:
                    best, best_score = nodes, score
        return draft_of(best)

    def _offers(self, automaton: CountingAutomaton, most: int, state: int, depth: int) -> list[Offer]:
        return [] if depth >= most else [Offer(*found) for found in automaton.followers(state, self.tree_width)]

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._own.pop(key, None)
        self.learn(output_ids)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Remember a text, like the output of a finished sequence."""
        self._past.add(token_ids)


class Generations:
    """The latest of many texts, in two automata: when the younger has half of the ``most`` symbols, the older goes."""

    def __init__(self, depth: int, most: int) -> None:
        self._depth, self._half = depth, most // 2
        self.automata: tuple[CountingAutomaton, ...] = ()  #: the younger first

    def add(self, symbols: Sequence[int]) -> None:
        """Remember a text; of one that is too long its end."""
        symbols = symbols[max(0, len(symbols) - self._half + 1) :]
        if not len(symbols) or self._half < 2:
            return
        if not self.automata or self.automata[0].size + len(symbols) >= self._half:
            self.automata = CountingAutomaton(self._depth), *self.automata[:1]
        extend(self.automata[0], symbols, 0, len(symbols))
        self.automata[0].push(NOTHING)
