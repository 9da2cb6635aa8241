"""Rows through the kernels: their scratch memory, and one call per step. Knows no kernel's inside.

A call asks for no memory and waits for nothing, so that it can be part of a CUDA graph: tokens, seeds and steps stay on
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nucleate.backends.cuda.special.finish import finish, resume
from nucleate.backends.cuda.special.histogram import BINS
from nucleate.backends.cuda.special.index import Index
from nucleate.backends.cuda.special.numbers import COLUMNS
from nucleate.backends.cuda.special.pool import TILE
from nucleate.backends.cuda.special.select import FLAGS, VIEW, collect, tally
from nucleate.backends.cuda.special.stats import stats
from nucleate.core.noise import GROUP_SIZE

FLOATS = torch.float32, torch.float16, torch.bfloat16
FEW_ROWS, GROUPS_OF_FEW, GROUPS_OF_MANY = 32, 4, 16
"""How many groups a program of the first kernel reads: with more rows there are enough programs."""
TILES_OF_FEW, TILES_OF_MANY = 2, 8
"""How many tiles of 2048 tokens a program of ``select`` reads."""
OPTIONS_OF_STATS = {"num_warps": 1, "enable_fp_fusion": True}
OPTIONS_OF_SELECT = {"num_warps": 8, "enable_fp_fusion": False}
OPTIONS_OF_FINISH = {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False}
"""Left to itself, the assembler takes 128 registers for this kernel and spills. Nothing is fused where the rounding of
float64 may decide, as on the CPU."""


@dataclass
class Workspace:
    """Scratch memory for up to ``rows`` rows of ``size`` scores, and the results of the last call."""

    rows: int
    size: int
    device: Any = "cuda"
    tokens_R: torch.Tensor = field(init=False)  #: int64: the draws, -1 where there is none
    states_R: torch.Tensor = field(init=False)  #: int32: 0 drawn, 1 NaN or +inf, 2 no finite score
    cuts_R: torch.Tensor = field(init=False)  #: float32, as of the next: tokens above it were left,
    lasts_R: torch.Tensor = field(init=False)  #: int32: and those at it with an id up to this
    logprobs_R: torch.Tensor = field(init=False)  #: float64, of the logits as given; written where a call reports
    ranks_R: torch.Tensor = field(init=False)  #: int32, likewise

    def __post_init__(self) -> None:
        self.width = max(2, 1 << (-(-self.size // GROUP_SIZE) - 1).bit_length())
        width, bins, tile = self.width, int(BINS), int(TILE)
        self.tokens_R, self.states_R = self._new(torch.int64), self._new(torch.int32)
        self.cuts_R, self.lasts_R = self._new(torch.float32), self._new(torch.int32)
        self.logprobs_R, self.ranks_R = self._new(torch.float64), self._new(torch.int32)
        self.tops, self.masses = self._new(torch.float32, width), self._new(torch.float32, width)
        self.raw_tops, self.raw_masses = self._new(torch.float32, width), self._new(torch.float32, width)
        self.moments = self._new(torch.float64, 3, width)
        self.flags, self.views = self._new(torch.int32, int(FLAGS)), self._new(torch.float64, int(VIEW))
        self.counts, self.amounts = self._new(torch.int32, 2, bins), self._new(torch.int64, 2, bins)
        self.groups = self._new(torch.int32, width)
        self.some, self.some_ids = self._new(torch.float32, tile), self._new(torch.int32, tile)

    def _new(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self.rows, *shape), dtype=dtype, device=self.device)


def sample(
    logits_RV: torch.Tensor,
    numbers_RC: torch.Tensor,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    work: Workspace,
    index: Index | None = None,
    mask_RW: torch.Tensor | None = None,
    *,
    out_R: torch.Tensor | None = None,
    cuts: bool = True,
    report: bool = False,
) -> torch.Tensor:
    """Draw one token per row: int64 [R], -1 where a row holds NaN, +inf or no finite score.

    logits_RV: float32, float16 or bfloat16, with any strides. numbers_RC: float64, see ``numbers.Numbers``. seeds_R,
    steps_R: int64, the bits of integers in 0..2**64 - 1; the steps of rows that were drawn move on. mask_RW: int32
    [R, V / 32 or more], what is allowed, lowest bit first. out_R: where tokens are written; by default, and then the
    next call writes there too, a part of ``work``. cuts: whether any row may have top-k or top-p; two launches are
    enough where none has. report: whether ``work.logprobs_R`` and ``work.ranks_R`` are wanted.

    Raises ValueError for shapes or types that are others.
    """
    rows, size = logits_RV.shape
    if logits_RV.dtype not in FLOATS or size != work.size or not 0 < rows <= work.rows:
        there_is = f"room for up to {work.rows} rows of {work.size} float32, float16 or bfloat16"
        raise ValueError(f"the logits are {rows} rows of {size} {logits_RV.dtype}, but there is {there_is}")
    out_R = work.tokens_R[:rows] if out_R is None else out_R
    _check("numbers", numbers_RC, torch.float64, rows, int(COLUMNS))
    for name, column in (("seeds", seeds_R), ("steps", steps_R), ("out", out_R)):
        _check(name, column[:, None], torch.int64, rows, 1)
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
    reports = (work.raw_tops, work.raw_masses) if report else (None, None)
    groups = work.tops, work.masses, work.moments, *reports
    part, at_once = GROUPS_OF_FEW if rows <= FEW_ROWS else GROUPS_OF_MANY, 2 if index is None else 1
    grid = -(-size // (part * GROUP_SIZE)), rows
    stats[grid](*source, *groups, part // at_once, width=work.width, tile_groups=at_once, **OPTIONS_OF_STATS)
    sums, pool = (work.flags, work.views, work.counts, work.amounts), (work.groups, work.some, work.some_ids)
    found = out_R, work.states_R, work.cuts_R, work.lasts_R
    found += (work.logprobs_R, work.ranks_R) if report else (None, None)
    ending = *source, seeds_R, steps_R, *groups, *sums, *pool, *found
    finish[(rows,)](*ending, width=work.width, **OPTIONS_OF_FINISH)
    if cuts:
        tiles = TILES_OF_FEW if rows <= FEW_ROWS else TILES_OF_MANY
        grid = -(-size // (tiles * int(TILE))), rows
        tally[grid](*source, work.tops, *sums, tiles, width=work.width, **OPTIONS_OF_SELECT)
        collect[grid](*source, work.tops, *sums, *pool, tiles, width=work.width, **OPTIONS_OF_SELECT)
        resume[(rows,)](*ending, width=work.width, **OPTIONS_OF_FINISH)
    return out_R


def _check(name: str, column: torch.Tensor, dtype: torch.dtype, rows: int, count: int, *, more: bool = False) -> None:
    """Raise ValueError for a column of another type or shape, or one whose rows do not lie in one piece."""
    enough = column.shape[1] >= count if more else column.shape[1] == count
    packed = column.stride(1) == 1 and (more or rows == 1 or column.stride(0) == count)
    if column.dtype != dtype or len(column) != rows or not enough or not (packed or column.numel() == 1):
        shape = list(column.shape)
        raise ValueError(f"{name} must be {dtype} [{rows}, {count}] in one piece, got {column.dtype} {shape}")


def _stride(column: torch.Tensor | None) -> int:
    return 0 if column is None else column.stride(0)
