"""Rows that have been sorted once, and what rules see of the tokens that are still in.

R rows, N tokens: V of them. A token that is out has the score -inf, so that no shape depends on a value. A row from
which nothing can be drawn (NaN, +inf, no finite score) has NaN for its highest score, and so no token wins its race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stage import RowStats


class RowConstants:
    """Constants of rows of a size: made once, not in each step. whole: whether any rule reads ``RowStats.whole``."""

    def __init__(self, size: int, rows: int, floats: torch.dtype, device: Any, *, whole: bool = False) -> None:
        self.floats, self.whole = floats, whole
        self.zero_1 = torch.zeros(1, dtype=floats, device=device)
        self.zero, self.out = (torch.tensor(x, dtype=floats, device=device) for x in (0.0, -torch.inf))
        self.none = torch.tensor(-1, device=device)
        self.place_N = torch.arange(size, device=device)
        self.first_N = self.place_N == 0
        self.start_R1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.true_R1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.groups_G = torch.arange(-(-size // GROUP_SIZE), device=device)
        self.token_T = torch.arange(GROUP_SIZE, device=device)
        self.word_N, self.bit_N = self.place_N // 32, (self.place_N % 32).to(torch.int32)
        self.out_RP = torch.full((1, 1), -torch.inf, dtype=floats, device=device).expand(
            rows, len(self.groups_G) * GROUP_SIZE
        )


@dataclass(frozen=True)
class RankedTokens:
    """Tokens in the order: score descending, then id ascending. See ``reference.Survivors``."""

    fixed: RowConstants
    ids_RN: torch.Tensor  #: int64, every id of the vocabulary once
    x_RN: torch.Tensor  #: the scores as sorted, or as the last Scale left them: also of tokens that are out
    below_RN: torch.Tensor  #: the same from the top of those that are in; what is out at -inf
    packed: bool = True  #: those that are in come first
    floor_R1: Any = None  #: a cut that has still to be made: keeps scores from here on,
    low: bool = True  #: which is never above the top (if it may be, the first token stays anyway);
    last_R1: Any = None  #: and tokens up to this place, which is not below 0
    whole_R1: Any = None  #: the mass before the first cut, if there was one
    _made: dict[str, torch.Tensor] = field(default_factory=dict)

    def _once(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def inside(self) -> torch.Tensor:
        return self._once("inside", lambda: self.below_RN > -torch.inf)

    def weight(self) -> torch.Tensor:
        return self._once("weight", self.below_RN.exp)

    def mass(self) -> torch.Tensor:
        return self._once("mass", lambda: self.weight().sum(1, keepdim=True))

    def cut(self, *, floor: Any = None, low: bool = True, last: Any = None) -> RankedTokens:
        """With one more cut to make."""
        floor = _tighter(torch.maximum, self.floor_R1, floor)
        last = _tighter(torch.minimum, self.last_R1, last)
        return replace(self, floor_R1=floor, low=low and self.low, last_R1=last)

    def settled(self) -> RankedTokens:
        """After the cuts that have still to be made."""
        if self.floor_R1 is None:
            return self if self.last_R1 is None else self.only(self.fixed.place_N <= self.last_R1)
        keep_RN = self.below_RN >= self.floor_R1
        if not self.low:
            keep_RN = keep_RN | self.fixed.first_N
        return self.only(keep_RN if self.last_R1 is None else keep_RN & (self.fixed.place_N <= self.last_R1))

    def only(self, keep_RN: Any, *, packed: bool = True) -> RankedTokens:
        """The tokens of a mask. packed: these come first, with the best of all."""
        below_RN, whole_R1 = torch.where(keep_RN, self.below_RN, self.fixed.out), self.whole_R1
        if whole_R1 is None and self.fixed.whole:
            whole_R1 = self.mass()
        if not packed:
            top_R1 = below_RN.amax(1, keepdim=True)
            below_RN = below_RN - top_R1
            whole_R1 = None if whole_R1 is None else whole_R1 * (-top_R1).exp()
        return RankedTokens(self.fixed, self.ids_RN, self.x_RN, below_RN, packed, whole_R1=whole_R1)

    def repacked(self) -> RankedTokens:
        """With those that are in first."""
        if self.packed:
            return self
        below_RN, place_RN = torch.sort(self.below_RN, dim=1, descending=True, stable=True)
        ids_RN, x_RN = self.ids_RN.gather(1, place_RN), self.x_RN.gather(1, place_RN)
        return RankedTokens(self.fixed, ids_RN, x_RN, below_RN, whole_R1=self.whole_R1)

    def by_id(self, x_RN: torch.Tensor) -> torch.Tensor:
        """Numbers of tokens in the order of ids, -inf behind the last one: [R, groups * 256]."""
        return self.fixed.out_RP.scatter(1, self.ids_RN, x_RN)

    def log_chance(self, tokens_R1: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of tokens that are in: [R, 1]."""
        place_R1 = (self.ids_RN == tokens_R1).to(torch.int8).argmax(1, keepdim=True)
        return self.below_RN.gather(1, place_R1) - self.mass().log()

    def row(self, wanted: frozenset[str]) -> RowStats:
        """What rules see of the row, [R, 1] each, scores from the top; what is not wanted is 1."""
        found: dict[str, Any] = dict.fromkeys(RowStats._fields, 1.0)
        inside_RN, below_RN = None, self.below_RN
        if wanted & {"n", "mean", "var"}:
            inside_RN = self.inside()
            found["n"] = self._once("n", lambda: inside_RN.sum(1, keepdim=True))
        if wanted & {"mass", "entropy", "whole"}:
            found["mass"] = self.mass()
        if "square" in wanted:
            found["square"] = self._once("square", lambda: self.weight().square().sum(1, keepdim=True))
        if "entropy" in wanted:
            found["entropy"] = self._once("entropy", self._entropy)
        if wanted & {"mean", "var"}:
            below_RN = torch.where(inside_RN, below_RN, self.fixed.zero)
            found["mean"] = below_RN.sum(1, keepdim=True) / found["n"]
            if "var" in wanted:
                away_RN = torch.where(inside_RN, below_RN - found["mean"], self.fixed.zero)
                found["var"] = away_RN.square().sum(1, keepdim=True) / found["n"]
        if "whole" in wanted:
            found["whole"] = self.mass() if self.whole_R1 is None else torch.maximum(self.whole_R1, self.mass())
        if "n" in wanted:
            found["n"] = found["n"].to(self.fixed.floats)
        return RowStats(**{**found, "top": 0.0})

    def _entropy(self) -> torch.Tensor:
        least = torch.finfo(self.fixed.floats).min  # 0 * -inf would be NaN
        cross_R1 = (self.weight() * self.below_RN.clamp(min=least)).sum(1, keepdim=True)
        return self.mass().log() - cross_R1 / self.mass()


def _tighter(choose: Callable[..., torch.Tensor], had: Any, more: Any) -> Any:
    if had is None or more is None:
        return more if had is None else had
    return choose(had, more)


def sorted_of(fixed: RowConstants, x_RV: torch.Tensor) -> RankedTokens:
    """All tokens of rows, by id."""
    x_RN, ids_RN = torch.sort(x_RV, dim=1, descending=True, stable=True)
    return RankedTokens(fixed, ids_RN, x_RN, x_RN - x_RN.narrow(1, 0, 1))
