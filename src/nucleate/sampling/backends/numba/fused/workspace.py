"""Scratch memory for one row at a time, and access to the row by groups of 256 scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit
from nucleate.sampling.backends.numba.fused.fused_sampler import EXTRA, GROUP_ARRAYS, ROW_ARRAYS
from nucleate.sampling.backends.numba.row_loading import copy_floats, floats_at, pad_tail
from nucleate.sampling.backends.numba.vector_lanes import GROUP_SIZE

NONE = -1
EDIT_COUNT, INEXACT_COUNT, UNCERTAIN_COUNT = range(3)
"""Places in ``Workspace.state``."""


class Workspace(NamedTuple):
    """A row of ``size`` scores in G groups, P = 256 G, and arrays for it. Nothing in them outlives a row.

    Groups are read where they lie in memory. Of a row with edits only the tokens that these touch are held, as
    float64; a group that has some is copied, and edited there, when it is first looked at (``address_of``).
    """

    size: Any
    ids: Any  #: int64 [P]: candidates, ascending
    weights: Any  #: float64 [P]: their weights, negative for doubtful ones
    scores: Any  #: float64 [P]
    edited_ids: Any  #: int64 [P]: those that edits touch
    edited_scores: Any  #: float64 [P]: the scores that these give them
    previous_edit: Any  #: int64 [P]: the edit before of the same group
    copies: Any  #: float32 [P]: copies of groups
    original_scores: Any  #: float32 [P]: the scores before the edits
    addresses: Any  #: int64 [G]: addresses
    pending: Any  #: int64 [G]: not 0 where edits of a group are not in it yet
    last_edit: Any  #: int64 [G]: the last edit of each group
    selected_groups: Any  #: int64 [G]
    race_times: Any  #: float64 [G]
    noise: Any  #: float64 [G + 264]
    counters: Any  #: int64: how many edits there are, how many of them float32 does not hold, and doubtful tokens
    uncertain_ids: Any  #: int64 [DOUBTS]: tokens that may be in or not
    partial_sums: Any  #: float64 [8]
    group_maxima: Any  #: float32 [G]
    group_masses: Any  #: float32 [G]
    thresholds: Any  #: float32 [8]
    tail: Any  #: float32 [256]: the last scores, padded with -inf


@jit
def workspace_in(buffer: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Workspace``, without a row."""
    count = (size + GROUP_SIZE - 1) // GROUP_SIZE
    row_length, group_length = count * GROUP_SIZE, count + EXTRA
    row_arrays = buffer[: ROW_ARRAYS * row_length].reshape((ROW_ARRAYS, row_length))
    group_arrays = buffer[ROW_ARRAYS * row_length : ROW_ARRAYS * row_length + GROUP_ARRAYS * group_length].reshape(
        (GROUP_ARRAYS, group_length)
    )
    scalars = group_arrays[10].view(np.float32)
    return Workspace(
        size,
        row_arrays[0].view(np.int64),
        row_arrays[1],
        row_arrays[2],
        row_arrays[3].view(np.int64),
        row_arrays[4],
        row_arrays[5].view(np.int64),
        row_arrays[6].view(np.float32)[:row_length],
        row_arrays[6].view(np.float32)[row_length:],
        group_arrays[0].view(np.int64)[:count],
        group_arrays[1].view(np.int64)[:count],
        group_arrays[2].view(np.int64)[:count],
        group_arrays[3].view(np.int64),
        group_arrays[4],
        group_arrays[5],
        group_arrays[6].view(np.int64),
        group_arrays[7].view(np.int64),
        group_arrays[8],
        group_arrays[9].view(np.float32)[:count],
        group_arrays[9].view(np.float32)[group_length : group_length + count],
        scalars[:8],
        scalars[group_length : group_length + GROUP_SIZE],
    )


@jit
def set_row(address: Any, work: Any) -> None:
    """Take a float32 row, as it lies in memory, without edits."""
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
    """The edit of a token; NOBODY if it has none."""
    edit = work.last_edit[token >> 8]
    while edit >= 0 and work.edited_ids[edit] != token:
        edit = work.previous_edit[edit]
    return edit


@jit
def apply_pending_edits(group: Any, work: Any) -> None:
    """Copy a group, and edit it there."""
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
    """Where the scores of a group are, with its edits.

    Written into its callers: a ``Workspace`` is a lot to pass on.
    """
    if work.pending[group] != 0:
        apply_pending_edits(group, work)
    return work.addresses[group]
