"""Suffix decoding: the most frequent continuations of repeated suffixes, in this sequence and in recent outputs.

The method is that of Oliaro, Jia, Campos and Qiao, SuffixDecoding (arXiv 2411.04975), with suffix automata instead of
suffix trees: they count the occurrences and the most frequent continuation of each substring. An automaton is arrays,
which the kernels in ``lookup_kernels`` extend and search; 176 to 352 bytes per symbol.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.sampling.suffix_automaton import NOTHING, ROOT
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer
from nucleate.speculative.ngram import TokenBuffer, capacity_for

HASH_FACTOR = secrets.randbits(63) | 1
"""A factor of the hashes of edges: odd, and random, so that no text can be made whose hashes collide."""

INDEX_CHUNK_SIZE = 4096
"""Maximum number of tokens of a sequence that one call of ``propose`` indexes, so that a long prompt does not stall the
other sequences. The latest tokens are matched against the indexed ones."""

LINK, LENGTH, COUNT, CONTINUED, TOP, FIRST = range(6)
"""The columns of ``states``: the state of the longest suffix that ends at more positions; the length of the longest
substring; the number of occurrences, and of those with a next symbol; the edges (rows of ``edges``, or NOTHING) of the
most frequent next symbol (ties: the latest) and of the list of all next symbols."""

SYMBOL, SOURCE, TARGET, NEXT = range(4)
"""The columns of ``edges``: the symbol, the states before and after it (ROOT: the row is empty), and the next edge of
the list of its source, or NOTHING."""

NUM_STATES, LAST, SUFFIX_STATE, SIZE = range(4)
"""The elements of ``head``: the number of states; the state of the whole text, and of its last ``depth`` symbols; and
the number of symbols."""


class CountingAutomaton:
    """A suffix automaton with counts. The symbol NOTHING separates texts and is never drafted.

    A state stands for all substrings that end at the same positions. n symbols have at most 2 n states and 3 n edges
    (Blumer et al. 1985). ``edges`` is a hash table with linear probing.

    depth: maximum length of the counted substrings. A symbol takes time in the number of states of the suffixes of up
    to ``depth`` symbols: a few in most texts, at most ``depth``.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.size, self._capacity = depth, 0, 0  # in symbols
        self.head = np.array([1, ROOT, ROOT, 0], np.int64)
        self.states = np.array([[NOTHING, 0, 0, 0, NOTHING, NOTHING]], np.int32)
        self.edges = np.zeros((1, 4), np.int64)

    def extend(self, symbols: NDArray[np.int64], start: int, stop: int) -> None:
        self._reserve(self.size + stop - start)
        DRAFTS.push_symbols(self.head, self.states, self.edges, self.depth, HASH_FACTOR, symbols, start, stop)
        self.size += stop - start

    def _reserve(self, size: int) -> None:
        """Make room for so many symbols in all."""
        if size <= self._capacity:
            return
        self._capacity = capacity_for(size)
        states, edges = np.zeros((2 * self._capacity + 1, 6), np.int32), np.zeros((4 * self._capacity, 4), np.int64)
        num_states = int(self.head[NUM_STATES])
        states[:num_states] = self.states[:num_states]
        DRAFTS.move_edges(states, num_states, self.edges, edges, HASH_FACTOR)
        self.states, self.edges = states, edges


MAX_CACHED_TOKENS = 1 << 16
"""Default number of cached output tokens, which take up to 12 MB."""


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
        least = {"max_suffix_length": 1, "max_cached_tokens": 0, "index_chunk_size": 1, "tree_width": 1}
        given = max_suffix_length, max_cached_tokens, index_chunk_size, tree_width
        for (name, low), value in zip(least.items(), given, strict=True):
            if value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if not max_spec_factor > 0:
            raise ValueError(f"max_spec_factor must be > 0, got {max_spec_factor}")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must be in 0..1, got {min_probability}")
        self.max_suffix_length, self.max_spec_factor = max_suffix_length, max_spec_factor
        self.min_probability, self.tree_width, self.index_chunk_size = min_probability, tree_width, index_chunk_size
        self._indices: dict[int, _SequenceIndex] = {}
        self._recent = RecentOutputs(2 * max_suffix_length, max_cached_tokens)
        self._ranked_W, self._tree_8N = np.empty(1, np.int64), np.empty((8, 0), np.int64)
        self._probabilities_N = np.empty(0)

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        if (longest := max(max_tokens, default=0)) > len(self._probabilities_N):
            self._ranked_W = np.empty(min(self.tree_width, longest + 1), np.int64)
            self._tree_8N, self._probabilities_N = np.empty((8, longest), np.int64), np.empty(longest)
        return [self._propose(context, count) for context, count in zip(contexts, max_tokens, strict=True)]

    def _propose(self, context: DraftContext, count: int) -> Draft:
        """The most likely nodes after each suffix are a tree; the draft is the best of these."""
        index, size = self._indices.get(context.key), len(context.token_ids)
        if index is None or index.automaton.size > size:
            index = self._indices[context.key] = _SequenceIndex(2 * self.max_suffix_length)
        text, own = index.tokens.update(context.token_ids), index.automaton
        own.extend(text, own.size, min(size, own.size + self.index_chunk_size))
        found = DRAFTS.draft_tree(
            own.head, own.states, own.edges, *self._recent.arrays, HASH_FACTOR, text, size, count,
            self.max_suffix_length, self.max_spec_factor, self.min_probability,
            self._ranked_W, self._tree_8N, self._probabilities_N,
        )  # fmt: skip
        if not found:
            return NO_DRAFT
        return Draft(*map(tuple, self._tree_8N[6:, :found].tolist()))

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self._indices.pop(key, None)
        self.learn(output_ids)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Add a text to the cache, like the output of a finished sequence."""
        self._recent.add(token_ids)


class _SequenceIndex:
    """The tokens of a sequence, and the automaton of those that are indexed."""

    def __init__(self, depth: int) -> None:
        self.tokens, self.automaton = TokenBuffer(), CountingAutomaton(depth)


class RecentOutputs:
    """A cache of the last ``max_symbols`` symbols of texts, in two automata.

    When the newer automaton has half of the symbols, the older one is dropped and a new one is started.
    """

    def __init__(self, depth: int, max_symbols: int) -> None:
        self._depth, self._half = depth, max_symbols // 2
        self.newer, self.older = CountingAutomaton(depth), CountingAutomaton(depth)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays of both automata, the newer one first."""
        return self.newer.states, self.newer.edges, self.older.states, self.older.edges

    def add(self, symbols: Sequence[int]) -> None:
        """Add a text; if it is too long, only its end."""
        symbols = symbols[max(0, len(symbols) - self._half + 1) :]
        if not len(symbols) or self._half < 2:
            return
        if self.newer.size + len(symbols) >= self._half:
            self.newer, self.older = CountingAutomaton(self._depth), self.newer
        text = np.full(len(symbols) + 1, NOTHING, np.int64)
        text[:-1] = symbols
        self.newer.extend(text, 0, len(text))
