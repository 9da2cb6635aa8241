"""Top-k (Fan et al., arXiv 1805.04833)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import ones
from nucleate.sampling.stage import Prefix, RowStats, param


class TopK(Prefix):
    """Keep the k likeliest tokens: exactly k, of equal ones those with the lowest ids."""

    rank = 61
    k: int = param("how many tokens stay in; 0 or -1 keeps all", neutral=0, off=(-1,), low=0, high=2**31 - 1)
    with_ties: bool = param("keep tokens equal to the k-th too", default=False, public=False)

    @property
    def greedy(self) -> bool:
        return self.k == 1

    @property
    def ties(self) -> bool:
        return self.with_ties

    def weight(self, x: Any, row: RowStats) -> Any:
        return ones(x)

    def target(self, row: RowStats) -> Any:
        return self.k
