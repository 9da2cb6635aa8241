"""The rows that the compiled chain can run, a column of each array per row, and where these are. Knows no compiler.

A kernel is given one address: that of ``control``, which has those of all the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

PLACES, SLOTS, NUMBERS, PROGRAMS, SEEDS, STEPS, TOKENS = range(7)
"""What the addresses in ``control`` are of."""

NOT_DRAWN = -1
"""The token of a row from which none can be drawn."""


class Part(NamedTuple):
    """Some rows of a table, in the order of a call. It is of no use once a row of the table comes or goes."""

    at: int  #: the address of its ``control``
    tokens: Ids  #: what the last call drew
    held: Any  #: what must stay where it is while a kernel is at it


class Table:
    """Rows come and go; a column is where ``slots`` says. ``count`` numbers per row, see ``plan.Numbers``.

    Arrays move as they grow.
    """

    def __init__(self, count: int, capacity: int = 4) -> None:
        self.rows: list[int] = []
        self.slots: dict[int, int] = {}
        self.numbers, self.programs = np.zeros((capacity, count)), np.zeros((capacity, 2), np.int64)
        self.seeds, self.steps = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64)
        self._tell()

    def _tell(self) -> None:
        """The columns are somewhere else now."""
        self._columns = self.numbers, self.programs, self.seeds, self.steps
        self._at = [column.ctypes.data for column in self._columns]

    def add(self, row: int, numbers: Sequence[float], program: tuple[int, int], seed: int, step: int) -> None:
        """A new last column. program: ``Program.at``, or 0, 0."""
        slot = len(self.rows)
        if slot == len(self.steps):
            self.numbers = np.concatenate((self.numbers, np.zeros_like(self.numbers)))
            self.programs = np.concatenate((self.programs, np.zeros_like(self.programs)))
            self.seeds = np.concatenate((self.seeds, np.zeros_like(self.seeds)))
            self.steps = np.concatenate((self.steps, np.zeros_like(self.steps)))
            self._tell()
        self.numbers[slot], self.programs[slot], self.seeds[slot], self.steps[slot] = numbers, program, seed, step
        self.slots[row] = slot
        self.rows.append(row)

    def remove(self, row: int) -> None:
        """Take out a column; the last one takes its place."""
        slot, last = self.slots.pop(row), self.rows.pop()
        if last != row:
            for column in self._columns:
                column[slot] = column[len(self.rows)]
            self.rows[slot], self.slots[last] = last, slot

    def part(self, rows: Sequence[int], places: Sequence[int] | None = None) -> Part:
        """What a kernel needs of some rows. places: where their logits are in the call, if not one after another."""
        count = len(rows)
        block = np.empty(3 * count + TOKENS + 1, np.int64)  # in one piece: to ask for an address takes a microsecond
        block[:count] = range(count) if places is None else places
        block[count : 2 * count] = [self.slots[row] for row in rows]
        at = block.ctypes.data
        block[3 * count :] = at, at + 8 * count, *self._at, at + 16 * count
        return Part(at + 24 * count, block[2 * count : 3 * count], (block, self._columns))
