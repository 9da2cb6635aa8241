"""What kernels keep in memory between each other, as addresses: the rows' state, scratch memory, results."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.backends.chain import Numbers
from nucleate.backends.cuda import slots as lines_of

COLUMNS, SEED = tl.constexpr(lines_of.COLUMNS), tl.constexpr(lines_of.SEED)
STEP, OFFSET = tl.constexpr(lines_of.STEP), tl.constexpr(lines_of.OFFSET)


class State(NamedTuple):
    """The state of the rows of a call, see ``slots.Slots``."""

    slots: Any  #: int64 [R]
    lines: Any  #: int64 [S, COLUMNS]
    ring: Any  #: int64 [S, ring_size]
    ring_size: Any
    active: Any  #: bool [R]: the other rows stay as they are; or None


class Sums(NamedTuple):
    """What ``stats`` stores of the groups of rows: [R, width], width a power of two."""

    tops: Any  #: float32: +inf for a group with NaN or +inf, -inf for one with no token
    masses: Any  #: float32: the sum of exp((x - top of the group) / t)
    moments: Any  #: float64 [R, 3, width], with top-n-sigma: how many are in, the sum of x - top, of its square
    raw_tops: Any  #: the same of the logits as given, at temperature 1; or None
    raw_masses: Any


class Waiting(NamedTuple):
    """What rows keep for ``tally``, ``collect`` and ``resume``, see ``select``."""

    flags: Any  #: int32 [R, FLAGS]
    views: Any  #: float64 [R, VIEW]
    counts: Any  #: int32 [R, 2, BINS]
    amounts: Any  #: int64 [R, 2, BINS]


class Out(NamedTuple):
    """The results of rows, [R]."""

    tokens: Any  #: int64: -1 where there is none
    states: Any  #: int32: see ``finish.DRAWN``
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
    return Numbers(t, number(line, 1), k, number(line, 3), number(line, 4), number(line, 5), number(line, 6))


@jit
def number(line, place: tl.constexpr):
    return tl.load(line + place).to(tl.float64, bitcast=True)


@jit
def weighing(numbers):
    """The temperature at which groups are weighed: top-p comes before the last temperature."""
    return tl.where(numbers.p < 1.0, numbers.t, numbers.t * numbers.late_t)
