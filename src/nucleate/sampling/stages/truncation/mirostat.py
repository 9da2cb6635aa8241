"""Mirostat, version 2 (Basu, Ramachandran, Keskar, Varshney, arXiv 2007.14966)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from nucleate.sampling.maths import log
from nucleate.sampling.min_keep import min_keep_parameter
from nucleate.sampling.stage import Floor, RowStats, SampledToken, param

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
