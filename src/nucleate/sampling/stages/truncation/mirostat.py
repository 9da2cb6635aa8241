"""Mirostat, versions 2 and 1 (Basu, Ramachandran, Keskar, Varshney, arXiv 2007.14966); version 1 as in llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from nucleate.sampling.maths import (
    INFINITY,
    SLACK,
    absolute,
    exp,
    log,
    log1p,
    maximum,
    minimum,
    ones,
    places,
    total,
    where,
)
from nucleate.sampling.stage import Floor, Prefix, RowStats, SampledToken, min_keep_parameter, param

LOG_2 = 0.6931471805599453
MAX_RATE = 1e6
"""Maximum target and learning rate, so that mu stays finite in any output."""


class Mirostat(Floor):
    """Keep the tokens with a surprise of at most mu bits; mu adapts so that the mean surprise approaches tau."""

    rank = 69
    tau: float = param("Target surprise, in bits; 0: off", neutral=0.0, low=0.0, high=MAX_RATE, name="mirostat_tau")
    eta: float = param("Learning rate of mu", default=0.1, low=0.0, high=MAX_RATE, name="mirostat_eta")
    mu: float | None = param("Maximum surprise of this step, in bits; initially 2 tau", default=None, public=False)
    min_keep: int = min_keep_parameter()

    def verify(self) -> None:
        if self.mu is None:
            object.__setattr__(self, "mu", 2.0 * self.tau)

    def update(self, token: SampledToken) -> Self:
        surprise = -token.logprob_after / LOG_2
        return replace(self, mu=self.mu - self.eta * (surprise - self.tau))  # type: ignore[operator]  # see verify

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) - self.mu * LOG_2  # type: ignore[operator]  # see verify


LEAST, MOST = 1e-30, 1e30
"""The range of the exponent, so that every result is a number."""
SMALL = 1e-8


class MirostatV1(Prefix):
    """Keep the k most likely tokens; k follows from a Zipf fit of the row, so that the mean surprise approaches tau."""

    rank = 69.5
    inclusive = False
    sorted_count = 100
    tau: float = param("Target surprise, in bits; 0: off", neutral=0.0, low=0.0, high=MAX_RATE, name="mirostat_v1_tau")
    eta: float = param("Learning rate of mu", default=0.1, low=0.0, high=MAX_RATE, name="mirostat_v1_eta")
    mu: float | None = param("Maximum surprise of this step, in bits; initially 2 tau", default=None, public=False)
    min_keep: int = min_keep_parameter()

    verify = Mirostat.verify
    update = Mirostat.update

    def weight(self, x: Any, row: RowStats) -> Any:
        return ones(x)

    def target(self, row: RowStats) -> Any:
        exponent, size = zipf_exponent(row.sorted_scores), log(maximum(row.n, 2.0))
        epsilon = (exponent - 1.0) * size
        ratio = where(absolute(epsilon) < SMALL, 1.0, epsilon / (1.0 - exp(-epsilon))) / size
        return exp((self.mu * LOG_2 + log(ratio)) / exponent) * (1.0 + SLACK)  # type: ignore[operator]


def zipf_exponent(scores: Any) -> Any:
    """The exponent s of a Zipf distribution, p ~ rank ** -s, by least squares over the ratios of neighbours."""
    high, low = scores[..., :-1], scores[..., 1:]
    distance = where(low > -INFINITY, log1p(1.0 / places(low)), 0.0)
    drop = where(low > -INFINITY, high - low, 0.0)
    exponent = total(distance * drop) / maximum(total(distance * distance), LEAST)
    return minimum(maximum(exponent, LEAST), MOST)
