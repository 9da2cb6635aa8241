"""Rows through the two kernels: room to work in, and one call per step. Knows no kernel's inside.

A call asks for no memory and waits for nothing, so that it can be part of a CUDA graph: tokens, seeds and steps stay on
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nucleate.backends.cuda.special.finish import finish
from nucleate.backends.cuda.special.index import Index
from nucleate.backends.cuda.special.stats import stats
from nucleate.core.noise import GROUP_SIZE

FLOATS = torch.float32, torch.float16, torch.bfloat16
ROOM = 2048
"""So many tokens of a row are gathered at most."""
FEW_ROWS, GROUPS_OF_FEW, GROUPS_OF_MANY = 32, 4, 16
"""How many groups a program of the first kernel reads: with more rows there are enough programs."""
OPTIONS_OF_STATS = {"num_warps": 1, "enable_fp_fusion": True}
OPTIONS_OF_FINISH = {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": True}
"""Left to itself, the assembler takes 128 registers for the second kernel and spills."""


@dataclass
class Workspace:
    """Room for up to ``rows`` rows of ``size`` scores, and what calls leave there. reports: log-probabilities too."""

    rows: int
    size: int
    device: Any = "cuda"
    reports: bool = False
    tokens_R: torch.Tensor = field(init=False)  #: int64: the draws, -1 where there is none
    states_R: torch.Tensor = field(init=False)  #: int32: 0 drawn, 1 NaN or +inf, 2 no finite score
    cuts_R: torch.Tensor = field(init=False)  #: float32, as of the next: tokens above it were left,
    lasts_R: torch.Tensor = field(init=False)  #: int32: and those at it with an id up to this
    logprobs_R: torch.Tensor | None = field(init=False, default=None)  #: float64, of the logits as given
    ranks_R: torch.Tensor | None = field(init=False, default=None)  #: int32

    def __post_init__(self) -> None:
        self.width = max(2, 1 << (-(-self.size // GROUP_SIZE) - 1).bit_length())
        groups, some = (self.rows, self.width), (self.rows, ROOM)
        self.tokens_R, self.states_R = self._new(torch.int64, self.rows), self._new(torch.int32, self.rows)
        self.cuts_R, self.lasts_R = self._new(torch.float32, self.rows), self._new(torch.int32, self.rows)
        self.tops, self.masses = self._new(torch.float32, *groups), self._new(torch.float32, *groups)
        self.moments = self._new(torch.float64, self.rows, 3, self.width)
        self.groups, self.some_ids = self._new(torch.int32, *groups), self._new(torch.int32, *some)
        self.some, self.some_weights = self._new(torch.float32, *some), self._new(torch.float64, *some)
        self.raw_tops = self.raw_masses = None
        if self.reports:
            self.raw_tops, self.raw_masses = self._new(torch.float32, *groups), self._new(torch.float32, *groups)
            self.logprobs_R, self.ranks_R = self._new(torch.float64, self.rows), self._new(torch.int32, self.rows)

    def _new(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def sample(
    logits_RV: torch.Tensor,
    numbers_RC: torch.Tensor,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    work: Workspace,
    index: Index | None = None,
    mask_RW: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row: int64 [R], a part of ``work``; -1 where a row holds NaN, +inf or no finite score.

    logits_RV: float32, float16 or bfloat16, with any strides. numbers_RC: float64, see ``plan.Numbers``. seeds_R,
    steps_R: int64, the bits of integers in 0..2**64 - 1; the steps of rows that were drawn move on. mask_RW: int32
    [R, V / 32 or more], what is allowed, lowest bit first. Raises ValueError for shapes or types that are others.
    """
    rows, size = logits_RV.shape
    if logits_RV.dtype not in FLOATS or size != work.size or not 0 < rows <= work.rows:
        there_is = f"room for up to {work.rows} rows of {work.size} float32, float16 or bfloat16"
        raise ValueError(f"the logits are {rows} rows of {size} {logits_RV.dtype}, but there is {there_is}")
    _check("numbers", numbers_RC, torch.float64, rows, 7)
    _check("seeds", seeds_R[:, None], torch.int64, rows, 1)
    _check("steps", steps_R[:, None], torch.int64, rows, 1)
    words = -(-size // 32)
    if mask_RW is not None:
        _check("mask", mask_RW, torch.int32, rows, words, more=True)
    if index is not None and any(len(column) != rows or not column.is_contiguous() for column in index):
        raise ValueError(f"the index of edits must be of {rows} rows, in one piece, got {len(index.words_RW2)}")
    lookup, entries = index or (None, None)
    source = (
        *(logits_RV, logits_RV.stride(0), logits_RV.stride(1), size, mask_RW, _stride(mask_RW)),
        *(lookup, _stride(lookup), entries, _stride(entries), numbers_RC),
    )
    told = work.tops, work.masses, work.moments, work.raw_tops, work.raw_masses
    part, at_once = GROUPS_OF_FEW if rows <= FEW_ROWS else GROUPS_OF_MANY, 2 if index is None else 1
    grid = -(-size // (part * GROUP_SIZE)), rows
    stats[grid](*source, *told, part // at_once, width=work.width, tile_groups=at_once, **OPTIONS_OF_STATS)
    room = work.groups, work.some, work.some_ids, work.some_weights
    out = work.tokens_R, work.states_R, work.cuts_R, work.lasts_R, work.logprobs_R, work.ranks_R
    finish[(rows,)](*source, seeds_R, steps_R, *told, *room, *out, width=work.width, **OPTIONS_OF_FINISH)
    return work.tokens_R[:rows]


def _check(name: str, column: torch.Tensor, dtype: torch.dtype, rows: int, count: int, *, more: bool = False) -> None:
    """Raise ValueError for a column of another type or shape, or one whose rows do not lie in one piece."""
    enough = column.shape[1] >= count if more else column.shape[1] == count
    packed = column.stride(1) == 1 and (more or rows == 1 or column.stride(0) == count)
    if column.dtype != dtype or len(column) != rows or not enough or not (packed or column.numel() == 1):
        shape = list(column.shape)
        raise ValueError(f"{name} must be {dtype} [{rows}, {count}] in one piece, got {column.dtype} {shape}")


def _stride(column: torch.Tensor | None) -> int:
    return 0 if column is None else column.stride(0)
