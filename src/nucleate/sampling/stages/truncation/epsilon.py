"""Epsilon and eta (Hewitt, Manning, Liang: Truncation sampling as language model desmoothing, arXiv 2210.15191)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log, minimum
from nucleate.sampling.stage import Floor, RowStats, min_keep_parameter, param


class Epsilon(Floor):
    """Keep the tokens with at least a given probability."""

    rank = 65
    e: float = param("Minimum probability of a token; 0: off", neutral=0.0, low=0.0, high=1.0, name="epsilon_cutoff")
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + log(self.e) - SLACK


class Eta(Floor):
    """Keep the tokens with at least the probability min(e, sqrt(e) * exp(-entropy))."""

    rank = 66
    e: float = param(
        "Minimum probability of a token, lower in flat distributions; 0: off",
        neutral=0.0,
        low=0.0,
        high=1.0,
        name="eta_cutoff",
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + minimum(log(self.e), 0.5 * log(self.e) - row.entropy) - SLACK
