"""Eta sampling (Hewitt, Manning, Liang: Truncation sampling as language model desmoothing, arXiv 2210.15191)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log, minimum
from nucleate.sampling.stage import Floor, RowStats, param


class Eta(Floor):
    """Keep every token at least min(e, sqrt(e) * exp(-entropy)) likely: a lower cut where the model is unsure."""

    rank = 66
    e: float = param(
        "least probability, lower in flat distributions", neutral=0.0, low=0.0, high=1.0, name="eta_cutoff"
    )

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + minimum(log(self.e), 0.5 * log(self.e) - row.entropy) - SLACK
