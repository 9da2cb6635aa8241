"""Scratch memory for one row of the fused kernel: its scores by groups of 256, and the weights of its tokens.

Weights are exp((x - max) / t): float32 sums over groups, float64 where a decision may be close.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit
from nucleate.sampling.cpu import block_ops
from nucleate.sampling.cpu.block_ops import GROUP_SIZE, copy_floats, floats_at, pad_tail
from nucleate.sampling.cpu.fused_runner import EXTRA, ROW_ARRAYS
from nucleate.sampling.cpu.kernel_maths import exp

NONE = -1
EDIT_COUNT, INEXACT_COUNT, UNCERTAIN_COUNT = range(3)
"""Indices of ``Workspace.counters``."""


class Workspace(NamedTuple):
    """A row of ``size`` scores in G groups, P = 256 G, and arrays that are reused for every row.

    Groups are read in place. A group with edits is copied, and edited there, when it is first read
    (``edited_group_address``); the exact edited scores are stored separately, as float64.
    """

    size: Any
    ids: Any  #: int64 [P]: candidates, ascending
    weights: Any  #: float64 [P]: their weights, negative for uncertain ones
    scores: Any  #: float64 [P]
    edited_ids: Any  #: int64 [P]: tokens with an edit
    edited_scores: Any  #: float64 [P]: their edited scores
    previous_edit: Any  #: int64 [P]: linked list: the previous edit of the same group
    copies: Any  #: float32 [P]: copies of groups, or the converted row
    original_scores: Any  #: float32 [P]: their scores before the edits
    addresses: Any  #: int64 [G]: address of each group
    pending: Any  #: int64 [G]: not 0 if a group has edits that are not applied yet
    last_edit: Any  #: int64 [G]: the last edit of each group
    selected_groups: Any  #: int64 [G]
    race_times: Any  #: float64 [G]
    noise: Any  #: float64 [G + 264]
    counters: Any  #: int64: edits, edits that float32 cannot represent, uncertain tokens
    uncertain_ids: Any  #: int64 [MAX_UNCERTAIN]: tokens that may or may not survive
    partial_sums: Any  #: float64 [8]
    group_maxima: Any  #: float32 [G]
    group_masses: Any  #: float32 [G]
    thresholds: Any  #: float32 [8]
    tail: Any  #: float32 [256]: the last scores, padded with -inf


@inline
def nth(buffer: Any, index: Any, length: Any) -> Any:
    """One of the arrays of a length that a buffer holds one after another."""
    return buffer[index * length : (index + 1) * length]


@jit
def workspace_in(buffer: Any, size: Any) -> Any:
    """A ``Workspace`` in a buffer of float64; ``set_row`` sets its row."""
    count = (size + GROUP_SIZE - 1) // GROUP_SIZE
    row_length, group_length = count * GROUP_SIZE, count + EXTRA
    groups = buffer[ROW_ARRAYS * row_length :]
    scores, masses = nth(buffer, 6, row_length).view(np.float32), nth(groups, 9, group_length).view(np.float32)
    scalars = nth(groups, 10, group_length).view(np.float32)
    return Workspace(
        size,
        nth(buffer, 0, row_length).view(np.int64),
        nth(buffer, 1, row_length),
        nth(buffer, 2, row_length),
        nth(buffer, 3, row_length).view(np.int64),
        nth(buffer, 4, row_length),
        nth(buffer, 5, row_length).view(np.int64),
        scores[:row_length],
        scores[row_length:],
        nth(groups, 0, group_length).view(np.int64)[:count],
        nth(groups, 1, group_length).view(np.int64)[:count],
        nth(groups, 2, group_length).view(np.int64)[:count],
        nth(groups, 3, group_length).view(np.int64),
        nth(groups, 4, group_length),
        nth(groups, 5, group_length),
        nth(groups, 6, group_length).view(np.int64),
        nth(groups, 7, group_length).view(np.int64),
        nth(groups, 8, group_length),
        masses[:count],
        masses[group_length : group_length + count],
        scalars[:8],
        scalars[group_length : group_length + GROUP_SIZE],
    )


@jit
def set_row(address: Any, work: Any) -> None:
    """Set the float32 row at an address, without a copy and without edits."""
    for group in range(work.addresses.size):
        work.addresses[group] = address + 4 * GROUP_SIZE * group
    if work.size % GROUP_SIZE != 0:
        work.addresses[work.addresses.size - 1] = pad_tail(carray(floats_at(address), work.size), work.tail)
    work.pending[:] = 0


@inline
def score(work: Any, token: Any) -> Any:
    """A score as float32."""
    return carray(floats_at(work.addresses[token >> 8]), GROUP_SIZE)[token & 255]


@jit
def find_edit(work: Any, token: Any) -> Any:
    """The edit of a token; NONE if it has none."""
    edit = work.last_edit[token >> 8]
    while edit >= 0 and work.edited_ids[edit] != token:
        edit = work.previous_edit[edit]
    return edit


@jit
def apply_pending_edits(group: Any, work: Any) -> None:
    """Copy a group, and write its edited scores to the copy."""
    copy_address = np.int64(work.copies[group * GROUP_SIZE :].ctypes.data)
    if work.addresses[group] != copy_address:
        copy_floats(work.addresses[group], copy_address, GROUP_SIZE)
        work.addresses[group] = copy_address
    edit = work.last_edit[group]
    while edit >= 0:
        work.copies[work.edited_ids[edit]] = np.float32(work.edited_scores[edit])
        edit = work.previous_edit[edit]
    work.pending[group] = 0


@inline
def edited_group_address(group: Any, work: Any) -> Any:
    """The address of a group's scores, with edits applied. Inlined, because passing a ``Workspace`` is slow."""
    if work.pending[group] != 0:
        apply_pending_edits(group, work)
    return work.addresses[group]


