"""Launches the kernels of a step, and allocates their scratch memory. With the kernels that complete a row.

A step allocates nothing and does not synchronise, so it can be captured in a CUDA graph.

``finish`` completes all rows except those with too many candidates, which become pending; ``resume`` completes these.
One program per row truncates, samples, and reports the token's logprob and rank. Gumbel-max sampling has two levels, a
group and then one of its tokens, in float64 as in the reference. The float32 masses only select the groups
that can win; the tokens of these groups are read again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton import jit

from nucleate.sampling import noise
from nucleate.sampling.gpu.triton import device_memory as memory
from nucleate.sampling.gpu.triton.candidate_cuts import GroupStats, apply_late_min_p, truncate
from nucleate.sampling.gpu.triton.device_memory import (
    GROUP_SIZE,
    MAX_ID,
    SEED,
    STEP,
    TILE,
    TILE_GROUPS,
    GroupSums,
    KeptRange,
    KernelOutput,
    LogitsSource,
    PendingRows,
    PoolScratch,
    RowState,
    is_kept,
    list_groups,
    load_scores,
    row_scratch,
    stats,
    tile_ids,
)
from nucleate.sampling.gpu.triton.histogram_selection import (
    BINS,
    NUM_FLAGS,
    NUM_VIEW_VALUES,
    PENDING,
    WEIGHT_UNIT,
    collect,
    load_view,
    row_pending,
    select_pending,
    tally,
)
from nucleate.sampling.gpu.triton.triton_numbers import (
    GROUP,
    INFINITY,
    LOWEST,
    MASS_ERROR,
    TOKEN,
    exact_weight,
    exponentials,
)


@jit
def select_group(source, scratch, groups, kept, top, params, seed, step, width: tl.constexpr):
    """The group with the highest log mass plus Gumbel noise; equivalently, with the lowest E / mass, E exponential.

    An upper bound on the mass gives a lower bound on this time. Groups are evaluated in about the order of these
    bounds, until no remaining bound is below the best time.
    """
    bound_G = tl.where(groups.tops >= kept.threshold, mass_bounds(groups, top, params), 0.0)
    time_G = exponentials(seed, step, GROUP, tl.arange(0, width)) / tl.where(bound_G > 0.0, bound_G, 1.0)
    time_G = tl.where(bound_G > 0.0, time_G, INFINITY)
    limit = 4.0 / tl.sum(bound_G, 0)  # about four groups are below it
    best, winner = limit * 0.0 - INFINITY, tl.argmin(time_G, 0)
    next_time, end = tl.min(time_G, 0), limit * 0.0 + INFINITY
    while (next_time <= end) & (next_time < INFINITY):
        limit = tl.maximum(limit, 2.0 * next_time)
        chosen_G = time_G <= tl.minimum(limit, end)
        count = list_groups(chosen_G, scratch, width)
        key, group = best_group(source, scratch, count, kept, top, params, seed, step)
        better = (key > best) | ((key == best) & (key > -INFINITY) & (group < winner))
        best, winner = tl.where(better, key, best), tl.where(better, group, winner)
        end = tl.exp(-best) * (1.0 + 1e-9)
        time_G = tl.where(chosen_G & (tl.cumsum(chosen_G.to(tl.int32), 0) <= TILE_GROUPS), INFINITY, time_G)
        next_time = tl.min(time_G, 0)
    return winner


@jit
def mass_bounds(groups, top, params):
    """Upper bounds on the masses of groups after the late temperature, before top-p."""
    mass_G = groups.masses
    if (params.p < 1.0) & (params.late_t != 1.0):
        base_G = groups.own
        if params.late_t > 1.0:  # the power mean of 256 weights of at most 1
            base_G = tl.exp(tl.log(tl.maximum(base_G, 1.0) / GROUP_SIZE) / params.late_t) * GROUP_SIZE
        mass_G = tl.where(groups.tops > -INFINITY, base_G * tl.exp(scaled_scores(groups.tops, top, params)), 0.0)
    return mass_G * (1.0 + MASS_ERROR)


@jit
def best_group(source, scratch, count, kept, top, params, seed, step):
    """The highest score with noise among the first tile of listed groups, and its group."""
    ids = tile_ids(scratch, count, 0)
    x = load_scores(source, ids)
    y = tl.where(is_kept(x, ids, kept), scaled_scores(x, top, params), -INFINITY)
    y_GT = tl.reshape(y, (TILE_GROUPS, GROUP_SIZE))
    top_G = tl.max(y_GT, 1)
    base_G = tl.where(top_G > -INFINITY, top_G, 0.0)
    mass_G = tl.sum(tl.exp(y_GT - base_G[:, None]), 1)
    slot = tl.arange(0, TILE_GROUPS)
    group_G = tl.load(scratch.groups + slot, mask=slot < count, other=MAX_ID)
    key_G = top_G + tl.log(tl.maximum(mass_G, 1.0)) - tl.log(exponentials(seed, step, GROUP, group_G))
    key = tl.max(key_G, 0)
    return key, tl.min(tl.where(key_G == key, group_G, MAX_ID), 0)


@jit
def select_token(source, group, kept, top, params, seed, step):
    """The kept token of a group with the highest score plus noise."""
    ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    x = load_scores(source, ids)
    key = scaled_scores(x, top, params) - tl.log(exponentials(seed, step, TOKEN, ids))
    key = tl.where(is_kept(x, ids, kept), key, -INFINITY)
    return tl.min(tl.where(key == tl.max(key, 0), ids, MAX_ID), 0)


@jit
def scaled_scores(x, top, params):
    """Scores minus the top, after both temperatures: float64, with the rounding of the reference."""
    return (x.to(tl.float64) - top.to(tl.float64)) / params.t / params.late_t


SAMPLED, INVALID, EMPTY, INACTIVE = (tl.constexpr(status) for status in range(4))
"""The status of a row: sampled; has NaN or +inf; has no finite score; not active."""


@jit
def finish(source, state, sums, pending, scratch, out, width: tl.constexpr):
    """Grid: rows. Arguments: see ``device_memory``; scratch: see ``PoolScratch``."""
    row = memory.program_row()
    pending = row_pending(pending, row)
    scratch = row_scratch(scratch, row, width)
    group_G = tl.arange(0, width)
    valid_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
    tops_G = tl.load(sums.tops + row * width + group_G, mask=valid_G, other=-INFINITY)
    top = tl.max(tops_G, 0)
    top = tl.where(top == 0.0, 0.0, top)  # -0.0 becomes 0.0
    row_status = tl.where(top == INFINITY, INVALID, tl.where(top == -INFINITY, EMPTY, SAMPLED))
    if state.active is not None:
        row_status = tl.where(tl.load(state.active + row), row_status, INACTIVE)
    is_pending = tl.full((), 0, tl.int32)
    if row_status == SAMPLED:
        params, token = memory.load_params(memory.state_address(state, row)), tl.full((), MAX_ID, tl.int32)
        groups = load_groups(sums, tops_G, top, params, row, width)
        kept = KeptRange(top * 0.0 + LOWEST, token)
        if params.k == 1.0:
            ids = tl.argmax(tops_G, 0) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
            token = tl.min(tl.where(memory.load_scores(source, ids) == top, ids, MAX_ID), 0)
            kept = KeptRange(top, token)
        else:
            kept, is_pending = truncate(source, scratch, groups, top, params, pending, width)
        if is_pending == 0:
            sample_row(source, state, scratch, sums, groups, kept, top, params, token, out, row, width)
    else:
        tl.store(out.tokens + row, tl.full((), -1, tl.int64))
    tl.store(pending.flags + PENDING, is_pending)
    tl.store(out.status + row, row_status)


@jit
def resume(source, state, sums, pending, scratch, out, width: tl.constexpr):
    """The same for pending rows."""
    row = memory.program_row()
    pending = row_pending(pending, row)
    scratch = row_scratch(scratch, row, width)
    if tl.load(pending.flags + PENDING) != 0:
        params, view = memory.load_params(memory.state_address(state, row)), load_view(pending.views)
        kept = select_pending(source, scratch, pending, view, params, tl.load(pending.views + WEIGHT_UNIT), width)
        group_G, top = tl.arange(0, width), view.highest
        valid_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
        tops_G = tl.load(sums.tops + row * width + group_G, mask=valid_G, other=-INFINITY)
        groups = load_groups(sums, tops_G, top, params, row, width)
        sample_row(source, state, scratch, sums, groups, kept, top, params, kept.last_id, out, row, width)


@jit
def load_groups(sums, tops_G, top, params, row, width: tl.constexpr):
    own_G = tl.load(sums.masses + row * width + tl.arange(0, width), mask=tops_G > -INFINITY, other=0.0).to(tl.float64)
    moments = sums.moments + 3 * row * width
    return GroupStats(tops_G, own_G, own_G * relative_mass(tops_G, top, memory.group_temperature(params)), moments)


@jit
def sample_row(source, state, scratch, sums, groups, kept, top, params, token, out, row, width: tl.constexpr):
    """Sample one of the kept tokens, or take the token of a greedy row, and store the results."""
    address = memory.state_address(state, row)
    if params.k != 1.0:
        seed, step, kept = tl.load(address + SEED), tl.load(address + STEP), apply_late_min_p(kept, top, params)
        group = select_group(source, scratch, groups, kept, top, params, seed, step, width)
        token = select_token(source, group, kept, top, params, seed, step)
    memory.append_token(state, row, token)
    tl.store(out.tokens + row, token.to(tl.int64))
    tl.store(out.thresholds + row, kept.threshold)
    tl.store(out.last_ids + row, kept.last_id)
    if out.logprobs is not None:
        group_G = tl.arange(0, width)
        valid_G = group_G < tl.cdiv(source.size, GROUP_SIZE)
        raw_tops_G = tl.load(sums.raw_tops + row * width + group_G, mask=valid_G, other=-INFINITY)
        mass_G = tl.load(sums.raw_masses + row * width + group_G, mask=valid_G, other=0.0)
        logprob, rank = token_logprob(source, scratch, raw_tops_G, mass_G, token, width)
        tl.store(out.logprobs + row, logprob)
        tl.store(out.ranks + row, rank)


@jit
def relative_mass(tops_G, top, t):
    """The factor from the mass relative to the top of a group to the mass relative to the top of the row."""
    return exact_weight(tl.where(tops_G > -INFINITY, tops_G, top), top, t)


@jit
def token_logprob(source, scratch, tops_G, masses_G, token, width: tl.constexpr):
    """The raw logprob and the rank of a token, from 1."""
    top, x = tl.max(tops_G, 0), memory.load_logits(source, token)
    one = tl.full((), 1.0, tl.float64)
    mass = tl.sum(masses_G.to(tl.float64) * relative_mass(tops_G, top, one), 0)
    rank, count = tl.full((), 1, tl.int32), list_groups(tops_G >= x, scratch, width)
    for i in range(tl.cdiv(count, TILE_GROUPS)):
        ids = tile_ids(scratch, count, i)
        other = memory.load_logits(source, ids)
        rank += tl.sum(((other > x) | ((other == x) & (ids < token))).to(tl.int32), 0)
    return x.to(tl.float64) - top.to(tl.float64) - tl.log(mass), rank


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


class TritonWorkspace:
    """Scratch memory for up to ``rows`` rows of ``size`` scores, and the results of the last step.

    The results are those of ``device_memory.KernelOutput``; logprobs_R and ranks_R are written if ``report`` is set.
    """

    def __init__(self, rows: int, size: int, device: Any = "cuda") -> None:
        self.rows, self.size, self.device = rows, size, device
        self.width = max(2, 1 << (-(-size // noise.GROUP_SIZE) - 1).bit_length())
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
    grid = rows, -(-size // (groups_per_program * noise.GROUP_SIZE))
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
