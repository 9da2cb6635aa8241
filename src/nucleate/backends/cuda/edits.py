"""What changes the scores of a few tokens of each row: penalties, biases and bans as columns. Knows no stage."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Edits(NamedTuple):
    """At most one entry per token of a row: x + before; divided by scale, or multiplied where not above 0; - after.

    That is a bias (or -inf, a ban), a repetition penalty, and the sum of frequency and presence penalties. Where a
    score is -inf it stays. The score is rounded to float32 after the bias and at the end, as on the CPU.
    """

    ids_RK: torch.Tensor  #: int64; -1 where there is no entry
    before_RK: torch.Tensor  #: float64 (float32 for devices without), as the next two; 0 does nothing
    scale_RK: torch.Tensor  #: 1 does nothing
    after_RK: torch.Tensor  #: 0 does nothing


def edited(x_RV: torch.Tensor, edits: Edits) -> torch.Tensor:
    """The scores after the edits, float32; NaN and +inf stay."""
    ids_RK, before_RK, scale_RK, after_RK = edits
    given_RK = x_RV.gather(1, ids_RK.clamp(min=0))
    y_RK = (given_RK.to(before_RK.dtype) + before_RK).to(x_RV.dtype).to(before_RK.dtype)
    y_RK = torch.where(y_RK > 0, y_RK / scale_RK, y_RK * scale_RK) - after_RK
    y_RK = torch.where(given_RK > -torch.inf, y_RK.to(x_RV.dtype), given_RK)
    size = x_RV.shape[1]
    room_RV = torch.cat((x_RV, x_RV[:, :1]), 1)  # what has no entry is written behind the row
    return room_RV.scatter(1, torch.where(ids_RK < 0, size, ids_RK), y_RK)[:, :size]


def forbidden(mask_RW: torch.Tensor, size: int) -> torch.Tensor:
    """A packed bitmask as booleans [R, V]: True where the token is not allowed. mask_RW: int32, lowest bit first."""
    ids_V = torch.arange(size, device=mask_RW.device)
    return (mask_RW[:, ids_V // 32] >> (ids_V % 32).to(torch.int32)) & 1 == 0
