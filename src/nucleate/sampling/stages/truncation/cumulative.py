"""Truncations that keep the first tokens of a ranking until a sum is reached.

Top-k: Fan et al., arXiv 1805.04833. Typical: Meister, Pimentel, Wiher, Cotterell, arXiv 2202.00666. Top-H: Potraghloo
et al., arXiv 2509.02510. Top-p, or nucleus sampling: Holtzman et al., arXiv 1904.09751.
"""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, absolute, exp, log, ones, where
from nucleate.sampling.stage import Prefix, RowStats, fraction_parameter, min_keep_parameter, param


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


class Typical(Prefix):
    """Keep the tokens whose surprise is nearest to the entropy until their cumulative probability reaches p."""

    rank = 62
    p: float = fraction_parameter(
        "Cumulative probability of the locally typical tokens to keep; 1: all, 0: one", neutral=1.0, name="typical_p"
    )
    min_keep: int = min_keep_parameter()

    def order(self, x: Any, row: RowStats) -> Any:
        return absolute(row.top + log(row.mass) - x - row.entropy)

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * row.mass * (1.0 - SLACK)


class TopH(Prefix):
    """Keep the most likely tokens as long as they contribute at most a given part of the entropy."""

    rank = 68
    inclusive = False
    a: float | None = fraction_parameter(
        "Maximum part of the entropy that the kept tokens contribute; 0: one token", neutral=None
    )
    min_keep: int = min_keep_parameter()

    @property
    def greedy(self) -> bool:
        return self.a == 0 and self.min_keep <= 1

    def weight(self, x: Any, row: RowStats) -> Any:
        log_mass = log(row.mass)
        return exp(x - row.top - log_mass) * (row.top + log_mass - x)

    def target(self, row: RowStats) -> Any:
        return self.a * row.entropy * (1.0 + SLACK)


class TopP(Prefix):
    """Keep the smallest set of most likely tokens whose cumulative probability reaches p."""

    rank = 70
    p: float = fraction_parameter(
        "Cumulative probability of the most likely tokens to keep; 1: all, 0: one", neutral=1.0
    )
    of_full_mass: bool = param("p refers to the distribution before earlier truncations", default=False, public=False)
    min_keep: int = min_keep_parameter()

    @property
    def greedy(self) -> bool:
        return self.p == 0 and self.min_keep <= 1

    def weight(self, x: Any, row: RowStats) -> Any:
        return exp(x - row.top)

    def target(self, row: RowStats) -> Any:
        return self.p * where(self.of_full_mass, row.full_mass, row.mass) * (1.0 - SLACK)
