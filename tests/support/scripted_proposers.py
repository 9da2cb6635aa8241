"""Proposers for tests: correct, wrong and faulty ones, of one branch or of trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nucleate.sampling import noise
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer, TargetOutput, sample_without_replacement

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
        self.best, self.failed = best, False

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
        if what < 0.05 or not self.failed:  # the first call, too
            self.failed = True
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


def draft_of(proposer: Proposer, state: DraftContext, count: int) -> Draft:
    """The draft for a single sequence."""
    [draft] = proposer.propose([state], [count])
    return draft


class TreeOracle(Oracle):
    """Drafts the known outputs among wrong siblings, with branches that continue from those."""

    def draft(self, state: DraftContext, count: int) -> Draft:
        right = iter(super().draft(state, count).tokens)
        rng, tokens, parents = self.rng, [], []
        node, ends = ROOT, [ROOT]
        while len(tokens) < count:
            group = [rng.randrange(4096) for _ in range(rng.randint(0, 2))]
            at = rng.randint(0, len(group))
            group.insert(at, next(right))
            first = len(tokens)
            tokens, parents = tokens + group, parents + [node] * len(group)
            for _ in range(rng.choice((0, 0, 1, 3))):  # more branches from any node
                parents.append(rng.choice([*ends, *range(first, len(tokens))]))
                tokens.append(rng.randrange(4096))
            node, ends = first + at, [*ends, first]
        return Draft(tuple(tokens[:count]), tuple(parents[:count]))


class FaultyTrees(FaultyProposer):
    """Faulty drafts, also as trees."""

    def tree(self, draft: Draft) -> Draft:
        tree = super().tree(draft)
        if self.rng.random() < 0.5 or not tree:
            return tree
        more = [self.rng.choice((-1, 4096, 7, None)) for _ in range(3)]
        parents = (*tree.parent_indices(), *(self.rng.randrange(-1, len(tree)) for _ in more))
        return Draft((*tree.tokens, *more), parents)


class HiddenStateOracle(TreeOracle):
    """Checks its hidden states, which for the toy are the positions and ids of tokens.

    complete: whether they must have no gaps; paused adaptive drafts leave gaps. late: how often the last ones were
    missing, as for forced tokens, which are computed together with a draft.
    """

    layers = (0, 1)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.observed: dict[int, int] = {}
        self.complete = True
        self.late = 0

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        for key, start, ids, hidden_states_TF in readings:
            expected = [[position, token] * 2 for position, token in enumerate(ids, start)]
            np.testing.assert_array_equal(hidden_states_TF, np.array(expected).reshape(-1, 4))
            assert start <= self.observed.get(key, start) or not self.complete
            self.observed[key] = start + len(ids)

    def draft(self, state: DraftContext, count: int) -> Draft:
        missing = (
            len(state.token_ids) - 1 - (self.observed[state.key] if self.complete else self.observed.get(state.key, 0))
        )
        assert missing >= 0
        self.late += missing > 0
        return super().draft(state, count)


def pick(seed: int, step: int, number: int, stream: int) -> float:
    return float(noise.uniform(seed, step, stream, np.array([number]))[0])


def sampled_tree(
    before: int, count: int, seed: int, step: int, distributions_VV: np.ndarray, stream: int = noise.DRAFT
) -> Draft:
    """Siblings sampled without replacement: two, then two after one of them, which depends on the sampled tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[np.ndarray] = []
    node = ROOT
    while len(tokens) < count:
        distribution = distributions_VV[before if node == ROOT else tokens[node]]
        num_siblings = min(2, count - len(tokens))
        some, theirs = sample_without_replacement(
            distribution, [pick(seed, step, len(tokens) + at, stream) for at in range(num_siblings)]
        )
        parents += [node] * len(some)
        node = len(tokens) + (len(some) > 1 and some[1] > some[0])
        tokens, distributions = [*tokens, *some], [*distributions, *theirs]
    return Draft(tuple(tokens), tuple(parents), tuple(distributions))


def most_likely_tree(before: int, count: int, distributions_VV: np.ndarray) -> Draft:
    """The most likely tokens, and the most likely ones after each of them."""
    tokens = [int(token) for token in np.argsort(-distributions_VV[before])[:2]]
    parents = [ROOT] * len(tokens)
    for node in range(2):
        tokens += [int(token) for token in np.argsort(-distributions_VV[tokens[node]])[:2]]
        parents += [node] * 2
    return Draft(tuple(tokens[:count]), tuple(parents[:count]))


def shared_siblings(before: int, count: int, seed: int, step: int, distributions_VV: np.ndarray) -> Draft:
    """The same siblings after each token, as from heads that do not see the previous draft token."""
    (first, theirs), (second, others) = (
        sample_without_replacement(
            distributions_VV[before - at], [pick(seed, step, at * 2 + one, noise.DRAFT) for one in range(2)]
        )
        for at in range(2)
    )
    tokens, parents, distributions = (*first, *second, *second), (ROOT, ROOT, 0, 0, 1, 1), (*theirs, *others, *others)
    return Draft(tokens[:count], parents[:count], distributions[:count])
