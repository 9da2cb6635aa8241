"""What changes the scores of a few tokens of each row: penalties, biases and bans as columns. Knows no stage."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Edits(NamedTuple):
    """At most one entry per token of a row: x + before; divided by scale, or multiplied where not above 0; - after.

    That is a bias (or -inf, a ban), a repetition penalty, and the sum of frequency and presence penalties. Where a
    score is -inf it stays. Kernels round the score to float32 after the bias and at the end; tensors never do.
    """

    ids_RK: torch.Tensor  #: int64; V where there is no entry
    before_RK: torch.Tensor  #: float64 (float32 for devices without), as the next two; 0 does nothing
    scale_RK: torch.Tensor  #: 1 does nothing
    after_RK: torch.Tensor  #: 0 does nothing


def edited(x_RV: torch.Tensor, edits: Edits) -> torch.Tensor:
    """The scores after the edits; NaN and +inf stay."""
    ids_RK, before_RK, scale_RK, after_RK = edits
    room_RV = torch.nn.functional.pad(x_RV, (0, 1))  # what has no entry is read and written behind the row
    given_RK = room_RV.gather(1, ids_RK)
    y_RK = given_RK + before_RK
    y_RK = torch.where(y_RK > 0, y_RK / scale_RK, y_RK * scale_RK) - after_RK
    y_RK = torch.where(given_RK > -torch.inf, y_RK, given_RK)
    return room_RV.scatter(1, ids_RK, y_RK)[:, :-1]
