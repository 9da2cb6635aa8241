"""Top-H (Potraghloo et al., arXiv 2509.02510)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, exp, log
from nucleate.sampling.stage import Prefix, RowStats, min_keep_parameter, param


class TopH(Prefix):
    """Keep the most likely tokens as long as they contribute at most a given part of the entropy."""

    rank = 68
    inclusive = False
    a: float | None = param(
        "Maximum part of the entropy that the kept tokens contribute; 0: one token", neutral=None, low=0.0, high=1.0
    )
    min_keep: int = min_keep_parameter()

    @property
    def greedy(self) -> bool:
        return self.a == 0 and self.min_keep <= 1

    def weight(self, x: Any, row: RowStats) -> Any:
        log_mass = log(row.mass)
        return exp(x - row.top - log_mass) * (row.top + log_mass - x)

    def target(self, row: RowStats) -> Any:
        return self.a * row.entropy * (1.0 + SLACK)
