"""N-gram drafts (prompt lookup decoding, Saxena 2023): the continuation of the last n tokens earlier in the sequence.

If the longest matching n-gram occurs several times, the most recent occurrence is continued: a text that is being
edited repeats its latest version.
"""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.speculative.draft import INDEX_CHUNK_SIZE, Draft, DraftContext, Proposer


class NgramProposer(Proposer):
    """Continues the most recent n-gram that equals the last n tokens.

    n is the highest of ``prompt_lookup_min`` to ``prompt_lookup_max`` with a match. A continuation that reaches the end
    of the sequence repeats itself. Time and memory per token do not depend on the length of the sequence.
    index_chunk_size: see ``INDEX_CHUNK_SIZE``. Raises ValueError.
    """

    def __init__(
        self,
        prompt_lookup_max: int = 4,
        prompt_lookup_min: int = 2,
        index_chunk_size: int = 4 * INDEX_CHUNK_SIZE,
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            message = "prompt_lookup_min must be in 1..prompt_lookup_max, got"
            raise ValueError(f"{message} {prompt_lookup_min} with prompt_lookup_max = {prompt_lookup_max}")
        if index_chunk_size < 1:
            raise ValueError(f"index_chunk_size must be >= 1, got {index_chunk_size}")
        self.prompt_lookup_max, self.prompt_lookup_min = prompt_lookup_max, prompt_lookup_min
        self.index_chunk_size = index_chunk_size
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
        """See ``Proposer.forget``."""
        self._indices.pop(key, None)


class _NgramIndex:
    """Maps each n-gram of a sequence to the position after its last occurrence."""

    def __init__(self, sizes: range) -> None:
        self.num_indexed = 0  # tokens
        self._sizes = sizes
        self._continuations: dict[tuple[int, ...], int] = {}

    def index_tokens(self, ids: Sequence[int], stop: int) -> None:
        """Index the n-grams before each of the tokens up to ``stop`` (exclusive)."""
        continuations, sizes = self._continuations, self._sizes
        for position in range(self.num_indexed, stop):
            for size in sizes:
                if size > position:
                    break
                continuations[tuple(ids[position - size : position])] = position
        self.num_indexed = stop

    def find_continuation(self, ids: Sequence[int]) -> int | None:
        """The position after the last occurrence of the longest n-gram that ends the sequence; None without a match."""
        found = None
        for size in self._sizes:  # without a match of a shorter n-gram, there is none of a longer one
            position = self._continuations.get(tuple(ids[-size:])) if size <= len(ids) else None
            if position is None:
                break
            found = position
        return found
