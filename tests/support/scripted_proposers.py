"""Proposers for tests: those that know what comes, those that lie, and those that break every promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nucleate.speculative.draft import Draft, DraftContext, TargetOutput

Answers = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""By the prompt and the seed of an answer, the tokens that it will have."""

NONSENSE: list[Any] = [-1, 4096, 10**9, 5, "5", None, 5.0]
"""What is said as a token."""


class Silent:
    """The least that a proposer must have."""

    layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        self.keys |= {state.key for state in states}
        return [self.draft(state, count) for state, count in zip(states, counts, strict=True)]

    def draft(self, state: DraftContext, count: int) -> Draft:
        return Draft()

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        raise AssertionError("nobody asked for features")

    def accepted(self, key: int, count: int) -> None:
        assert key in self.keys

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self.keys.discard(key)


class Oracle(Silent):
    """Knows the answers, and says each token with a chance; or else another one."""

    def __init__(self, answers: Answers, share: float = 1.0, rng: random.Random | None = None) -> None:
        super().__init__()
        self.answers, self.share, self.rng = answers, share, rng or random.Random(1)

    def draft(self, state: DraftContext, count: int) -> Draft:
        ids = [int(token) for token in state.token_ids]
        known = self.answers.get((tuple(ids[: state.num_prompt_tokens]), state.seed), ())
        right = list(known[state.position : state.position + count])
        right += [self.rng.randrange(4096) for _ in range(count - len(right))]
        return Draft(tuple(x if self.rng.random() < self.share else self.rng.randrange(4096) for x in right))


class Storm(Oracle):
    """All that a proposer may not do, and all that it may. best: the likeliest token after some others."""

    def __init__(
        self,
        answers: Answers,
        share: float = 1.0,
        rng: random.Random | None = None,
        best: Callable[[tuple[int, ...]], int] | None = None,
    ) -> None:
        super().__init__(answers, share, rng)
        self.best = best

    def draft(self, state: DraftContext, count: int) -> Draft:
        """What is likely, where the answer is not known."""
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
        for place, draft in enumerate(drafts):
            what = rng.random()
            if what < 0.1:
                drafts[place] = Draft(tuple(rng.choice(NONSENSE) for _ in range(rng.randint(1, 5))))
            elif what < 0.2:
                drafts[place] = Draft((*draft.tokens, *(rng.randrange(4096) for _ in range(30))))
            elif what < 0.3:
                drafts[place] = self.tree(draft)
            elif what < 0.4:
                drafts[place] = Draft()
        return drafts

    def tree(self, draft: Draft) -> Draft:
        """The draft, and siblings of its tokens."""
        tokens: list[int] = []
        parents: list[int] = []
        place = -1
        for token in draft.tokens:
            more = [self.rng.randrange(4096) for _ in range(self.rng.randint(0, 2))]
            first = len(tokens)
            tokens += [token, *more]
            parents += [place] * (1 + len(more))
            place = first
        return Draft(tuple(tokens), tuple(parents))

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        if self.rng.random() < 0.02:
            raise ValueError

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        super().forget(key, output_ids)
        if self.rng.random() < 0.02:
            raise ValueError
