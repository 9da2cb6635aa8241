"""The scores of rows as tensors, after their edits: not rounded to float32 in between, as the chain's are."""

from __future__ import annotations

import torch

from nucleate.backends.cuda.edits import Edits, edited, forbidden


def scores(
    logits_RV: torch.Tensor, floats: torch.dtype, edits: Edits | None, mask_RW: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores, and which rows [R, 1] are odd: with NaN, +inf or no finite score. All scores of these are 0."""
    x_RV = logits_RV.to(torch.float32).to(floats)
    odd_R1 = (~(x_RV < torch.inf)).any(1, keepdim=True)
    if edits is not None:
        x_RV = edited(x_RV, edits)
        odd_R1 = odd_R1 | (~(x_RV < torch.inf)).any(1, keepdim=True)
    x_RV = torch.where(x_RV == 0, 0.0, x_RV)  # of -0.0 it makes 0.0: they are equal
    return masked(x_RV, odd_R1, mask_RW)


def masked(x_RV: torch.Tensor, odd_R1: torch.Tensor, mask_RW: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a bitmask leaves of scores; without one, of which all may be out, too."""
    if mask_RW is not None:
        x_RV = torch.where(forbidden(mask_RW, x_RV.shape[1]), -torch.inf, x_RV)
    odd_R1 = odd_R1 | ~(x_RV > -torch.inf).any(1, keepdim=True)
    return torch.where(odd_R1, 0.0, x_RV), odd_R1
