"""The kernel arguments, as addresses of device memory, and the first kernel, which reads each logit once.

The arguments are logits, row state, scratch memory and results. Scores are the logits after the mask: -inf for masked
tokens. NaN and +inf stay, so that the row is invalid. ``stats`` stores the maximum and the mass of each group of 256
tokens.

A row also has a pool of at most 2048 candidate tokens, with an exact prefix selection. The amount of a token is an
integer: 1 for top-k, its fixed-point weight for top-p. So sums do not depend on the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.gpu import torch_device
from nucleate.sampling.gpu.triton.triton_numbers import (
    INFINITY,
    LOWEST,
    from_ordered,
    make_exponent,
    to_ordered,
    weights,
)
from nucleate.sampling.pipeline import FusedParams

COLUMNS, SEED = tl.constexpr(torch_device.COLUMNS), tl.constexpr(torch_device.SEED)
STEP, OFFSET = tl.constexpr(torch_device.STEP), tl.constexpr(torch_device.PROMPT_LENGTH)


class LogitsSource(NamedTuple):
    """The logits and the bitmask: addresses and strides.

    An optional part is None, in a tuple that kernels pass on whole: Triton 3.6 cannot return a tuple that has one.
    """

    logits: Any  #: float32, float16 or bfloat16
    row_stride: Any
    stride: Any  #: between the tokens of a row
    size: Any  #: V
    mask: Any  #: int32, bitmask of allowed tokens, lowest bit first; or None
    mask_stride: Any


class RowState(NamedTuple):
    """The state of the rows of a call, see ``torch_device.Slots``."""

    slots: Any  #: int64 [R]
    columns: Any  #: int64 [S, COLUMNS]
    tokens: Any  #: int64 [S, ring_size]
    ring_size: Any
    active: Any  #: bool [R]: the other rows do not advance; or None


class GroupSums(NamedTuple):
    """The group statistics that ``stats`` stores: [R, width]; width is a power of two."""

    tops: Any  #: float32: the maximum; +inf for a group with NaN or +inf, -inf for a group without tokens
    masses: Any  #: float32: sum of exp((x - top of the group) / t)
    moments: Any  #: float64 [R, 3, width], only with top-n-sigma: number of tokens, sums of x - top and its square
    raw_tops: Any  #: the same for the raw logits at temperature 1; or None
    raw_masses: Any


class PendingRows(NamedTuple):
    """The state of pending rows, see ``histogram_selection``."""

    flags: Any  #: int32 [R, NUM_FLAGS]
    views: Any  #: float64 [R, NUM_VIEW_VALUES]
    counts: Any  #: int32 [R, 2, BINS]
    weights: Any  #: int64 [R, 2, BINS]


class KernelOutput(NamedTuple):
    """The results of rows, [R]."""

    tokens: Any  #: int64: the sampled tokens; -1 for none
    status: Any  #: int32: see ``launch.SAMPLED``
    thresholds: Any  #: float32: tokens above it were kept,
    last_ids: Any  #: int32: and tokens equal to it with an id up to this one
    logprobs: Any  #: float64, of the raw logits; or None
    ranks: Any  #: int32; or None


@jit
def state_address(state, row):
    """The address of the state of a row."""
    return state.columns + tl.load(state.slots + row) * COLUMNS


@jit
def append_token(state, row, token):
    """Append a token to a row."""
    slot = tl.load(state.slots + row)
    address = state.columns + slot * COLUMNS
    step = tl.load(address + STEP)
    index = (step + tl.load(address + OFFSET)) % state.ring_size
    tl.debug_barrier()  # all threads have read the step
    tl.store(state.tokens + slot * state.ring_size + index, token.to(tl.int64))
    tl.store(address + STEP, step + 1)


@jit
def load_params(address):
    """The FusedParams of a row, float64. A greedy row (temperature 0 or k = 1) has t = 1 and k = 1."""
    t, k = load_param(address, 0), load_param(address, 2)
    greedy = (t == 0.0) | (k == 1.0)
    t, k = tl.where(greedy, 1.0, t), tl.where(greedy, 1.0, k)
    sigmas, m, p = load_param(address, 1), load_param(address, 3), load_param(address, 4)
    return FusedParams(t, sigmas, k, m, p, load_param(address, 5), load_param(address, 6))


@jit
def load_param(address, index: tl.constexpr):
    return tl.load(address + index).to(tl.float64, bitcast=True)


@jit
def group_temperature(params):
    """The temperature of the group masses: without the late temperature if there is top-p, which comes before it."""
    return tl.where(params.p < 1.0, params.t, params.t * params.late_t)


@jit
def program_row():
    """The row of this program, int64. Every grid has the rows as its first axis."""
    return tl.program_id(0).to(tl.int64)


@jit
def load_logits(source, ids):
    """Raw logits of this program's row as float32; -inf for ids >= V."""
    at = program_row() * source.row_stride + ids.to(tl.int64) * source.stride
    return tl.load(source.logits + at, mask=ids < source.size, other=-INFINITY).to(tl.float32)


