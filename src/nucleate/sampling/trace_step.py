"""TraceStep: one line of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.stage import Stage
from nucleate.sampling.trace_change import StageChange


@dataclass(frozen=True, eq=False)
class TraceStep:
    """The effect of one stage. Arrays of token ids are in ascending order."""

    change: StageChange  #: the surviving tokens before and after it
    why: str  #: the reason, with the deciding numbers

    def __repr__(self) -> str:  # what an interactive session shows
        return f"TraceStep({self.name}: {self.left} left, {self.why})"

    @property
    def stage(self) -> Stage | None:
        """The stage; None for the logits."""
        return self.change.stage

    @property
    def name(self) -> str:
        """The name of the stage; "logits" for the logits."""
        return "logits" if self.stage is None else self.stage.name

    @cached_property
    def touched(self) -> NDArray[np.int64]:
        """Surviving tokens whose score it changed."""
        return np.sort(self.change.before.kept.ids_N[self.change.is_touched])

    @cached_property
    def removed(self) -> NDArray[np.int64]:
        """Tokens that it removed."""
        return np.sort(self.change.before.kept.ids_N[self.change.is_removed])

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """[V] after it, -inf for removed tokens."""
        return self.change.after.spread(self.change.after.kept.x_N, -np.inf)

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """[V] after it."""
        return self.change.after.spread(self.change.after.probabilities, 0.0)

    @property
    def entropy(self) -> float:
        """Of the distribution after it, in nats."""
        return self.change.after.entropy

    @property
    def removed_probability(self) -> float:
        """The probability, before it, of the tokens that it removed."""
        return self.change.removed_probability

    @property
    def kl(self) -> float:
        """The Kullback-Leibler divergence of the distribution after it from the one before it, in nats."""
        return self.change.kl

    @property
    def left(self) -> int:
        """Number of surviving tokens."""
        return len(self.change.after.kept.ids_N)

    def most_likely(self, n: int) -> list[int]:
        """The n most likely tokens, in rank order."""
        ids: list[int] = self.change.after.kept.ids_N[: max(n, 0)].tolist()
        return ids
