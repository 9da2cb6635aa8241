"""What one stage changed in a row: the surviving tokens before and after it, compared.

All numbers are computed when they are first read, and once. Does not depend on how a trace is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import reference
from nucleate.sampling.reference import Floats, Ids, Survivors
from nucleate.sampling.stage import Prefix, RowStats, Stage

SAME_PROBABILITY = 1e-8
"""Weights that differ less than this from the probabilities are these."""


class Distribution:
    """The N surviving tokens of a row of V, in rank order, and their probabilities."""

    def __init__(self, kept: Survivors, size: int) -> None:
        self.kept, self.size = kept, size

    @cached_property
    def _relative(self) -> tuple[Floats, RowStats]:
        with np.errstate(all="ignore"):
            return reference.relative_scores(self.kept)

    def rule_inputs(self, stage: Stage) -> tuple[Floats, RowStats]:
        """What the rules of a stage receive: scores [N] relative to the highest, and their statistics."""
        below_N, row = self._relative
        return below_N, row._replace(sorted_scores=reference.padded(below_N, stage.sorted_count))

    @cached_property
    def probabilities(self) -> Floats:
        """Probabilities [N]."""
        below_N, row = self._relative
        return np.asarray(np.exp(below_N) / row.mass)

    @cached_property
    def logprobs(self) -> Floats:
        """Log-probabilities [N]; finite also where a probability is rounded to 0."""
        below_N, row = self._relative
        return np.asarray(np.maximum(below_N, np.finfo(np.float64).min) - np.log(row.mass))

    @property
    def entropy(self) -> float:
        """In nats."""
        return max(0.0, float(self._relative[1].entropy))  # rounding may make it negative

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """The place [V] of each token in the ranking, from 0; -1 for tokens that do not survive."""
        rank_V = np.full(self.size, -1, np.int32)
        rank_V[self.kept.ids_N] = np.arange(len(self.kept.ids_N), dtype=np.int32)
        return rank_V

    def spread(self, values_N: Floats, other: float) -> Floats:
        """Values of the surviving tokens as an array [V], with another value for all other tokens."""
        values_V = np.full(self.size, other)
        values_V[self.kept.ids_N] = values_N
        return values_V


class PrefixSums(NamedTuple):
    """The sums of a Prefix, token by token in its own order."""

    order_N: Ids  #: indices into the ranking
    weight_N: Floats
    reached_N: Floats  #: compared with the target: before a token, or with it, see ``Prefix.inclusive``
    target: float
    measure: Literal["tokens", "probability", "probability of all tokens", "weight"]  #: what the weights are
    unit: float  #: what to divide weights by: shares of the whole, or a number of tokens


def prefix_sums(stage: Prefix, before: Distribution) -> PrefixSums:
    """The sums of a stage over the tokens before it."""
    below_N, row = before.rule_inputs(stage)
    order_N, weight_N, reached_N = reference.prefix_sums(stage, below_N, row)
    target, total, first = float(stage.target(row)), float(weight_N.sum()), float(weight_N[0])
    measure: Literal["tokens", "probability", "probability of all tokens", "weight"] = "weight"
    if np.ptp(weight_N) == 0 and (weight_N == stage.weight(below_N[order_N] - 1.0, row)).all():
        measure, total = "tokens", first or 1.0  # independent of the score
    elif not total > 0:
        total = 1.0
    elif target != float(stage.target(row._replace(full_mass=row.mass))):
        measure, total = "probability of all tokens", total * float(row.full_mass / row.mass)
    elif np.abs(weight_N / total - before.probabilities[order_N]).max() < SAME_PROBABILITY:
        measure = "probability"
    return PrefixSums(order_N, weight_N, reached_N, target, measure, total)


@dataclass(frozen=True, eq=False)
class StageChange:
    """The effect of a stage. Arrays [N] are of the tokens before it, in rank order before it."""

    stage: Stage | None  #: None for the logits
    before: Distribution
    after: Distribution
    u: float = 1.0  #: the random number of XTC

    @cached_property
    def scores(self) -> Floats:
        """Scores after the stage; -inf for the tokens that it removed."""
        if self.after is self.before or np.array_equal(self.before.kept.ids_N, self.after.kept.ids_N):
            return self.after.kept.x_N
        return self.after.spread(self.after.kept.x_N, -np.inf)[self.before.kept.ids_N]

    @cached_property
    def is_removed(self) -> NDArray[np.bool_]:
        """The tokens that it removed."""
        return np.asarray(self.scores == -np.inf)

    @cached_property
    def is_touched(self) -> NDArray[np.bool_]:
        """The surviving tokens whose score it changed."""
        return np.asarray((self.scores != self.before.kept.x_N) & ~self.is_removed)

    @cached_property
    def removed_probability(self) -> float:
        """The probability, before the stage, of the tokens that it removed."""
        return float(self.before.probabilities[self.is_removed].sum())

    @cached_property
    def kl(self) -> float:
        """The Kullback-Leibler divergence of the distribution after it from the one before it, in nats."""
        if self.after is self.before:
            return 0.0
        log_after_N = self.after.logprobs if self.scores is self.after.kept.x_N else self._log_after()
        p_N = np.exp(log_after_N)
        possible_N = p_N > 0
        ratio_N = log_after_N[possible_N] - self.before.logprobs[possible_N]
        return max(0.0, float((p_N[possible_N] * ratio_N).sum()))  # rounding may make it negative

    def _log_after(self) -> Floats:
        return self.after.spread(self.after.logprobs, -np.inf)[self.before.kept.ids_N]

    @cached_property
    def prefix(self) -> PrefixSums:
        """The sums of its stage, a Prefix."""
        return prefix_sums(self.stage, self.before)  # type: ignore[arg-type]
