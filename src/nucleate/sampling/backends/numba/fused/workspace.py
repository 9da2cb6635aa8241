"""Scratch memory for one row at a time, and access to the row by groups of 256 scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from nucleate.jit.compiler import inline, jit
from nucleate.sampling.backends.numba.fused.row_table import MORE, NARROW, WIDE
from nucleate.sampling.backends.numba.row_loading import fill_tail, floats_at, move
from nucleate.sampling.backends.numba.vector_lanes import GROUP

NOBODY = -1
EDITED, INEXACT, DOUBTED = range(3)
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
    tokens: Any  #: int64 [P]: those that edits touch
    values: Any  #: float64 [P]: the scores that these give them
    earlier: Any  #: int64 [P]: the edit before of the same group
    x: Any  #: float32 [P]: copies of groups
    raw: Any  #: float32 [P]: the scores before the edits
    at: Any  #: int64 [G]: addresses
    pending: Any  #: int64 [G]: not 0 where edits of a group are not in it yet
    newest: Any  #: int64 [G]: the last edit of each group
    groups: Any  #: int64 [G]
    times: Any  #: float64 [G]
    noise: Any  #: float64 [G + 264]
    state: Any  #: int64: how many edits there are, how many of them float32 does not hold, and doubtful tokens
    doubts: Any  #: int64 [DOUBTS]: tokens that may be in or not
    sums: Any  #: float64 [8]
    tops: Any  #: float32 [G]
    masses: Any  #: float32 [G]
    cuts: Any  #: float32 [8]
    tail: Any  #: float32 [256]: the last scores, padded with -inf


@jit
def carve(room: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Workspace``, without a row."""
    count = (size + GROUP - 1) // GROUP
    padded, short = count * GROUP, count + MORE
    wide = room[: WIDE * padded].reshape((WIDE, padded))
    narrow = room[WIDE * padded : WIDE * padded + NARROW * short].reshape((NARROW, short))
    floats = narrow[10].view(np.float32)
    return Workspace(
        size,
        wide[0].view(np.int64),
        wide[1],
        wide[2],
        wide[3].view(np.int64),
        wide[4],
        wide[5].view(np.int64),
        wide[6].view(np.float32)[:padded],
        wide[6].view(np.float32)[padded:],
        narrow[0].view(np.int64)[:count],
        narrow[1].view(np.int64)[:count],
        narrow[2].view(np.int64)[:count],
        narrow[3].view(np.int64),
        narrow[4],
        narrow[5],
        narrow[6].view(np.int64),
        narrow[7].view(np.int64),
        narrow[8],
        narrow[9].view(np.float32)[:count],
        narrow[9].view(np.float32)[short : short + count],
        floats[:8],
        floats[short : short + GROUP],
    )


@jit
def lay(address: Any, work: Any) -> None:
    """Take a float32 row, as it lies in memory, without edits."""
    for group in range(work.at.size):
        work.at[group] = address + 4 * GROUP * group
    if work.size % GROUP != 0:
        work.at[work.at.size - 1] = fill_tail(carray(floats_at(address), work.size), work.tail)
    work.pending[:] = 0


@inline
def score(work: Any, token: Any) -> Any:
    """A score as float32."""
    return carray(floats_at(work.at[token >> 8]), GROUP)[token & 255]


@jit
def edit_of(work: Any, token: Any) -> Any:
    """The edit of a token; NOBODY if it has none."""
    edit = work.newest[token >> 8]
    while edit >= 0 and work.tokens[edit] != token:
        edit = work.earlier[edit]
    return edit


@jit
def patch(group: Any, work: Any) -> None:
    """Copy a group, and edit it there."""
    place = np.int64(work.x[group * GROUP :].ctypes.data)
    if work.at[group] != place:
        move(work.at[group], place, GROUP)
        work.at[group] = place
    edit = work.newest[group]
    while edit >= 0:
        work.x[work.tokens[edit]] = np.float32(work.values[edit])
        edit = work.earlier[edit]
    work.pending[group] = 0


@inline
def address_of(group: Any, work: Any) -> Any:
    """Where the scores of a group are, with its edits.

    Written into its callers: a ``Workspace`` is a lot to pass on.
    """
    if work.pending[group] != 0:
        patch(group, work)
    return work.at[group]
