"""The Gumbel-max draw (Gumbel 1954; Maddison et al., arXiv 1411.0030), in two levels as `Draw` says."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.noise import gumbel
from nucleate.sampling.stage import Draw, param


class Gumbel(Draw):
    """Draw by the Gumbel-max trick: add noise to every score, take the highest."""

    uniforms = "each"
    seed: int | None = param(
        "seed of the noise, 0..2**64 - 1; none takes a fresh one", default=None, low=0, high=2**64 - 1, name="seed"
    )

    def score(self, x: Any, u: Any) -> Any:
        return x + gumbel(u)
