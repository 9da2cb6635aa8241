"""The kernels that complete a row: one program truncates, samples, and reports the token's logprob and rank.

``finish`` completes all rows except those with too many candidates, which become pending; ``resume`` completes these.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.triton import device_memory as memory
from nucleate.sampling.backends.triton.block_stats import GROUP_SIZE
from nucleate.sampling.backends.triton.candidate_cuts import GroupStats, apply_late_min_p, truncate
from nucleate.sampling.backends.triton.candidate_pool import (
    MAX_ID,
    TILE_GROUPS,
    KeptRange,
    list_groups,
    row_scratch,
    tile_ids,
)
from nucleate.sampling.backends.triton.device_memory import SEED, STEP
from nucleate.sampling.backends.triton.float_bits import INFINITY, LOWEST, exact_weight
from nucleate.sampling.backends.triton.gumbel_race import select_group, select_token
from nucleate.sampling.backends.triton.histogram_selection import (
    PENDING,
    WEIGHT_UNIT,
    load_view,
    row_pending,
    select_pending,
)

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
