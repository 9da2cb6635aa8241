"""Launches the kernels of a step, and allocates their scratch memory.

A step allocates nothing and does not synchronise, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nucleate.sampling.gpu.triton.candidate_pool import TILE, PoolScratch
from nucleate.sampling.gpu.triton.device_memory import (
    GroupSums,
    KernelOutput,
    LogitsSource,
    PendingRows,
    RowState,
    stats,
)
from nucleate.sampling.gpu.triton.histogram_selection import BINS, NUM_FLAGS, NUM_VIEW_VALUES, collect, tally
from nucleate.sampling.gpu.triton.sample_kernel import finish, resume
from nucleate.sampling.noise import GROUP_SIZE

FLOATS = torch.float32, torch.float16, torch.bfloat16
FEW_ROWS, GROUPS_OF_FEW, GROUPS_OF_MANY = 32, 4, 16
"""The number of groups per program of ``stats``, for up to FEW_ROWS rows and for more."""
TILES_OF_FEW, TILES_OF_MANY = 2, 8
"""The number of tiles of 2048 tokens per program of ``tally`` and ``collect``, likewise."""
OPTIONS_OF_STATS = {"num_warps": 1, "enable_fp_fusion": True}
OPTIONS_OF_SELECT = {"num_warps": 8, "enable_fp_fusion": False}
OPTIONS_OF_FINISH = {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False}
"""By default, the assembler limits this kernel to 128 registers and spills. No multiply-add is fused where the rounding
of float64 can affect the result, as on the CPU."""


@dataclass
class TritonWorkspace:
    """Scratch memory for up to ``rows`` rows of ``size`` scores, and the results of the last step."""

    rows: int
    size: int
    device: Any = "cuda"
    tokens_R: torch.Tensor = field(init=False)  #: these: see ``device_memory.KernelOutput``
    status_R: torch.Tensor = field(init=False)
    thresholds_R: torch.Tensor = field(init=False)
    last_ids_R: torch.Tensor = field(init=False)
    logprobs_R: torch.Tensor = field(init=False)  #: written if ``report`` is set
    ranks_R: torch.Tensor = field(init=False)  #: likewise

    def __post_init__(self) -> None:
        self.width = max(2, 1 << (-(-self.size // GROUP_SIZE) - 1).bit_length())
        width, bins, tile = self.width, int(BINS), int(TILE)
        self.tokens_R, self.status_R = self._new(torch.int64), self._new(torch.int32)
        self.thresholds_R, self.last_ids_R = self._new(torch.float32), self._new(torch.int32)
        self.logprobs_R, self.ranks_R = self._new(torch.float64), self._new(torch.int32)
        tops, masses, raw_tops, raw_masses = (self._new(torch.float32, width) for _ in range(4))
        self.sums = GroupSums(tops, masses, self._new(torch.float64, 3, width), raw_tops, raw_masses)
        flags, views = self._new(torch.int32, int(NUM_FLAGS)), self._new(torch.float64, int(NUM_VIEW_VALUES))
        self.pending = PendingRows(flags, views, self._new(torch.int32, 2, bins), self._new(torch.int64, 2, bins))
        some, ids = self._new(torch.float32, tile), self._new(torch.int32, tile)
        self.scratch = PoolScratch(self._new(torch.int32, width), some, ids)

    def _new(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self.rows, *shape), dtype=dtype, device=self.device)


def sample(
    logits_RV: torch.Tensor,
    state: RowState,
    work: TritonWorkspace,
    mask_RW: torch.Tensor | None = None,
    *,
    out_R: torch.Tensor | None = None,
    truncates: bool = True,
    report: bool = False,
) -> torch.Tensor:
    """Sample a token per row and append it: int64 [R], -1 for rows with NaN, +inf or no finite score.

    logits_RV: float32, float16 or bfloat16, with any strides. state: of the rows; slots: int64 [R], distinct.
    mask_RW: int32 [R, V / 32 or more], bitmask of allowed tokens, lowest bit first. out_R: receives the tokens; by
    default a buffer of ``work``, which the next step overwrites. truncates: whether any row may have top-k or top-p;
    otherwise two launches suffice. report: whether to compute ``work.logprobs_R`` and ``work.ranks_R``.

    Raises ValueError for other shapes or types.
    """
    rows, size = logits_RV.shape
    if logits_RV.dtype not in FLOATS or size != work.size or not 0 < rows <= work.rows:
        capacity = f"there is room for up to {work.rows} rows of {work.size} float32, float16 or bfloat16"
        raise ValueError(f"the logits are {rows} rows of {size} {logits_RV.dtype}, but {capacity}")
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
    out = KernelOutput(out_R, work.status_R, work.thresholds_R, work.last_ids_R, *reports)
    is_small, width = rows <= FEW_ROWS, work.width
    groups_per_program = GROUPS_OF_FEW if is_small else GROUPS_OF_MANY
    grid = rows, -(-size // (groups_per_program * GROUP_SIZE))
    stats[grid](source, state, sums, groups_per_program // 2, width=width, tile_groups=2, **OPTIONS_OF_STATS)
    finish[(rows,)](source, state, sums, work.pending, work.scratch, out, width=width, **OPTIONS_OF_FINISH)
    if truncates:
        tiles = TILES_OF_FEW if is_small else TILES_OF_MANY
        grid = rows, -(-size // (tiles * int(TILE)))
        tally[grid](source, state, sums, work.pending, tiles, width=width, **OPTIONS_OF_SELECT)
        collect[grid](source, state, sums, work.pending, work.scratch, tiles, width=width, **OPTIONS_OF_SELECT)
        resume[(rows,)](source, state, sums, work.pending, work.scratch, out, width=width, **OPTIONS_OF_FINISH)
    return out_R


def _check(name: str, column: torch.Tensor, dtype: torch.dtype, rows: int, count: int) -> None:
    """Raise ValueError for another type, too few columns, or rows that are not contiguous."""
    packed = column.stride(1) == 1 and (count > 1 or rows == 1 or column.stride(0) == 1)
    if column.dtype != dtype or len(column) != rows or column.shape[1] < count or not (packed or column.numel() == 1):
        shape = list(column.shape)
        raise ValueError(f"{name} must be {dtype} [{rows}, {count}] contiguous, got {column.dtype} {shape}")