@jit
def apply_mask(source, ids, x):
    """Apply the bitmask to raw logits. NaN and +inf stay invalid, also for masked tokens."""
    if source.mask is not None:
        mask = source.mask + program_row() * source.mask_stride
        words = tl.load(mask + ids // 32, mask=ids < source.size, other=-1)
        x = tl.where((words >> (ids % 32)) & 1 == 0, x - INFINITY, x)
    return x


@jit
def load_scores(source, ids):
    return apply_mask(source, ids, load_logits(source, ids))


GROUP_SIZE = tl.constexpr(256)


@jit
def stats(source, state, sums, tiles, width: tl.constexpr, tile_groups: tl.constexpr):
    """Grid: rows; parts of ``tiles`` tiles of ``tile_groups`` groups. Arguments: see ``device_memory``."""
    row = program_row()
    params = load_params(state_address(state, row))
    exponent = make_exponent(group_temperature(params))
    for i in range(tiles):
        group_G = (tl.program_id(1) * tiles + i) * tile_groups + tl.arange(0, tile_groups)
        ids_GT = group_G[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        logits_GT = load_logits(source, ids_GT)
        x_GT = apply_mask(source, ids_GT, logits_GT)
        index_G, valid_G = row * width + group_G, group_G < width
        top_G, mass_G = group_sums(x_GT, exponent)
        tl.store(sums.tops + index_G, top_G, mask=valid_G)
        tl.store(sums.masses + index_G, mass_G, mask=valid_G)
        if params.sigmas > 0.0:
            finite_GT = (x_GT > -INFINITY) & (x_GT < INFINITY)
            below_GT = tl.where(finite_GT, x_GT.to(tl.float64) - top_G.to(tl.float64)[:, None], 0.0)
            index_G += 2 * row * width
            tl.store(sums.moments + index_G, tl.sum(finite_GT.to(tl.float64), 1), mask=valid_G)
            tl.store(sums.moments + width + index_G, tl.sum(below_GT, 1), mask=valid_G)
            tl.store(sums.moments + 2 * width + index_G, tl.sum(below_GT * below_GT, 1), mask=valid_G)
        if sums.raw_tops is not None:
            index_G = row * width + group_G
            top_G, mass_G = group_sums(logits_GT, make_exponent(tl.full((), 1.0, tl.float64)))
            tl.store(sums.raw_tops + index_G, top_G, mask=valid_G)
            tl.store(sums.raw_masses + index_G, mass_G, mask=valid_G)


@jit
def group_sums(x_GT, exponent):
    """The maximum and the mass of each group. A group with NaN or +inf gets the maximum +inf."""
    top_G = tl.max(x_GT, 1)
    mass_G = tl.sum(weights(x_GT - tl.maximum(top_G, LOWEST)[:, None], exponent), 1)
    return tl.where(mass_G < INFINITY, top_G, INFINITY), mass_G


TILE = tl.constexpr(2048)
"""The maximum number of tokens in a pool, and the number of tokens that a program reads at a time."""
TILE_GROUPS = tl.constexpr(8)
"""The number of groups in a tile."""
MAX_ID = tl.constexpr(0x7FFFFFFF)
"""Larger than every token id."""


class PoolScratch(NamedTuple):
    """Addresses of the scratch memory of rows."""

    groups: Any  #: int32 [width]: a list of groups, or a count per group
    x: Any  #: float32 [TILE]: the scores of the pool
    ids: Any  #: int32 [TILE]: its token ids


@jit
def row_scratch(scratch, row, width: tl.constexpr):
    """The addresses of one row."""
    return PoolScratch(scratch.groups + row * width, scratch.x + row * TILE, scratch.ids + row * TILE)


class KeptRange(NamedTuple):
    """The kept tokens: those above the threshold, and those equal to it with an id up to ``last_id``."""

    threshold: Any  #: float32
    last_id: Any  #: int32


class CandidatePool(NamedTuple):
    """Candidate tokens in registers, in any order, padded with scores of -inf."""

    x: Any
    ids: Any


class PrefixSelection(NamedTuple):
    """The shortest prefix in rank order whose amounts reach a target."""

    kept: Any
    before: Any  #: int64: the sum of amounts without the last token
    total: Any  #: int64: the sum of amounts


@jit
def is_kept(x, ids, kept):
    return (x > kept.threshold) | ((x == kept.threshold) & (ids <= kept.last_id))


@jit
def list_groups(selected_G, scratch, width: tl.constexpr):
    """List the selected groups in ascending order. Returns their number."""
    index_G = tl.cumsum(selected_G.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads may still read the previous list
    tl.store(scratch.groups + index_G, tl.arange(0, width), mask=selected_G)
    tl.debug_barrier()
    return tl.sum(selected_G.to(tl.int32), 0)


@jit
def tile_ids(scratch, groups, i):
    """The token ids of tile i of the listed groups, padded with MAX_ID."""
    index = i * TILE + tl.arange(0, TILE)
    slot = index // GROUP_SIZE
    group = tl.load(scratch.groups + slot, mask=slot < groups, other=0)
    return tl.where(slot < groups, group * GROUP_SIZE + index % GROUP_SIZE, MAX_ID)


@jit
def append_to_pool(scratch, base, x, ids, selected):
    """Store the selected tokens of a tile in the pool, from index ``base`` on. Returns their number."""
    index = base + tl.cumsum(selected.to(tl.int32), 0) - 1
    fits = selected & (index < TILE)
    tl.store(scratch.x + index, x, mask=fits)
    tl.store(scratch.ids + index, ids, mask=fits)
    return tl.sum(selected.to(tl.int32), 0)


@jit
def fill_pool(source, scratch, groups, threshold):
    """Pool the tokens of the listed groups at or above a score. Returns their number; more than TILE: not all fit."""
    n, i = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (i * TILE_GROUPS < groups) & (n <= TILE):
        ids = tile_ids(scratch, groups, i)
        x = load_scores(source, ids)
        n += append_to_pool(scratch, n, x, ids, x >= threshold)
        i += 1
    tl.debug_barrier()
    return n


@jit
def load_pool(scratch, n):
    index = tl.arange(0, TILE)
    x = tl.load(scratch.x + index, mask=index < n, other=-INFINITY)
    return CandidatePool(x, tl.load(scratch.ids + index, mask=index < n, other=MAX_ID))


@jit
def select_prefix(pool, amounts, target, top):
    """The shortest prefix whose amounts reach a positive target: bisects the scores, then the ids of equal scores.

    amounts: int64, 0 for tokens to ignore; their sum reaches the target. top: at least every score.
    """
    above = tl.full((), 0, tl.int64)
    low, high = to_ordered(tl.min(tl.where(amounts > 0, pool.x, top), 0)), to_ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        amount = tl.sum(tl.where(pool.x >= from_ordered(middle), amounts, 0), 0)
        enough = amount >= target
        above = tl.where(enough, above, amount)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    threshold = from_ordered(low)
    equal = (pool.x == threshold) & (amounts > 0)
    ties = tl.where(equal, amounts, 0)
    low_id = tl.min(tl.where(equal, pool.ids, MAX_ID), 0)
    last_id = tl.max(tl.where(equal, pool.ids, 0), 0)
    while low_id < last_id:
        middle_id = (low_id + last_id) >> 1
        enough = above + tl.sum(tl.where(pool.ids <= middle_id, ties, 0), 0) >= target
        low_id, last_id = tl.where(enough, low_id, middle_id + 1), tl.where(enough, middle_id, last_id)
    total = above + tl.sum(tl.where(pool.ids <= last_id, ties, 0), 0)
    return PrefixSelection(KeptRange(threshold, last_id), total - tl.max(ties, 0), total)
