"""Proposers of trees, for tests: the right branch is somewhere in them, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scripted_proposers import Oracle, Storm

from nucleate.sampling import noise
from nucleate.speculative.draft import ROOT, Draft, DraftContext, TargetOutput
from nucleate.speculative.draft_distribution import sample_without_replacement


class Grove(Oracle):
    """Knows the answers, or a share of their tokens: among siblings that lie, with branches that go on from those."""

    def draft(self, state: DraftContext, count: int) -> Draft:
        right = iter(super().draft(state, count).tokens)
        rng, tokens, parents = self.rng, [], []
        place, ends = ROOT, [ROOT]
        while len(tokens) < count:
            group = [rng.randrange(4096) for _ in range(rng.randint(0, 2))]
            at = rng.randint(0, len(group))
            group.insert(at, next(right))
            first = len(tokens)
            tokens, parents = tokens + group, parents + [place] * len(group)
            for _ in range(rng.choice((0, 0, 1, 3))):  # further branches, from anywhere
                parents.append(rng.choice([*ends, *range(first, len(tokens))]))
                tokens.append(rng.randrange(4096))
            place, ends = first + at, [*ends, first]
        return Draft(tuple(tokens[:count]), tuple(parents[:count]))


class Wild(Storm):
    """All that a proposer may not do, with trees."""

    def tree(self, draft: Draft) -> Draft:
        tree = super().tree(draft)
        if self.rng.random() < 0.5 or not tree:
            return tree
        more = [self.rng.choice((-1, 4096, 7, None)) for _ in range(3)]
        parents = (*(tree.parents or ()), *(self.rng.randrange(-1, len(tree)) for _ in more))
        return Draft((*tree.tokens, *more), parents)


class Reading(Grove):
    """Wants hidden states, which are of the toy the places and ids of tokens; each sequence is told in order.

    whole: whether none may be missing between those that were told, as some are of adaptive drafts that rested.
    late: how often some were missing, as those of tokens are that must follow: these are read together with a draft.
    """

    layers = (0, 1)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: dict[int, int] = {}
        self.whole = True
        self.late = 0

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        for key, start, ids, hidden_states_TF in readings:
            wanted = [[place, token] * 2 for place, token in enumerate(ids, start)]
            np.testing.assert_array_equal(hidden_states_TF, np.array(wanted).reshape(-1, 4))
            assert start <= self.told.get(key, start) or not self.whole
            self.told[key] = start + len(ids)

    def draft(self, state: DraftContext, count: int) -> Draft:
        missing = len(state.token_ids) - 1 - (self.told[state.key] if self.whole else self.told.get(state.key, 0))
        assert missing >= 0
        self.late += missing > 0
        return super().draft(state, count)


def pick(seed: int, step: int, number: int, stream: int) -> float:
    return float(noise.uniform(seed, step, stream, np.array([number]))[0])


def drawn_tree(before: int, count: int, seed: int, step: int, laws_VV: np.ndarray, stream: int = noise.DRAFT) -> Draft:
    """Siblings without replacement: two, then as many after one of them: which one depends on what was drawn."""
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[np.ndarray] = []
    place = ROOT
    while len(tokens) < count:
        law = laws_VV[before if place == ROOT else tokens[place]]
        wanted = min(2, count - len(tokens))
        some, theirs = sample_without_replacement(
            law, [pick(seed, step, len(tokens) + at, stream) for at in range(wanted)]
        )
        parents += [place] * len(some)
        place = len(tokens) + (len(some) > 1 and some[1] > some[0])
        tokens, laws = [*tokens, *some], [*laws, *theirs]
    return Draft(tuple(tokens), tuple(parents), tuple(laws))


def guessed_tree(before: int, count: int, laws_VV: np.ndarray) -> Draft:
    """The likeliest tokens, and after each of them the likeliest."""
    tokens = [int(token) for token in np.argsort(-laws_VV[before])[:2]]
    parents = [ROOT] * len(tokens)
    for place in range(2):
        tokens += [int(token) for token in np.argsort(-laws_VV[tokens[place]])[:2]]
        parents += [place] * 2
    return Draft(tuple(tokens[:count]), tuple(parents[:count]))


def shared_draws(before: int, count: int, seed: int, step: int, laws_VV: np.ndarray) -> Draft:
    """As heads do that do not know what was drawn before: after each token the same siblings."""
    (first, theirs), (second, others) = (
        sample_without_replacement(
            laws_VV[before - at], [pick(seed, step, at * 2 + one, noise.DRAFT) for one in range(2)]
        )
        for at in range(2)
    )
    tokens, parents, laws = (*first, *second, *second), (ROOT, ROOT, 0, 0, 1, 1), (*theirs, *others, *others)
    return Draft(tokens[:count], parents[:count], laws[:count])
