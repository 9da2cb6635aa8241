"""Temperature."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import RowStats, Scale, param


class Temperature(Scale):
    """Divide the scores by the temperature: below 1 sharpens the distribution, above 1 flattens it; 0 is greedy."""

    rank = 50
    t: float = param(
        "Divides the logits; below 1 sharpens the distribution, 0 selects the most likely token", neutral=1.0, low=0.0
    )

    @property
    def greedy(self) -> bool:
        return self.t == 0

    def apply(self, x: Any, row: RowStats) -> Any:
        return (x - row.top) / self.t  # from the top, so that no temperature overflows
