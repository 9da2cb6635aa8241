"""Min-p (Nguyen et al., arXiv 2407.01082)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, param


class MinP(Floor):
    """Keep every token at least m times as likely as the likeliest."""

    rank = 63
    m: float = param("least probability of a token, as a part of the likeliest's", neutral=0.0, low=0.0, high=1.0)

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.m) - SLACK
