"""P-less sampling (arXiv 2509.23234): a cut without a parameter, the chance that two draws are the same token."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, param


class PLess(Floor):
    """Keep every token at least as likely as two draws are to be equal, the sum of the squared probabilities."""

    rank = 67
    on: bool = param("cut below the sum of the squared probabilities", neutral=False)

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.square) - log(row.mass) - SLACK
