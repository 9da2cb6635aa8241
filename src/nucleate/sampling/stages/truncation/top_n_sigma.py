"""Top-n-sigma (Tang et al., arXiv 2411.07641): a threshold in standard deviations, independent of temperature."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, sqrt
from nucleate.sampling.stage import Floor, RowStats, min_keep_parameter, param


class TopNSigma(Floor):
    """Keep the tokens whose score is at most n standard deviations below the highest."""

    rank = 60
    n: float = param("Maximum distance from the highest logit, in standard deviations; 0: off", neutral=0.0, low=0.0)
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top - self.n * sqrt(row.var) - SLACK
