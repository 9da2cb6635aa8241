"""Mirostat, version 2 (Basu, Ramachandran, Keskar, Varshney, arXiv 2007.14966)."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Self

from nucleate.sampling.maths import log
from nucleate.sampling.min_keep import min_keep_parameter
from nucleate.sampling.stage import Floor, RowStats, SampledToken, param

LOG_2 = 0.6931471805599453


def bounded(mu: float) -> float:
    """Return mu, or the finite number closest to it: huge parameters overflow."""
    return max(-sys.float_info.max, min(sys.float_info.max, mu))


class Mirostat(Floor):
    """Keep the tokens with a surprise of at most mu bits; mu adapts so that the mean surprise approaches tau."""

    rank = 69
    tau: float = param("Target surprise, in bits; 0: off", neutral=0.0, low=0.0, name="mirostat_tau")
    eta: float = param("Learning rate of mu", default=0.1, low=0.0, name="mirostat_eta")
    mu: float | None = param("Maximum surprise of this step, in bits; initially 2 tau", default=None, public=False)
    min_keep: int = min_keep_parameter()

    def verify(self) -> None:
        if self.mu is None:
            object.__setattr__(self, "mu", bounded(2.0 * self.tau))

    def update(self, token: SampledToken) -> Self:
        surprise = -token.logprob_after / LOG_2
        mu = self.mu - self.eta * (surprise - self.tau)  # type: ignore[operator]  # see verify
        return replace(self, mu=bounded(mu))

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) - self.mu * LOG_2  # type: ignore[operator]  # see verify
