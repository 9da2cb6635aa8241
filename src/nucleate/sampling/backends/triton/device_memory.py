"""What kernels find in memory, as addresses: logits, the rows' state, scratch memory, results.

Scores are logits but for what the mask forbids, which is -inf; what is odd stays odd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.backends.torch import slots as lines_of
from nucleate.sampling.backends.triton.float_bits import INFINITY
from nucleate.sampling.dispatch.fused_pipeline import FusedParams

COLUMNS, SEED = tl.constexpr(lines_of.COLUMNS), tl.constexpr(lines_of.SEED)
STEP, OFFSET = tl.constexpr(lines_of.STEP), tl.constexpr(lines_of.PROMPT_LENGTH)


class LogitsSource(NamedTuple):
    """Where rows come from: addresses and strides."""

    logits: Any  #: float32, float16 or bfloat16
    row_stride: Any
    stride: Any  #: of its tokens
    size: Any  #: V
    mask: Any  #: int32, lowest bit first; or None
    mask_stride: Any


class RowState(NamedTuple):
    """The state of the rows of a call, see ``slots.Slots``."""

    slots: Any  #: int64 [R]
    lines: Any  #: int64 [S, COLUMNS]
    ring: Any  #: int64 [S, ring_size]
    ring_size: Any
    active: Any  #: bool [R]: the other rows stay as they are; or None


class GroupSums(NamedTuple):
    """What ``stats`` stores of the groups of rows: [R, width], width a power of two."""

    tops: Any  #: float32: +inf for a group with NaN or +inf, -inf for one with no token
    masses: Any  #: float32: the sum of exp((x - top of the group) / t)
    moments: Any  #: float64 [R, 3, width], with top-n-sigma: how many are in, the sum of x - top, of its square
    raw_tops: Any  #: the same of the logits as given, at temperature 1; or None
    raw_masses: Any


class PendingRows(NamedTuple):
    """What rows keep for ``tally``, ``collect`` and ``resume``, see ``select``."""

    flags: Any  #: int32 [R, FLAGS]
    views: Any  #: float64 [R, VIEW]
    counts: Any  #: int32 [R, 2, BINS]
    amounts: Any  #: int64 [R, 2, BINS]


class KernelOutput(NamedTuple):
    """The results of rows, [R]."""

    tokens: Any  #: int64: -1 where there is none
    states: Any  #: int32: see ``sample_kernel.DRAWN``
    cuts: Any  #: float32: tokens above it were left,
    lasts: Any  #: int32: and those at it with an id up to this
    logprobs: Any  #: float64, of the logits as given; or None, as the next
    ranks: Any  #: int32


@jit
def line_of(state, row):
    """The address of a row's line."""
    return state.lines + tl.load(state.slots + row) * COLUMNS


@jit
def push(state, row, token):
    """A row goes on with a token."""
    slot = tl.load(state.slots + row)
    line = state.lines + slot * COLUMNS
    step = tl.load(line + STEP)
    place = (step + tl.load(line + OFFSET)) % state.ring_size
    tl.debug_barrier()  # all have read the step
    tl.store(state.ring + slot * state.ring_size + place, token.to(tl.int64))
    tl.store(line + STEP, step + 1)


@jit
def read(line):
    """The parameters of a line, float64. A greedy row, with a temperature of 0 or k = 1, has t = 1 and k = 1."""
    t, k = number(line, 0), number(line, 2)
    greedy = (t == 0.0) | (k == 1.0)
    t, k = tl.where(greedy, 1.0, t), tl.where(greedy, 1.0, k)
    return FusedParams(t, number(line, 1), k, number(line, 3), number(line, 4), number(line, 5), number(line, 6))


@jit
def number(line, place: tl.constexpr):
    return tl.load(line + place).to(tl.float64, bitcast=True)


@jit
def weighing(numbers):
    """The temperature at which groups are weighed: top-p comes before the last temperature."""
    return tl.where(numbers.p < 1.0, numbers.t, numbers.t * numbers.late_t)


@jit
def source_of(source, row):
    """The same with the addresses of a row."""
    mask = source.mask
    if mask is not None:
        mask += row * source.mask_stride
    logits = source.logits + row * source.row_stride
    return LogitsSource(logits, source.row_stride, source.stride, source.size, mask, source.mask_stride)


@jit
def raw(source, ids):
    """Logits as given, as float32; behind the row -inf."""
    at = ids.to(tl.int64) * source.stride
    return tl.load(source.logits + at, mask=ids < source.size, other=-INFINITY).to(tl.float32)


@jit
def ready(source, ids, x):
    """The scores of the pipeline from raw ones. One that is NaN or +inf is NaN or +inf, allowed or not."""
    if source.mask is not None:
        words = tl.load(source.mask + ids // 32, mask=ids < source.size, other=-1)
        x = tl.where((words >> (ids % 32)) & 1 == 0, x - INFINITY, x)
    return x


@jit
def scores(source, ids):
    return ready(source, ids, raw(source, ids))
