"""Proposers for tests: correct, wrong and faulty ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nucleate.speculative.draft import Draft, DraftContext, TargetOutput

Outputs = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""The output tokens by (prompt, seed)."""

NONSENSE: list[Any] = [-1, 4096, 10**9, 5, "5", None, 5.0]
"""Invalid and valid draft tokens."""


class NoDrafts:
    """A proposer without drafts; checks the keys it is called with."""

    layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        self.keys |= {state.key for state in states}
        return [self.draft(state, count) for state, count in zip(states, counts, strict=True)]

    def draft(self, state: DraftContext, count: int) -> Draft:
        return Draft()

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        raise AssertionError("no hidden states were requested")

    def accepted(self, key: int, count: int) -> None:
        assert key in self.keys

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self.keys.discard(key)


class Oracle(NoDrafts):
    """Drafts each token of the known outputs with probability ``share``, else a random one."""

    def __init__(self, outputs: Outputs, share: float = 1.0, rng: random.Random | None = None) -> None:
        super().__init__()
        self.outputs, self.share, self.rng = outputs, share, rng or random.Random(1)

    def draft(self, state: DraftContext, count: int) -> Draft:
        ids = [int(token) for token in state.token_ids]
        known = self.outputs.get((tuple(ids[: state.num_prompt_tokens]), state.seed), ())
        right = list(known[state.position : state.position + count])
        right += [self.rng.randrange(4096) for _ in range(count - len(right))]
        return Draft(tuple(x if self.rng.random() < self.share else self.rng.randrange(4096) for x in right))


class FaultyProposer(Oracle):
    """Errors, invalid drafts, trees and correct drafts. best: returns the most likely next token of a prefix."""

    def __init__(
        self,
        outputs: Outputs,
        share: float = 1.0,
        rng: random.Random | None = None,
        best: Callable[[tuple[int, ...]], int] | None = None,
    ) -> None:
        super().__init__(outputs, share, rng)
        self.best = best

    def draft(self, state: DraftContext, count: int) -> Draft:
        """Draft the most likely tokens where the output is unknown."""
        if self.best is None:
            return super().draft(state, count)
        ids = list(state.token_ids)
        for _ in range(count):
            ids.append(self.best(tuple(ids)) if self.rng.random() < self.share else self.rng.randrange(4096))
        return Draft(tuple(ids[len(ids) - count :]))

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        what, rng = self.rng.random(), self.rng
        if what < 0.05:
            raise RuntimeError("a proposer\nthat fails")
        if what < 0.08:
            return [Draft((1,))] * (len(states) + 1)
        if what < 0.1:
            return [None] * len(states)  # type: ignore[list-item]
        drafts = super().propose(states, counts)
        for index, draft in enumerate(drafts):
            what = rng.random()
            if what < 0.1:
                drafts[index] = Draft(tuple(rng.choice(NONSENSE) for _ in range(rng.randint(1, 5))))
            elif what < 0.2:
                drafts[index] = Draft((*draft.tokens, *(rng.randrange(4096) for _ in range(30))))
            elif what < 0.3:
                drafts[index] = self.tree(draft)
            elif what < 0.4:
                drafts[index] = Draft()
        return drafts

    def tree(self, draft: Draft) -> Draft:
        """The draft with random siblings."""
        tokens: list[int] = []
        parents: list[int] = []
        index = -1
        for token in draft.tokens:
            more = [self.rng.randrange(4096) for _ in range(self.rng.randint(0, 2))]
            first = len(tokens)
            tokens += [token, *more]
            parents += [index] * (1 + len(more))
            index = first
        return Draft(tuple(tokens), tuple(parents))

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        if self.rng.random() < 0.02:
            raise ValueError

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        super().forget(key, output_ids)
        if self.rng.random() < 0.02:
            raise ValueError
