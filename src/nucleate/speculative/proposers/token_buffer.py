"""The tokens of a growing sequence as an array, for the kernels of the draft methods that look tokens up."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
