"""Collision floor: a threshold relative to the sum of squared probabilities. A stage without state."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, param


class CollisionFloor(Floor):
    """Keep the tokens with at least a times the probability that two samples are equal."""

    rank = 66.75  # its place in the default order: after temperature, among the thresholds
    a: float = param("Factor of the sum of squared probabilities; 0 keeps all tokens", neutral=0.0, low=0.0, high=1.0)

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.a) + log(row.square) - log(row.mass) - SLACK
