"""Suffix decoding: the most frequent continuations of repeated suffixes, in this sequence and in recent outputs.

The method is that of Oliaro, Jia, Campos and Qiao, SuffixDecoding (arXiv 2411.04975), with suffix automata instead of
suffix trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nucleate.sampling.suffix_automaton import NOTHING
from nucleate.speculative.draft import INDEX_CHUNK_SIZE, Draft, DraftContext, Proposer
from nucleate.speculative.proposers.counting_automaton import CountingAutomaton, extend
from nucleate.speculative.tree import Candidate, Node, best_first, draft_from_nodes

MAX_CACHED_TOKENS = 1 << 16
"""Default number of cached output tokens, which take up to 30 MB."""


class SuffixProposer(Proposer):
    """Suffix decoding. The length of a draft depends on its estimated probability.

    Every suffix of the last ``max_suffix_length`` tokens that occurred before is extended by its most frequent
    continuation: for at most ``max_spec_factor`` times the length of the suffix, and while the probability of the
    continuation, estimated from the counts, is at least ``min_probability``. The draft is the continuation with the
    highest expected number of accepted tokens. With ``tree_width`` > 1, it is a tree of the most likely tokens with at
    most ``tree_width`` children per node.

    Suffixes are looked up in the sequence itself and in the last ``max_cached_tokens`` output tokens of finished
    sequences (0: no token of a sequence is kept after it has finished). index_chunk_size: see ``INDEX_CHUNK_SIZE``.
    Raises ValueError.
    """

    def __init__(
        self,
        max_suffix_length: int = 16,
        max_spec_factor: float = 1.0,
        min_probability: float = 0.1,
        max_cached_tokens: int = MAX_CACHED_TOKENS,
        index_chunk_size: int = INDEX_CHUNK_SIZE,
        tree_width: int = 1,
    ) -> None:
        for name, value, low in (
            ("max_suffix_length", max_suffix_length, 1),
            ("max_cached_tokens", max_cached_tokens, 0),
            ("index_chunk_size", index_chunk_size, 1),
            ("tree_width", tree_width, 1),
        ):
            if value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if not max_spec_factor > 0:
            raise ValueError(f"max_spec_factor must be > 0, got {max_spec_factor}")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must be in 0..1, got {min_probability}")
        self.max_suffix_length, self.max_spec_factor = max_suffix_length, max_spec_factor
        self.min_probability, self.tree_width, self.index_chunk_size = min_probability, tree_width, index_chunk_size
        self._automata: dict[int, CountingAutomaton] = {}
        self._recent = RecentOutputs(2 * max_suffix_length, max_cached_tokens)

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        return [self._propose(context, count) for context, count in zip(contexts, max_tokens, strict=True)]

    def _propose(self, context: DraftContext, count: int) -> Draft:
        ids, own = context.token_ids, self._automata.get(context.key)
        if own is None or own.size > len(ids):
            own = self._automata[context.key] = CountingAutomaton(2 * self.max_suffix_length)
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

    def _propose_tree(self, own: CountingAutomaton, suffix: list[int], count: int) -> Draft:
        """Build the tree of the most likely nodes after each suffix, and return the best tree."""
        best: list[Node] = []
        best_score = 0.0
        for automaton in (own, *self._recent.automata):
            for state, length in automaton.matches(suffix):
                limit = min(self.max_suffix_length, int(self.max_spec_factor * length))
                nodes = best_first(partial(self._candidates, automaton, limit), state, count, self.min_probability)
                score = sum(node.probability for node in nodes)
                if score > best_score:
                    best, best_score = nodes, score
        return draft_from_nodes(best)

    def _candidates(self, automaton: CountingAutomaton, max_depth: int, state: int, depth: int) -> list[Candidate]:
        if depth >= max_depth:
            return []
        return [Candidate(*candidate) for candidate in automaton.next_symbols(state, self.tree_width)]

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._automata.pop(key, None)
        self.learn(output_ids)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Add a text to the cache, like the output of a finished sequence."""
        self._recent.add(token_ids)


class RecentOutputs:
    """A cache of the last ``max_symbols`` symbols of texts, in two automata.

    When the newer automaton has half of the symbols, the older one is dropped and a new one is started.
    """

    def __init__(self, depth: int, max_symbols: int) -> None:
        self._depth, self._half = depth, max_symbols // 2
        self.automata: tuple[CountingAutomaton, ...] = ()  #: the newer one first

    def add(self, symbols: Sequence[int]) -> None:
        """Add a text; if it is too long, only its end."""
        symbols = symbols[max(0, len(symbols) - self._half + 1) :]
        if not len(symbols) or self._half < 2:
            return
        if not self.automata or self.automata[0].size + len(symbols) >= self._half:
            self.automata = CountingAutomaton(self._depth), *self.automata[:1]
        extend(self.automata[0], symbols, 0, len(symbols))
        self.automata[0].push(NOTHING)
