"""The kernel arguments, as addresses of device memory, and the first kernel, which reads each logit once.

The arguments are logits, row state, scratch memory and results. Scores are the logits after the mask: -inf for masked
tokens. NaN and +inf stay, so that the row is invalid. ``stats`` stores the maximum and the mass of each group of 256
tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.dispatch.fused_pipeline import FusedParams
from nucleate.sampling.gpu import slots as lines_of
from nucleate.sampling.gpu.triton.triton_numbers import INFINITY, LOWEST, make_exponent, weights

COLUMNS, SEED = tl.constexpr(lines_of.COLUMNS), tl.constexpr(lines_of.SEED)
STEP, OFFSET = tl.constexpr(lines_of.STEP), tl.constexpr(lines_of.PROMPT_LENGTH)


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
    """The state of the rows of a call, see ``slots.Slots``."""

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
    status: Any  #: int32: see ``sample_kernel.SAMPLED``
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
