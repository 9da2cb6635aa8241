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
    return index_of(Edits(ids_RK, *(column_RK.gather(1, order_RK) for column_RK in edits[1:])), size)


def index_of(edits: Edits, size: int) -> Index:
    """The same of edits whose tokens ascend; those at ``size`` or above are none."""
    ids_RK, width = edits.ids_RK, -(-size // 32)
    there_RK = ids_RK < size
    word_RK = torch.where(there_RK, ids_RK // 32, width)
    nothing_RW = torch.zeros(len(ids_RK), width + 1, dtype=torch.int64, device=ids_RK.device)
    bit_RK = torch.ones_like(ids_RK) << (ids_RK % 32)
    words_RW = nothing_RW.scatter_add(1, word_RK, torch.where(there_RK, bit_RK, 0))[
        :, :-1
    ]  # a sum, as each is there once
    words_RW = torch.where(words_RW >= 2**31, words_RW - 2**32, words_RW)
    count_RW = nothing_RW.scatter_add(1, word_RK, there_RK.to(torch.int64))[:, :-1]
    base_RW = count_RW.cumsum(1) - count_RW
    entries_RK3 = torch.stack([column_RK.to(torch.float64) for column_RK in edits[1:]], 2)
    return Index(torch.stack((words_RW, base_RW), 2).to(torch.int32), entries_RK3)
