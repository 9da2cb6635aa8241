"""Scratch memory for one row, and access to the row by groups of 256 scores."""

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


@jit
def workspace_in(buffer: Any, size: Any) -> Any:
    """A ``Workspace`` in a buffer of float64; ``set_row`` sets its row."""
    count = (size + GROUP_SIZE - 1) // GROUP_SIZE
    row_length, group_length = count * GROUP_SIZE, count + EXTRA
    row_arrays = buffer[: ROW_ARRAYS * row_length].reshape((ROW_ARRAYS, row_length))
    group_buffer = buffer[ROW_ARRAYS * row_length : ROW_ARRAYS * row_length + GROUP_ARRAYS * group_length]
    group_arrays = group_buffer.reshape((GROUP_ARRAYS, group_length))
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
