"""Top-p, or nucleus sampling (Holtzman et al., arXiv 1904.09751)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, exp, where
from nucleate.sampling.stage import Prefix, RowStats, min_keep_parameter, param


class TopP(Prefix):
    """Keep the smallest set of most likely tokens whose cumulative probability reaches p."""

    rank = 70
    p: float = param(
        "Cumulative probability of the most likely tokens to keep; 1: all, 0: one", neutral=1.0, low=0.0, high=1.0
    )
    of_full_mass: bool = param("p refers to the distribution before earlier truncations", default=False, public=False)
    min_keep: int = min_keep_parameter()

    @property
    def greedy(self) -> bool:
        return self.p == 0 and self.min_keep <= 1

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * where(self.of_full_mass, row.full_mass, row.mass) * (1.0 - SLACK)
