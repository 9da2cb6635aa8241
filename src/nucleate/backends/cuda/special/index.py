"""Edits as kernels look them up: a bit per token, and where the entries of 32 tokens begin. Knows no kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nucleate.backends.cuda.edits import Edits


class Index(NamedTuple):
    """The entries of a row in ascending order of their tokens."""

    words_RW2: torch.Tensor  #: int32: which of 32 tokens have an entry, lowest bit first; how many come before these
    entries_RK3: torch.Tensor  #: float64: before, scale, after of ``Edits``


def indexed(edits: Edits, size: int) -> Index:
    """The index of some edits for rows of a size."""
    ids_RK, order_RK = torch.where(edits.ids_RK < 0, size, edits.ids_RK).sort(1)
    width = -(-size // 32)
    has_RV = torch.zeros(len(ids_RK), 32 * width + 1, dtype=torch.int64, device=ids_RK.device)
    has_RV.scatter_(1, torch.where(ids_RK < size, ids_RK, 32 * width), 1)
    has_RWB = has_RV[:, :-1].view(len(ids_RK), width, 32)
    words_RW = (has_RWB << torch.arange(32, device=ids_RK.device)).sum(2)
    words_RW = torch.where(words_RW >= 2**31, words_RW - 2**32, words_RW)
    count_RW = has_RWB.sum(2)
    base_RW = count_RW.cumsum(1) - count_RW
    entries_RK3 = torch.stack([column_RK.gather(1, order_RK).to(torch.float64) for column_RK in edits[1:]], 2)
    return Index(torch.stack((words_RW, base_RW), 2).to(torch.int32), entries_RK3)
