"""N-gram drafts (prompt lookup): what followed the last tokens where they occurred before in the sequence.

The method is that of Saxena, Prompt Lookup Decoding (2023). Of the places where the longest n-gram was, the most recent
one is continued: a text that is being edited repeats its latest version.
"""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.speculative.draft import PACE, Draft, DraftContext, Proposer


class NgramProposer(Proposer):
    """Continues the most recent n-gram that equals the last n tokens, for the highest n of ``shortest`` to ``longest``.

    A continuation that comes to the end of the sequence goes on with itself, so that a period is repeated. A token
    costs the same however long the sequence is, in time and in memory. pace: see ``PACE``. Raises ValueError.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, pace: int = 4 * PACE) -> None:
        if not 1 <= shortest <= longest or pace < 1:
            message = f"1 <= shortest <= longest and pace >= 1 must hold, got {shortest}, {longest} and {pace}"
            raise ValueError(message)
        self.longest, self.shortest, self.pace = longest, shortest, pace
        self._indices: dict[int, _Index] = {}

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        return [self._propose(state, k) for state, k in zip(states, counts, strict=True)]

    def _propose(self, state: DraftContext, k: int) -> Draft:
        index, ids = self._indices.get(state.key), state.token_ids
        if index is None or index.read > len(ids):
            index = self._indices[state.key] = _Index(range(self.shortest, self.longest + 1))
        index.read_on(ids, min(len(ids), index.read + self.pace))
        start = index.find(ids)
        if start is None:
            return Draft()
        tokens: list[int] = []
        for place in range(start, start + k):
            tokens.append(int(ids[place]) if place < len(ids) else tokens[place - len(ids)])
        return Draft(tuple(tokens))

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._indices.pop(key, None)


class _Index:
    """Where the n-grams of a sequence were continued last."""

    def __init__(self, sizes: range) -> None:
        self.read = 0  # tokens
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}

    def read_on(self, ids: Sequence[int], stop: int) -> None:
        """Up to ``stop``, exclusive: each token is what continues the n-grams before it."""
        after, sizes = self._after, self._sizes
        for place in range(self.read, stop):
            for size in sizes:
                if size > place:
                    break
                after[tuple(ids[place - size : place])] = place
        self.read = stop

    def find(self, ids: Sequence[int]) -> int | None:
        """The place after the last of the longest n-grams that equals the end."""
        found = None
        for size in self._sizes:  # where a shorter one was never continued, no longer one was
            place = self._after.get(tuple(ids[-size:])) if size <= len(ids) else None
            if place is None:
                break
            found = place
        return found