FLOAT32_ERROR = 1e-5
"""Bound on the relative error of a sum of float32 weights (168 units of 2^-24). A weight exp(d), with x - max rounded
once, errs by |d| + 4 units (``block_ops.exp``: 2e-7); a sum of 256 in four sums of 16 lanes adds 10. In a race, the
noise outweighs at most d = -46 (u >= 2^-65), so a group that may win has d > -52; in a sum over the row, the weighted
mean of |d| is at most log V, about 12."""

HALF_UNIT, UNIT = 2.0**-24, 2.0**-53
"""Relative errors of one rounding to float32 and to float64."""


class WeightExponent(NamedTuple):
    """The arguments with which ``block_ops`` computes exp((x - max) / t)."""

    max_score: Any  #: float32
    high: Any  #: high + low is log2(e) / t
    low: Any
    underflow: Any  #: lower values of x - max have weight 0


@jit
def weight_exponent(max_score: Any, t: Any) -> Any:
    scale = 1.4426950408889634 / t
    high = np.float32(scale)
    return WeightExponent(max_score, high, np.float32(scale - np.float64(high)), np.float32(-126.0 / scale))


@jit
def weight_error(max_score: Any, t: Any, work: Any) -> Any:
    """FLOAT32_ERROR, plus the effect of rounding edited scores to float32."""
    rounding = HALF_UNIT * (abs(np.float64(max_score)) / t + 64.0) if work.counters[INEXACT_COUNT] > 0 else 0.0
    return FLOAT32_ERROR + rounding


@inline
def group_mass(group: Any, threshold: Any, exponent: Any, work: Any) -> Any:
    """The weight of a group's tokens at or above a threshold."""
    address, (max_score, high, low, underflow) = edited_group_address(group, work), exponent
    return np.float64(block_ops.mass_above(address, max_score, high, low, underflow, threshold))


@jit
def weigh_groups(threshold: Any, exponent: Any, work: Any) -> Any:
    """Fill ``group_masses`` with the weight of each group's tokens at or above a threshold. Returns the sum."""
    total = 0.0
    for group in range(work.group_masses.size):
        mass = group_mass(group, threshold, exponent, work) if work.group_maxima[group] >= threshold else 0.0
        work.group_masses[group] = mass
        total += mass
    return total


@jit
def weigh_candidates(n: Any, exact_max: Any, t: Any, work: Any) -> None:
    """Compute the weights of n candidates; uncertain ones stay negative."""
    for i in range(n):
        weight = exp((work.scores[i] - exact_max) / t)
        work.weights[i] = weight if work.weights[i] > 0.0 else -weight


@jit
def weigh_group(kept: Any, group: Any, exact_max: Any, t: Any, work: Any) -> Any:
    """Compute the float64 weights of a group in ``work.weights``, 0 for removed tokens. Returns their sum."""
    x = carray(floats_at(edited_group_address(group, work)), GROUP_SIZE)
    start, weights, mass = group * GROUP_SIZE, work.weights, 0.0
    for i in range(GROUP_SIZE):
        weights[i] = np.float64(x[i])
    edit = work.last_edit[group] if work.counters[INEXACT_COUNT] > 0 else -1
    while edit >= 0:
        weights[work.edited_ids[edit] - start] = work.edited_scores[edit]
        edit = work.previous_edit[edit]
    for i in range(GROUP_SIZE):  # separate loop, so that LLVM vectorises it
        weights[i] = exp((weights[i] - exact_max) / t)
    for i in range(GROUP_SIZE):
        is_kept = (x[i] > kept.threshold) | ((x[i] == kept.threshold) & (start + i <= kept.last_id))
        weights[i] = weights[i] if is_kept else 0.0
        mass += weights[i]
    return mass
