"""Rows sorted by score, and the statistics of their surviving tokens.

R rows of N = V tokens. A token that does not survive has the score -inf, so that no shape depends on a value. The
scores of an invalid row (NaN, +inf or no finite score) relative to its maximum are NaN, so no token is selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stage import RowStats


class RowConstants:
    """Constant tensors, created once per batch. needs_full_mass: whether any rule reads ``RowStats.full_mass``."""

    def __init__(
        self, size: int, rows: int, floats: torch.dtype, device: Any, *, needs_full_mass: bool = False
    ) -> None:
        self.floats, self.needs_full_mass = floats, needs_full_mass
        self.zero_1 = torch.zeros(1, dtype=floats, device=device)
        self.zero, self.neg_inf = (torch.tensor(x, dtype=floats, device=device) for x in (0.0, -torch.inf))
        self.no_token = torch.tensor(-1, device=device)
        self.position_N = torch.arange(size, device=device)
        self.first_N = self.position_N == 0
        self.zero_R1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.true_R1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.groups_G = torch.arange(-(-size // GROUP_SIZE), device=device)
        self.token_T = torch.arange(GROUP_SIZE, device=device)
        self.word_N, self.bit_N = self.position_N // 32, (self.position_N % 32).to(torch.int32)
        neg_inf_11 = torch.full((1, 1), -torch.inf, dtype=floats, device=device)
        self.neg_inf_RP = neg_inf_11.expand(rows, len(self.groups_G) * GROUP_SIZE)


@dataclass(frozen=True)
class RankedTokens:
    """Tokens in rank order: score descending, then id ascending. Filters are recorded, and applied when needed."""

    constants: RowConstants
    ids_RN: torch.Tensor  #: int64, a permutation of 0..V - 1
    x_RN: torch.Tensor  #: scores after the last Shift or Scale, also of masked tokens
    below_RN: torch.Tensor  #: the same minus the maximum of the survivors; -inf for masked tokens
    is_sorted: bool = True  #: whether the survivors come first
    cut_floor_R1: Any = None  #: pending filter: keeps values of ``below_RN`` from here on
    floor_below_top: bool = True  #: whether that is at most 0 for certain; if not, the first token is kept in any case
    cut_last_R1: Any = None  #: pending filter: keeps positions 0 to this one
    full_mass_R1: Any = None  #: the mass before the first filter, if there was one
    _cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def _cached(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def surviving(self) -> torch.Tensor:
        return self._cached("inside", lambda: self.below_RN > -torch.inf)

    def weight(self) -> torch.Tensor:
        return self._cached("weight", self.below_RN.exp)

    def mass(self) -> torch.Tensor:
        return self._cached("mass", lambda: self.weight().sum(1, keepdim=True))

    def with_cut(self, *, floor: Any = None, floor_below_top: bool = True, last: Any = None) -> RankedTokens:
        """Record one more filter: a lowest value of ``below_RN``, or a last position."""
        floor = _tighter(torch.maximum, self.cut_floor_R1, floor)
        last = _tighter(torch.minimum, self.cut_last_R1, last)
        return replace(
            self, cut_floor_R1=floor, floor_below_top=floor_below_top and self.floor_below_top, cut_last_R1=last
        )

    def apply_cuts(self) -> RankedTokens:
        """Apply the pending filters."""
        if self.cut_floor_R1 is None:
            return self if self.cut_last_R1 is None else self.filtered(self.constants.position_N <= self.cut_last_R1)
        keep_RN = self.below_RN >= self.cut_floor_R1
        if not self.floor_below_top:
            keep_RN = keep_RN | self.constants.first_N
        if self.cut_last_R1 is not None:
            keep_RN = keep_RN & (self.constants.position_N <= self.cut_last_R1)
        return self.filtered(keep_RN)

    def filtered(self, keep_RN: Any, *, is_sorted: bool = True) -> RankedTokens:
        """Keep the tokens of a mask. is_sorted: they are a prefix of the survivors."""
        below_RN, full_mass_R1 = torch.where(keep_RN, self.below_RN, self.constants.neg_inf), self.full_mass_R1
        if full_mass_R1 is None and self.constants.needs_full_mass:
            full_mass_R1 = self.mass()
        if not is_sorted:
            top_R1 = below_RN.amax(1, keepdim=True)
            below_RN = below_RN - top_R1
            full_mass_R1 = None if full_mass_R1 is None else full_mass_R1 * (-top_R1).exp()
        return RankedTokens(self.constants, self.ids_RN, self.x_RN, below_RN, is_sorted, full_mass_R1=full_mass_R1)

    def resorted(self) -> RankedTokens:
        """Move the survivors to the front."""
        if self.is_sorted:
            return self
        below_RN, order_RN = torch.sort(self.below_RN, dim=1, descending=True, stable=True)
        ids_RN, x_RN = self.ids_RN.gather(1, order_RN), self.x_RN.gather(1, order_RN)
        return RankedTokens(self.constants, ids_RN, x_RN, below_RN, full_mass_R1=self.full_mass_R1)

    def by_id(self, x_RN: torch.Tensor) -> torch.Tensor:
        """Reorder values by token id, padded with -inf: [R, groups * 256]."""
        return self.constants.neg_inf_RP.scatter(1, self.ids_RN, x_RN)

    def logprob(self, tokens_R1: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of surviving tokens: [R, 1]."""
        position_R1 = (self.ids_RN == tokens_R1).to(torch.int8).argmax(1, keepdim=True)
        return self.below_RN.gather(1, position_R1) - self.mass().log()

    def stats(self, names: frozenset[str], sorted_count: int = 0) -> RowStats:
        """The named row statistics, [R, 1] each, relative to the maximum score; the others are 1.

        The sorted scores are [R, sorted_count]; for them, the tokens must be sorted and without pending filters.
        """
        stats_of: dict[str, Any] = dict.fromkeys(RowStats._fields, 1.0)
        surviving_RN, below_RN = None, self.below_RN
        if names & {"n", "mean", "var"}:
            surviving_RN = self.surviving()
            stats_of["n"] = self._cached("n", lambda: surviving_RN.sum(1, keepdim=True))
        if names & {"mass", "entropy", "full_mass"}:
            stats_of["mass"] = self.mass()
        if "square" in names:
            stats_of["square"] = self._cached("square", lambda: self.weight().square().sum(1, keepdim=True))
        if "entropy" in names:
            stats_of["entropy"] = self._cached("entropy", self._entropy)
        if names & {"mean", "var"}:
            below_RN = torch.where(surviving_RN, below_RN, self.constants.zero)
            stats_of["mean"] = below_RN.sum(1, keepdim=True) / stats_of["n"]
            if "var" in names:
                away_RN = torch.where(surviving_RN, below_RN - stats_of["mean"], self.constants.zero)
                stats_of["var"] = away_RN.square().sum(1, keepdim=True) / stats_of["n"]
        if "full_mass" in names:
            full_R1 = self.full_mass_R1
            stats_of["full_mass"] = self.mass() if full_R1 is None else torch.maximum(full_R1, self.mass())
        if "n" in names:
            stats_of["n"] = stats_of["n"].to(self.constants.floats)
        if "sorted_scores" in names:
            missing = max(sorted_count - self.below_RN.shape[1], 0)
            scores_RN = self.below_RN[:, :sorted_count]
            stats_of["sorted_scores"] = torch.nn.functional.pad(scores_RN, (0, missing), value=-torch.inf)
        return RowStats(**{**stats_of, "top": 0.0})

    def _entropy(self) -> torch.Tensor:
        least = torch.finfo(self.constants.floats).min  # 0 * -inf would be NaN
        cross_R1 = (self.weight() * self.below_RN.clamp(min=least)).sum(1, keepdim=True)
        return self.mass().log() - cross_R1 / self.mass()


def _tighter(choose: Callable[..., torch.Tensor], first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return choose(first, second)


def rank_tokens(constants: RowConstants, x_RV: torch.Tensor) -> RankedTokens:
    """Sort scores that are given by token id."""
    x_RN, ids_RN = torch.sort(x_RV, dim=1, descending=True, stable=True)
    return RankedTokens(constants, ids_RN, x_RN, x_RN - x_RN.narrow(1, 0, 1))
