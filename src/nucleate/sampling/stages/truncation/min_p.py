"""Min-p (Nguyen et al., arXiv 2407.01082)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, min_keep_parameter, param


class MinP(Floor):
    """Keep the tokens with at least m times the probability of the most likely one."""

    rank = 63
    m: float = param(
        "Minimum probability of a token, relative to the most likely one; 0: off", neutral=0.0, low=0.0, high=1.0
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.m) - SLACK
