"""Room to work in, for one row at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special import room


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


room_for = jit(room.room_for)


@jit
def carve(block: Any, size: Any) -> Any:
    """The parts of a block of float64 as a ``Work``."""
    groups = (size + GROUP - 1) // GROUP
    padded = groups * GROUP
    ids, keys = block[:padded].view(np.int64), block[padded : 2 * padded].view(np.int64)
    weights, others = block[2 * padded : 3 * padded], block[3 * padded : 4 * padded]
    race, sums = block[4 * padded : 4 * padded + groups], block[4 * padded + groups : 4 * padded + groups + 8]
    short = block[4 * padded + groups + 8 :].view(np.float32)
    x, tail = short[:padded], short[padded : padded + GROUP]
    rest = short[padded + GROUP :]
    tops, masses, cuts = rest[:groups], rest[groups : 2 * groups], rest[2 * groups : 2 * groups + 8]
    return Work(x, tail, tops, masses, cuts, sums, race, ids, keys, weights, others)
