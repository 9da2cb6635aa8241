"""Gumbel-max sampling (Gumbel 1954; Maddison et al., arXiv 1411.0030), in two levels as `Draw` describes."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.noise import gumbel
from nucleate.sampling.stage import Draw, param


class Gumbel(Draw):
    """Sample by the Gumbel-max trick: add Gumbel noise to every score and take the highest."""

    uniforms = "each"
    seed: int | None = param(
        "Random seed, 0 to 2**64 - 1; none: a random one", default=None, low=0, high=2**64 - 1, name="seed"
    )

    def score(self, x: Any, u: Any) -> Any:
        return x + gumbel(u)
