"""Top-a (BlinkDL, in KoboldAI): a threshold that rises with the square of the highest probability."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, min_keep_parameter, param


class TopA(Floor):
    """Keep the tokens with at least the probability a * (highest probability) ** 2."""

    rank = 64
    a: float = param(
        "Minimum probability of a token, as a factor of the squared highest probability; 0: off",
        neutral=0.0,
        low=0.0,
        high=1.0,
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.a) - log(row.mass) - SLACK
