"""Locally typical sampling (Meister, Pimentel, Wiher, Cotterell, arXiv 2202.00666)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, absolute, exp, log
from nucleate.sampling.stage import Prefix, RowStats, min_keep_parameter, param


class Typical(Prefix):
    """Keep the tokens whose surprise is nearest to the entropy until their cumulative probability reaches p."""

    rank = 62
    p: float = param(
        "Cumulative probability of the locally typical tokens to keep; 1: all, 0: one",
        neutral=1.0,
        low=0.0,
        high=1.0,
        name="typical_p",
    )
    min_keep: int = min_keep_parameter()

    def order(self, x: Any, row: RowStats) -> Any:
        return absolute(row.top + log(row.mass) - x - row.entropy)

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * row.mass * (1.0 - SLACK)
