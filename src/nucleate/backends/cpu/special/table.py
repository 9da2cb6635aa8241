"""The rows that the compiled chain can run, a column of each array per row, and where these are. Knows no compiler.

A kernel is given one address: that of ``control``, which has those of all the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

PLACES, SLOTS, NUMBERS, PROGRAMS, SEEDS, STEPS, TOKENS = range(7)
"""What the addresses in ``control`` are of."""


class Table:
    """Rows come and go; a column is where ``slots`` says. ``count`` numbers per row, see ``plan.Numbers``.

    ``tokens`` is what the last call drew, in its order. Arrays move as they grow.
    """

    def __init__(self, count: int, capacity: int = 4) -> None:
        self.rows: list[int] = []
        self.slots: dict[int, int] = {}
        self.numbers, self.programs = np.zeros((capacity, count)), np.zeros((capacity, 2), np.int64)
        self.seeds, self.steps = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64)
        self._tell()

    def _tell(self) -> None:
        self.every, self.tokens = np.arange(len(self.steps)), np.empty(len(self.steps), np.int64)
        arrays = self.every, self.every, self.numbers, self.programs, self.seeds, self.steps, self.tokens
        self.control = np.array([array.ctypes.data for array in arrays], np.int64)
        self.at: int = self.control.ctypes.data
        self.held = self.control, arrays  # what a kernel may still be at when the table moves

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
            for column in (self.numbers, self.programs, self.seeds, self.steps):
                column[slot] = column[len(self.rows)]
            self.rows[slot], self.slots[last] = last, slot

    def part(self, places: Ids, slots: Ids) -> Ids:
        """A ``control`` for some rows: their places in a batch, and whose columns they have. It holds neither."""
        control = self.control.copy()
        control[PLACES], control[SLOTS] = places.ctypes.data, slots.ctypes.data
        return control
