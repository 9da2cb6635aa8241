"""Launches the kernels: scratch memory, and one call per step.

A call allocates no memory and does not synchronise, so it can be captured in a CUDA graph: tokens and the state of rows
stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nucleate.sampling.backends.triton.block_stats import stats
from nucleate.sampling.backends.triton.candidate_pool import TILE, PoolScratch
from nucleate.sampling.backends.triton.device_memory import GroupSums, KernelOutput, LogitsSource, PendingRows, RowState
from nucleate.sampling.backends.triton.histogram import BINS
from nucleate.sampling.backends.triton.histogram_selection import FLAGS, VIEW, collect, tally
from nucleate.sampling.backends.triton.sample_kernel import finish, resume
from nucleate.sampling.noise import GROUP_SIZE

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
class TritonWorkspace:
    """Scratch memory for up to ``rows`` rows of ``size`` scores, and the results of the last call."""

    rows: int
    size: int
    device: Any = "cuda"
    tokens_R: torch.Tensor = field(init=False)  #: see ``device_memory.KernelOutput``, as the next
    states_R: torch.Tensor = field(init=False)
    cuts_R: torch.Tensor = field(init=False)
    lasts_R: torch.Tensor = field(init=False)
    logprobs_R: torch.Tensor = field(init=False)  #: written where a call reports
    ranks_R: torch.Tensor = field(init=False)  #: likewise

    def __post_init__(self) -> None:
        self.width = max(2, 1 << (-(-self.size // GROUP_SIZE) - 1).bit_length())
        width, bins, tile = self.width, int(BINS), int(TILE)
        self.tokens_R, self.states_R = self._new(torch.int64), self._new(torch.int32)
        self.cuts_R, self.lasts_R = self._new(torch.float32), self._new(torch.int32)
        self.logprobs_R, self.ranks_R = self._new(torch.float64), self._new(torch.int32)
        tops, masses, raw_tops, raw_masses = (self._new(torch.float32, width) for _ in range(4))
        self.sums = GroupSums(tops, masses, self._new(torch.float64, 3, width), raw_tops, raw_masses)
        flags, views = self._new(torch.int32, int(FLAGS)), self._new(torch.float64, int(VIEW))
        self.waiting = PendingRows(flags, views, self._new(torch.int32, 2, bins), self._new(torch.int64, 2, bins))
        some, ids = self._new(torch.float32, tile), self._new(torch.int32, tile)
        self.room = PoolScratch(self._new(torch.int32, width), some, ids)

    def _new(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self.rows, *shape), dtype=dtype, device=self.device)


def sample(
    logits_RV: torch.Tensor,
    state: RowState,
    work: TritonWorkspace,
    mask_RW: torch.Tensor | None = None,
    *,
    out_R: torch.Tensor | None = None,
    cuts: bool = True,
    report: bool = False,
) -> torch.Tensor:
    """Draw one token per row: int64 [R], -1 where a row holds NaN, +inf or no finite score. The others go on with it.

    logits_RV: float32, float16 or bfloat16, with any strides. state: of the rows; slots as int64 [R], each once.
    mask_RW: int32 [R, V / 32 or more], what is allowed, lowest bit first. out_R: where tokens are written; by default,
    and then the next call writes there too, a part of ``work``. cuts: whether any row may have top-k or top-p; two
    launches are enough where none has. report: whether ``workspace.logprobs_R`` and ``workspace.ranks_R`` are wanted.

    Raises ValueError for shapes or types that are others.
    """
    rows, size = logits_RV.shape
    if logits_RV.dtype not in FLOATS or size != work.size or not 0 < rows <= work.rows:
        there_is = f"room for up to {work.rows} rows of {work.size} float32, float16 or bfloat16"
        raise ValueError(f"the logits are {rows} rows of {size} {logits_RV.dtype}, but there is {there_is}")
    out_R = work.tokens_R[:rows] if out_R is None else out_R
    _check("slots", state.slots[:, None], torch.int64, rows, 1)
    _check("out", out_R[:, None], torch.int64, rows, 1)
    if mask_RW is not None:
        _check("mask", mask_RW, torch.int32, rows, -(-size // 32))
    stride = 0 if mask_RW is None else mask_RW.stride(0)
    source = LogitsSource(logits_RV, logits_RV.stride(0), logits_RV.stride(1), size, mask_RW, stride)
    sums, reports = work.sums, (work.logprobs_R, work.ranks_R)
    if not report:
        sums, reports = sums._replace(raw_tops=None, raw_masses=None), (None, None)
    out = KernelOutput(out_R, work.states_R, work.cuts_R, work.lasts_R, *reports)
    part, few, width = GROUPS_OF_FEW if rows <= FEW_ROWS else GROUPS_OF_MANY, rows <= FEW_ROWS, work.width
    grid = -(-size // (part * GROUP_SIZE)), rows
    stats[grid](source, state, sums, part // 2, width=width, tile_groups=2, **OPTIONS_OF_STATS)
    finish[(rows,)](source, state, sums, work.waiting, work.room, out, width=width, **OPTIONS_OF_FINISH)
    if cuts:
        tiles = TILES_OF_FEW if few else TILES_OF_MANY
        grid = -(-size // (tiles * int(TILE))), rows
        tally[grid](source, state, sums, work.waiting, tiles, width=width, **OPTIONS_OF_SELECT)
        collect[grid](source, state, sums, work.waiting, work.room, tiles, width=width, **OPTIONS_OF_SELECT)
        resume[(rows,)](source, state, sums, work.waiting, work.room, out, width=width, **OPTIONS_OF_FINISH)
    return out_R


def _check(name: str, column: torch.Tensor, dtype: torch.dtype, rows: int, count: int) -> None:
    """Raise ValueError for a column of another type or fewer columns, or one whose rows do not lie in one piece."""
    packed = column.stride(1) == 1 and (count > 1 or rows == 1 or column.stride(0) == 1)
    if column.dtype != dtype or len(column) != rows or column.shape[1] < count or not (packed or column.numel() == 1):
        shape = list(column.shape)
        raise ValueError(f"{name} must be {dtype} [{rows}, {count}] in one piece, got {column.dtype} {shape}")
