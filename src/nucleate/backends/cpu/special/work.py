"""Room to work in, for one row at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP


class Work(NamedTuple):
    """Arrays for a row of N scores in G groups. Nothing in them outlives a row."""

    x: Any  #: float32 [256 G]: the row, where it cannot be read as it lies in memory
    tail: Any  #: float32 [256], see ``simd.Scores``
    tops: Any  #: float32 [G]
    masses: Any  #: float32 [G]
    cuts: Any  #: float32 [8]
    sums: Any  #: float64 [8]
    race: Any  #: float64 [G]
    ids: Any  #: int64 [256 G]
    keys: Any  #: int64 [256 G]
    weights: Any  #: float64 [256 G]
    others: Any  #: float64 [256 G]


@jit
def room_for(size: Any) -> Any:
    """How many float64 a ``Work`` takes for rows of so many scores."""
    groups = -(-size // GROUP)
    return 4 * GROUP * groups + groups + 8 + (GROUP * (groups + 1) + 2 * groups + 8) // 2


@jit
def carve(room: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Work``."""
    groups = (size + GROUP - 1) // GROUP
    padded = groups * GROUP
    ids, keys = room[:padded].view(np.int64), room[padded : 2 * padded].view(np.int64)
    weights, others = room[2 * padded : 3 * padded], room[3 * padded : 4 * padded]
    race, sums = room[4 * padded : 4 * padded + groups], room[4 * padded + groups : 4 * padded + groups + 8]
    short = room[4 * padded + groups + 8 :].view(np.float32)
    x, tail = short[:padded], short[padded : padded + GROUP]
    rest = short[padded + GROUP :]
    tops, masses, cuts = rest[:groups], rest[groups : 2 * groups], rest[2 * groups : 2 * groups + 8]
    return Work(x, tail, tops, masses, cuts, sums, race, ids, keys, weights, others)
