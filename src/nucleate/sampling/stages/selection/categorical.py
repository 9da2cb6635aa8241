"""Categorical sampling by the inverse CDF: the same distribution as Gumbel-max, but other tokens per seed."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import exp
from nucleate.sampling.stage import Draw, RowStats, param


class Categorical(Draw):
    """Sample by the inverse CDF: one uniform number, accumulated from the most likely token down."""

    uniforms = "one"
    seed: int | None = param(
        "Random seed, 0 to 2**64 - 1; none: a random one", default=None, low=0, high=2**64 - 1, name="seed"
    )

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats, u: Any) -> Any:
        return u * row.mass
