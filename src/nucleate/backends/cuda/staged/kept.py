"""The tokens of rows that are still in, as tensors, and what rules see of them. Knows no stage.

R rows, N tokens. Tokens lie in the order, those that are out at -inf, anywhere: what they hold is never looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nucleate.core.stage import Row


class Kept(NamedTuple):
    """See ``backends.reference.Survivors``."""

    ids_RN: torch.Tensor  #: int64, every id of the vocabulary once
    x_RN: torch.Tensor  #: float64, or float32 where a device has no other
    top_R1: torch.Tensor  #: of all tokens before the first cut since the last scale,
    mass_R1: torch.Tensor  #: and the sum of exp(x - top) of these
    odd_R1: torch.Tensor  #: bool: from these rows nothing can be drawn, and their scores are all 0

    @property
    def inside(self) -> torch.Tensor:
        return self.x_RN > -torch.inf

    @property
    def below(self) -> torch.Tensor:
        """Scores from the top: [R, N]."""
        return self.x_RN - self.x_RN.amax(1, keepdim=True)

    def only(self, keep_RN: torch.Tensor) -> Kept:
        """After a cut."""
        return self._replace(x_RN=torch.where(keep_RN, self.x_RN, -torch.inf))


def everything(x_RV: torch.Tensor, odd_R1: torch.Tensor) -> Kept:
    """All tokens; those of equal scores by their ids."""
    x_RN, ids_RN = torch.sort(x_RV, dim=1, descending=True, stable=True)
    return uncut(ids_RN, x_RN, odd_R1)


def uncut(ids_RN: torch.Tensor, x_RN: torch.Tensor, odd_R1: torch.Tensor) -> Kept:
    """Tokens in order, none of which has been cut."""
    return Kept(ids_RN, x_RN, x_RN[:, :1], (x_RN - x_RN[:, :1]).exp().sum(1, keepdim=True), odd_R1)


def first(inside_RN: torch.Tensor) -> torch.Tensor:
    """Which token is the first that is in: bool [R, N]."""
    place_N = torch.arange(inside_RN.shape[1], device=inside_RN.device)
    return place_N == inside_RN.to(torch.int8).argmax(1, keepdim=True)


def by_id(kept: Kept, size: int) -> torch.Tensor:
    """The scores in the order of ids, at least ``size`` of them: what is behind the last id is out."""
    out_RN = kept.x_RN.new_full((len(kept.x_RN), size), -torch.inf)
    return out_RN.scatter(1, kept.ids_RN, kept.x_RN)


def log_chance(kept: Kept, tokens_R: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of tokens that are in: [R, 1]."""
    below_RN = kept.below
    own_R1 = torch.where(kept.ids_RN == tokens_R[:, None], below_RN, -torch.inf).amax(1, keepdim=True)
    return own_R1 - below_RN.exp().sum(1, keepdim=True).log()


def statistics(kept: Kept, wanted: frozenset[str]) -> Row:
    """What rules see of tokens, [R, 1] each, their scores from the top; what is not wanted may be missing."""
    inside_RN, below_RN = kept.inside, kept.below
    below_RN = torch.where(inside_RN, below_RN.clamp(min=torch.finfo(below_RN.dtype).min), 0.0)
    e_RN = torch.where(inside_RN, below_RN.exp(), 0.0)
    n_R1 = inside_RN.sum(1, keepdim=True).to(below_RN.dtype)
    mass_R1 = square_R1 = entropy_R1 = mean_R1 = var_R1 = whole_R1 = e_RN.sum(1, keepdim=True)
    if "square" in wanted:
        square_R1 = (e_RN * e_RN).sum(1, keepdim=True)
    if "entropy" in wanted:
        entropy_R1 = mass_R1.log() - (e_RN * below_RN).sum(1, keepdim=True) / mass_R1
    if wanted & {"mean", "var"}:
        mean_R1 = below_RN.sum(1, keepdim=True) / n_R1
        away_RN = torch.where(inside_RN, below_RN - mean_R1, 0.0)
        var_R1 = (away_RN * away_RN).sum(1, keepdim=True) / n_R1
    if "whole" in wanted:
        over_R1 = kept.top_R1 - kept.x_RN.amax(1, keepdim=True)
        whole_R1 = torch.maximum(kept.mass_R1 * over_R1.exp(), mass_R1)
    return Row(n_R1, torch.zeros_like(n_R1), mass_R1, square_R1, entropy_R1, mean_R1, var_R1, whole_R1)
