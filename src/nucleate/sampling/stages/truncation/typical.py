"""Locally typical sampling (Meister, Pimentel, Wiher, Cotterell, arXiv 2202.00666)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, absolute, exp, log
from nucleate.sampling.stage import Prefix, RowStats, param


class Typical(Prefix):
    """Keep the fewest tokens whose surprise is nearest to the entropy and whose probability reaches p."""

    rank = 62
    p: float = param(
        "probability that the tokens kept must reach", neutral=1.0, low=0.0, high=1.0, open_low=True, name="typical_p"
    )

    def order(self, x: Any, row: RowStats) -> Any:
        return absolute(row.top + log(row.mass) - x - row.entropy)

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * row.mass * (1.0 - SLACK)
