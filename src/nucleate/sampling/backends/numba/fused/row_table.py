"""The table of rows of the fused kernel: one structured array with an entry per row.

A kernel is given one address: that of ``control``, which has those of its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.dispatch.fused_pipeline import FusedParams
from nucleate.sampling.noise import GROUP_SIZE as GROUP

Ids = NDArray[np.int64]

ENTRY = np.dtype(
    [
        ("numbers", np.float64, (len(FusedParams._fields),)),
        *(("program", np.int64), ("orders", np.int64), ("seed", np.uint64), ("step", np.uint64)),
    ]
)
"""A row as kernels read it. program, orders: ``Program.at``, or 0, 0."""

PLACES, SLOTS, ENTRIES, TOKENS = range(4)
"""What the addresses in ``control`` are of."""

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = range(4)
"""What logits can be."""

NOT_DRAWN = -1
"""The token of a row from which the chain draws none: an odd one, or one too near a tie."""


WIDE, NARROW, MORE = 7, 11, GROUP + 8
"""The chain works in so many arrays as long as a row, and as its groups with so many more numbers, see ``work``."""


def room_for(size: Any) -> Any:
    """How many float64 a ``Work`` takes for rows of so many scores."""
    groups = -(-size // GROUP)
    return WIDE * GROUP * groups + NARROW * (groups + MORE)


class TablePart(NamedTuple):
    """Some rows of a table, in the order of a call. It is of no use once a row of the table comes or goes."""

    at: int  #: the address of its ``control``
    tokens: Ids  #: what the last call drew
    held: Any  #: what must stay where it is while a kernel is at it


class RowTable:
    """Rows come and go; an entry is where ``slots`` says. The array moves as it grows."""

    def __init__(self, capacity: int = 4) -> None:
        self.rows: list[int] = []
        self.slots: dict[int, int] = {}
        self.entries = np.zeros(capacity, ENTRY)
        self._at = self.entries.ctypes.data

    def add(self, row: int, numbers: Sequence[float], program: tuple[int, int], seed: int, step: int) -> None:
        """A new last entry."""
        slot = len(self.rows)
        if slot == len(self.entries):
            self.entries = np.concatenate((self.entries, np.zeros_like(self.entries)))
            self._at = self.entries.ctypes.data
        self.entries[slot] = tuple(numbers), *program, seed, step
        self.slots[row] = slot
        self.rows.append(row)

    def remove(self, row: int) -> None:
        """Take out an entry; the last one takes its place."""
        slot, last = self.slots.pop(row), self.rows.pop()
        if last != row:
            self.entries[slot] = self.entries[len(self.rows)]
            self.rows[slot], self.slots[last] = last, slot

    def advance(self, row: int) -> None:
        """The chain is to draw the next token of a row."""
        self.entries["step"][self.slots[row]] += np.uint64(1)

    def part(self, rows: Sequence[int], places: Sequence[int] | None = None) -> TablePart:
        """What a kernel needs of some rows. places: where their logits are in the call, if not one after another."""
        count = len(rows)
        block = np.empty(3 * count + TOKENS + 1, np.int64)  # in one piece: to ask for an address takes a microsecond
        block[:count] = range(count) if places is None else places
        block[count : 2 * count] = [self.slots[row] for row in rows]
        at = block.ctypes.data
        block[3 * count :] = at, at + 8 * count, self._at, at + 16 * count
        return TablePart(at + 24 * count, block[2 * count : 3 * count], (block, self.entries))
