"""How a Draw selects a token among the survivors, in the reference backend: with all numbers that decide it.

Does not depend on the other stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling import noise
from nucleate.sampling.backends.survivors import Floats, Ids, Survivors, statistics
from nucleate.sampling.stage import Draw


class Contest(NamedTuple):
    """Candidates, tokens or groups of tokens: the highest total is selected; among equal ones, the lowest id."""

    ids_N: Ids
    x_N: Floats  #: scores, relative to that of the most likely token
    total_N: Floats  #: ``Draw.score`` of these, with noise unless the draw has none

    @property
    def winner(self) -> int:
        """The id that is selected."""
        return int(self.ids_N[self.total_N == self.total_N.max()].min())

    def total_of(self, one: int) -> float:
        """The total of a candidate."""
        return float(self.total_N[self.ids_N == one][0])


class Intervals(NamedTuple):
    """Tokens in rank order on a line: the last one whose interval begins before the target is selected."""

    ids_N: Ids
    weight_N: Floats  #: length of a token's interval
    before_N: Floats  #: where it begins: the sum of the weights before it
    target: float

    @property
    def winner(self) -> int:
        """The id that is selected."""
        return int(self.ids_N[np.flatnonzero(self.before_N < self.target)[-1]])


class Selection(NamedTuple):
    """The selection of a token. ``groups`` only with ``uniforms`` "each"; ``tokens`` are those of the winning group."""

    token: int
    tokens: Contest | Intervals
    groups: Contest | None = None


def select(stage: Any, kept: Survivors, seed: int, step: int) -> Selection:
    """Select a token among the survivors. stage: a Draw. seed, step: of its noise, see ``Draw.noise_key``."""
    if not isinstance(stage, Draw):
        raise TypeError(f"the last stage of a pipeline must be a Draw to sample, got {stage!r}")
    ids_N, x_N = kept.ids_N, kept.x_N - kept.x_N.max()  # relative, because noise vanishes in large scores
    groups: Contest | None = None
    with np.errstate(all="ignore"):
        if stage.uniforms == "one":
            row = statistics(x_N)
            u = noise.uniform(seed, step, noise.TOKEN, np.zeros(1, np.int64))[0]
            weight_N = stage.weight(x_N, row)
            intervals = Intervals(ids_N, weight_N, exclusive_cumsum(weight_N), stage.target(row, u))
            return Selection(intervals.winner, intervals)
        u_N: Floats = np.zeros(len(x_N))
        if stage.uniforms == "each":
            group_N = ids_N // noise.GROUP_SIZE
            groups_G, mass_G = group_logsumexp(group_N, x_N)
            u_G = noise.uniform(seed, step, noise.GROUP, groups_G)
            groups = Contest(groups_G, mass_G, stage.score(mass_G, u_G))
            ids_N, x_N = ids_N[group_N == groups.winner], x_N[group_N == groups.winner]
            u_N = noise.uniform(seed, step, noise.TOKEN, ids_N)
        tokens = Contest(ids_N, x_N, stage.score(x_N, u_N))
        return Selection(tokens.winner, tokens, groups)


def select_token(stage: Any, kept: Survivors, seed: int, step: int) -> int:
    """The token that a Draw selects among the survivors."""
    return select(stage, kept, seed, step).token


def highest_scoring(stage: Draw, ids_N: Ids, x_N: Floats, u_N: Floats) -> int:
    """The id with the highest score; among equal ones, the lowest id."""
    return Contest(ids_N, x_N, stage.score(x_N, u_N)).winner


def group_logsumexp(group_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """The groups with surviving tokens, and the log-sum-exp of their scores."""
    order_N = np.argsort(group_N, kind="stable")
    groups_G, first_G, size_G = np.unique(group_N[order_N], return_index=True, return_counts=True)
    top_G = np.maximum.reduceat(x_N[order_N], first_G)
    e_N = np.exp(x_N[order_N] - np.repeat(top_G, size_G))
    return groups_G, top_G + np.log(np.add.reduceat(e_N, first_G))


def exclusive_cumsum(weight_N: Floats) -> Floats:
    """The sum of the weights strictly before each token."""
    return np.concatenate(([0.0], np.cumsum(weight_N)[:-1]))
