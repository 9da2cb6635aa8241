"""Top-n-sigma (Tang et al., arXiv 2411.07641). Its cut is in standard deviations, so temperature cannot move it."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, sqrt
from nucleate.sampling.stage import Floor, RowStats, param


class TopNSigma(Floor):
    """Keep every token whose score is at most n standard deviations below the best."""

    rank = 60
    n: float = param("standard deviations below the best score; 0 keeps all", neutral=0.0, low=0.0)

    def floor(self, row: RowStats) -> Any:
        return row.top - self.n * sqrt(row.var) - SLACK
