"""Room to work in for one row at a time, and the row itself: where the scores of each group of 256 are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu import simd
from nucleate.backends.cpu.compile import inline, jit
from nucleate.backends.cpu.load import move
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special import room
from nucleate.backends.cpu.special.room import DOUBTS

NOBODY = -1
EDITED, INEXACT, DOUBTED = range(3)
"""Places in ``Work.state``."""


class Work(NamedTuple):
    """A row of ``size`` scores in G groups, P = 256 G, and arrays for it. Nothing in them outlives a row.

    Groups are read where they lie in memory. Of a row with edits only the tokens that these touch are held, as
    float64; a group that has some is copied, and edited there, when it is first looked at (``patch``).
    """

    size: Any
    at: Any  #: int64 [G]: addresses
    pending: Any  #: int64 [G]: not 0 where edits of a group are not in it yet
    newest: Any  #: int64 [G]: the last edit of each group
    state: Any  #: int64 [8]: how many edits there are, how many of them float32 does not hold, and doubtful tokens
    doubts: Any  #: int64 [DOUBTS]: tokens that may be in or not
    groups: Any  #: int64 [G]
    tops: Any  #: float32 [G]
    masses: Any  #: float32 [G]
    cuts: Any  #: float32 [8]
    sums: Any  #: float64 [8]
    noise: Any  #: float64 [G + 264]
    times: Any  #: float64 [G]
    tail: Any  #: float32 [256]: the last scores, padded with -inf
    x: Any  #: float32 [P]: copies of groups
    ids: Any  #: int64 [P]: candidates, ascending
    weights: Any  #: float64 [P]: their weights, negative for doubtful ones
    scores: Any  #: float64 [P]
    tokens: Any  #: int64 [P]: those that edits touch
    values: Any  #: float64 [P]: the scores that these give them
    earlier: Any  #: int64 [P]: the edit before of the same group


room_for = jit(room.room_for)


@jit
def carve(room: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Work``, without a row."""
    count = (size + GROUP - 1) // GROUP
    padded = count * GROUP
    long, short = room.view(np.int64), room.view(np.float32)
    at = 6 * padded
    halves = 2 * (at + 6 * count + GROUP + DOUBTS + 24)
    return Work(
        size,
        long[at : at + count],
        long[at + count : at + 2 * count],
        long[at + 2 * count : at + 3 * count],
        long[at + 3 * count : at + 3 * count + 8],
        long[at + 3 * count + 8 : at + 3 * count + 8 + DOUBTS],
        long[at + 3 * count + 8 + DOUBTS : at + 4 * count + 8 + DOUBTS],
        short[halves : halves + count],
        short[halves + count : halves + 2 * count],
        short[halves + 2 * count : halves + 2 * count + 8],
        room[at + 4 * count + 8 + DOUBTS : at + 4 * count + 16 + DOUBTS],
        room[at + 4 * count + 16 + DOUBTS : at + 5 * count + 24 + DOUBTS + GROUP],
        room[at + 5 * count + 24 + DOUBTS + GROUP : at + 6 * count + 24 + DOUBTS + GROUP],
        short[halves + 2 * count + 8 : halves + 2 * count + 8 + GROUP],
        short[halves + 2 * count + 8 + GROUP : halves + 2 * count + 8 + GROUP + padded],
        long[:padded],
        room[padded : 2 * padded],
        room[2 * padded : 3 * padded],
        long[3 * padded : 4 * padded],
        room[4 * padded : 5 * padded],
        long[5 * padded : 6 * padded],
    )


@jit
def lay(x: Any, work: Any) -> None:
    """Take a float32 row, as it lies in memory, without edits."""
    whole, address = x.size - x.size % GROUP, np.int64(x.ctypes.data)
    for group in range(work.at.size):
        work.at[group] = address + 4 * GROUP * group
    if whole < x.size:
        for i in range(GROUP):
            work.tail[i] = x[whole + i] if whole + i < x.size else np.float32(-np.inf)
        work.at[work.at.size - 1] = np.int64(work.tail.ctypes.data)
    work.state[:] = 0


@inline
def score(work: Any, token: Any) -> Any:
    """A score as float32."""
    return simd.one_at(work.at[token >> 8] + ((token & 255) << 2))


@jit
def edit_of(work: Any, token: Any) -> Any:
    """The edit of a token; NOBODY if it has none."""
    edit = work.newest[token >> 8]
    while edit >= 0 and work.tokens[edit] != token:
        edit = work.earlier[edit]
    return edit


@jit
def patch(work: Any, group: Any) -> None:
    """Copy a group, and edit it there."""
    start = group * GROUP
    copy = work.x[start : start + GROUP]
    place = np.int64(copy.ctypes.data)
    if work.at[group] != place:
        move(work.at[group], copy)
        work.at[group] = place
    edit = work.newest[group]
    while edit >= 0:
        copy[work.tokens[edit] - start] = np.float32(work.values[edit])
        edit = work.earlier[edit]
    work.pending[group] = 0


@jit
def patch_above(work: Any, cut: Any) -> None:
    """Edit all groups that reach a cut."""
    if work.state[EDITED] > 0:
        for group in range(work.at.size):
            if work.pending[group] != 0 and work.tops[group] >= cut:
                patch(work, group)
