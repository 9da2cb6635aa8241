"""N-gram drafts (prompt lookup decoding, Saxena 2023): the continuation of the last n tokens earlier in the sequence.

If the longest matching n-gram occurs several times, the most recent occurrence is continued: a text that is being
edited repeats its latest version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer

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


class NgramProposer(Proposer):
    """Continues the most recent n-gram that equals the last n tokens.

    n is the highest of ``prompt_lookup_min`` to ``prompt_lookup_max`` with a match. A continuation that reaches the end
    of the sequence repeats itself. Raises ValueError.
    """

    def __init__(self, prompt_lookup_max: int = 4, prompt_lookup_min: int = 2) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            message = "prompt_lookup_min must be in 1..prompt_lookup_max, got"
            raise ValueError(f"{message} {prompt_lookup_min} with prompt_lookup_max = {prompt_lookup_max}")
        self.prompt_lookup_max, self.prompt_lookup_min = prompt_lookup_max, prompt_lookup_min
        self._tokens: dict[int, TokenBuffer] = {}
        self._out = np.empty(0, np.int64)

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        if (longest := max(max_tokens, default=0)) > len(self._out):
            self._out = np.empty(longest, np.int64)
        return [self._propose(context, count) for context, count in zip(contexts, max_tokens, strict=True)]

    def _propose(self, context: DraftContext, count: int) -> Draft:
        tokens = self._tokens.get(context.key)
        if tokens is None:
            tokens = self._tokens[context.key] = TokenBuffer()
        text = tokens.update(context.token_ids)
        found = DRAFTS.draft_ngram(self.prompt_lookup_min, self.prompt_lookup_max, text, tokens.size, count, self._out)
        return Draft(tuple(self._out[:found].tolist())) if found else NO_DRAFT

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self._tokens.pop(key, None)
