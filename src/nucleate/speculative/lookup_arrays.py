"""The arrays in which draft methods look tokens up, for kernels: the tokens of a sequence, and a suffix automaton.

The suffix automaton counts the occurrences and the most frequent continuation of each substring. It is two arrays,
which the kernels in ``suffix_kernels`` extend and search. 176 to 352 bytes per symbol.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.sampling.suffix_automaton import NOTHING, ROOT

HASH_FACTOR = secrets.randbits(63) | 1
"""A factor of the hashes of all tables: odd, and random, so that no text can be made whose hashes collide."""

INITIAL_CAPACITY = 64


def capacity_for(size: int) -> int:
    """The capacity of arrays for ``size`` tokens: a power of two."""
    return max(INITIAL_CAPACITY, 1 << (size - 1).bit_length())


class TokenBuffer:
    """A copy of the tokens of a sequence: ``array[:size]``, int64."""

    def __init__(self) -> None:
        self.size, self.array = 0, np.empty(INITIAL_CAPACITY, np.int64)

    def update(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Copy the tokens that are new, or all if the sequence is shorter than before. Returns the array.

        Raises OverflowError for a token id that is not an int64.
        """
        size = len(token_ids)
        start = self.size if self.size <= size else 0
        if size > len(self.array):
            grown = np.empty(capacity_for(size), np.int64)
            grown[:start] = self.array[:start]
            self.array = grown
        self.array[start:size] = token_ids[start:]
        self.size = size
        return self.array


LINK, LENGTH, COUNT, CONTINUED, TOP, FIRST = range(6)
"""The columns of ``states``: the state of the longest suffix that ends at more positions; the length of the longest
substring; the number of occurrences, and of those with a next symbol; the edges (rows of ``edges``, or NOTHING) of the
most frequent next symbol (ties: the latest) and of the list of all next symbols.
"""

SYMBOL, SOURCE, TARGET, NEXT = range(4)
"""The columns of ``edges``: the symbol, the states before and after it (ROOT: the row is empty), and the next edge of
the list of its source, or NOTHING.
"""

NUM_STATES, LAST, SUFFIX_STATE, SIZE = range(4)
"""The elements of ``head``: the number of states; the state of the whole text, and of its last ``depth`` symbols; and
the number of symbols.
"""


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
        """Append ``symbols[start:stop]``."""
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
