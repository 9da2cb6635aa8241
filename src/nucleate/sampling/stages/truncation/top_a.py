"""Top-a (BlinkDL, in KoboldAI): a cut that rises with the square of the best token's probability."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, param


class TopA(Floor):
    """Keep every token at least a * (top probability) ** 2 likely."""

    rank = 64
    a: float = param("factor of the squared probability of the likeliest token", neutral=0.0, low=0.0, high=1.0)

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.a) - log(row.mass) - SLACK
