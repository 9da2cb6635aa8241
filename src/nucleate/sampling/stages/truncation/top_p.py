"""Top-p, or nucleus sampling (Holtzman et al., arXiv 1904.09751)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, exp, where
from nucleate.sampling.stage import Prefix, RowStats, param


class TopP(Prefix):
    """Keep the fewest likeliest tokens whose probability, among those still in, reaches p."""

    rank = 70
    p: float = param("probability that the tokens kept must reach", neutral=1.0, low=0.0, high=1.0, open_low=True)
    of_whole: bool = param("p is a part of all tokens, also of those cut before", default=False, public=False)

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * where(self.of_whole, row.whole, row.mass) * (1.0 - SLACK)
