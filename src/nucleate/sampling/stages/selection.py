"""The selection of a token, and the report of log-probabilities.

Gumbel-max sampling: Gumbel 1954; Maddison et al., arXiv 1411.0030; in two levels as ``Draw`` describes. Categorical
sampling by the inverse CDF has the same distribution, but selects other tokens per seed.
"""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import exp
from nucleate.sampling.noise import gumbel
from nucleate.sampling.stage import Draw, RowStats, Tap, param


class Greedy(Draw):
    """Select the most likely token; among equal ones, the lowest id."""

    rank = 99
    uniforms = "none"

    @property
    def greedy(self) -> bool:
        return True

    def score(self, x: Any, u: Any) -> Any:
        return x


class Gumbel(Draw):
    """Sample by the Gumbel-max trick: add Gumbel noise to every score and take the highest."""

    uniforms = "each"
    seed: int | None = param(
        "Random seed, 0 to 2**64 - 1; none: a random one", default=None, low=0, high=2**64 - 1, name="seed"
    )

    def score(self, x: Any, u: Any) -> Any:
        return x + gumbel(u)


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


class Logprobs(Tap):
    """Report logprobs and ranks of the sampled token, of the most likely ones and of given ones."""

    rank = 98
    n: int | None = param(
        "Number of most likely tokens to report logprobs for, in addition to the sampled one",
        neutral=None,
        low=0,
        name="logprobs",
    )
    ids: tuple[int, ...] = param(
        "Further token ids to report logprobs for", neutral=(), low=0, name="logprob_token_ids"
    )

    @property
    def request(self) -> tuple[int, tuple[int, ...]]:
        return self.n or 0, self.ids
