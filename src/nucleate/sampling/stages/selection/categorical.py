"""The textbook draw, twin of the Gumbel-max one: the same distribution, other tokens."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import exp
from nucleate.sampling.stage import Draw, RowStats, param


class Categorical(Draw):
    """Draw by the inverse distribution function: one number, walked down from the likeliest token."""

    uniforms = "one"
    seed: int | None = param(
        "seed of the noise, 0..2**64 - 1; none takes a fresh one", default=None, low=0, high=2**64 - 1, name="seed"
    )

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats, u: Any) -> Any:
        return u * row.mass
