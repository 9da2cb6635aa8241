"""P-less sampling (arXiv 2509.23234): a threshold without parameters, the collision probability."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, min_keep_parameter, param


class PLess(Floor):
    """Keep the tokens at least as likely as the sum of the squared probabilities."""

    rank = 67
    on: bool = param("Remove tokens less likely than the sum of the squared probabilities", neutral=False)
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.square) - log(row.mass) - SLACK
