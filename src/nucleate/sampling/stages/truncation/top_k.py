"""Top-k (Fan et al., arXiv 1805.04833)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import ones
from nucleate.sampling.stage import Prefix, RowStats, param


class TopK(Prefix):
    """Keep the k most likely tokens: exactly k, among equal ones the lowest ids."""

    rank = 61
    k: int = param("Number of most likely tokens to keep; 0 or -1: all", neutral=0, off=(-1,), low=0, high=2**31 - 1)
    with_ties: bool = param("Keep tokens equal to the k-th as well", default=False, public=False)

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
