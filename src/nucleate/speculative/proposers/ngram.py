"""N-gram drafts (prompt lookup): what followed the last tokens where they occurred before in the sequence.

The method is that of Saxena, Prompt Lookup Decoding (2023). Of the places where the longest n-gram was, the most recent
one is continued: a text that is being edited repeats its latest version.
"""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.speculative.draft import INDEX_CHUNK_SIZE, Draft, DraftContext, Proposer


class NgramProposer(Proposer):
    """Continues the most recent n-gram that equals the last n tokens, for the highest n of ``shortest`` to ``longest``.

    A continuation that comes to the end of the sequence goes on with itself, so that a period is repeated. A token
    costs the same however long the sequence is, in time and in memory. pace: see ``PACE``. Raises ValueError.
    """

    def __init__(self, prompt_lookup_max: int = 4, prompt_lookup_min: int = 2, index_chunk_size: int = 4 * INDEX_CHUNK_SIZE) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max or index_chunk_size < 1:
            message = f"1 <= shortest <= longest and pace >= 1 must hold, got {prompt_lookup_min}, {prompt_lookup_max} and {index_chunk_size}"
            raise ValueError(message)
        self.prompt_lookup_max, self.prompt_lookup_min, self.index_chunk_size = prompt_lookup_max, prompt_lookup_min, index_chunk_size
        self._indices: dict[int, _NgramIndex] = {}

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        return [self._propose(context, k) for context, k in zip(contexts, max_tokens, strict=True)]

    def _propose(self, context: DraftContext, k: int) -> Draft:
        index, ids = self._indices.get(context.key), context.token_ids
        if index is None or index.num_indexed > len(ids):
            index = self._indices[context.key] = _NgramIndex(range(self.prompt_lookup_min, self.prompt_lookup_max + 1))
        index.index_tokens(ids, min(len(ids), index.num_indexed + self.index_chunk_size))
        start = index.find_continuation(ids)
        if start is None:
            return Draft()
        tokens: list[int] = []
        for position in range(start, start + k):
            tokens.append(int(ids[position]) if position < len(ids) else tokens[position - len(ids)])
        return Draft(tuple(tokens))

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._indices.pop(key, None)


class _NgramIndex:
    """Where the n-grams of a sequence were continued last."""

    def __init__(self, sizes: range) -> None:
        self.num_indexed = 0  # tokens
        self._sizes = sizes
        self._continuations: dict[tuple[int, ...], int] = {}

    def index_tokens(self, ids: Sequence[int], stop: int) -> None:
        """Up to ``stop``, exclusive: each token is what continues the n-grams before it."""
        continuations, sizes = self._continuations, self._sizes
        for position in range(self.num_indexed, stop):
            for size in sizes:
                if size > position:
                    break
                continuations[tuple(ids[position - size : position])] = position
        self.num_indexed = stop

    def find_continuation(self, ids: Sequence[int]) -> int | None:
        """The place after the last of the longest n-grams that equals the end."""
        found = None
        for size in self._sizes:  # where a shorter one was never continued, no longer one was
            position = self._continuations.get(tuple(ids[-size:])) if size <= len(ids) else None
            if position is None:
                break
            found = position
        return found
