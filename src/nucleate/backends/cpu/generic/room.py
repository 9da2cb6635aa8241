"""Scratch arrays for rows of one size, per thread. Nothing in them outlives a row."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.core.noise import GROUP_SIZE

KEPT = 16
"""Threads and sizes of rows for which there is room."""


class Room:
    """size: V. ``start`` before each row."""

    def __init__(self, size: int) -> None:
        self.size, self.groups = size, -(-size // GROUP_SIZE)
        self.keys = np.empty(self.groups * GROUP_SIZE, np.int64)
        self.spare_G, self.scores_V = np.empty(self.groups), np.empty(size)
        self.ids = np.arange(size)  #: nobody writes to them
        self._rows: list[NDArray[np.float32]] = []
        self._used = 0

    def start(self) -> None:
        """All rows are free again."""
        self._used = 0

    def row(self) -> NDArray[np.float32]:
        """A row to write to."""
        if self._used == len(self._rows):
            self._rows.append(np.empty(self.size, np.float32))
        self._used += 1
        return self._rows[self._used - 1]

    def plain(self, logits_V: NDArray[Any]) -> NDArray[np.float32]:
        """A row as the kernels take it: float32, contiguous, aligned, writeable; the row itself if it is."""
        row_V = np.asarray(logits_V, np.float32)
        flags = row_V.flags
        if flags.c_contiguous and flags.writeable and flags.aligned:
            return row_V
        copy_V = self.row()
        copy_V[:] = row_V
        return copy_V


def room(size: int) -> Room:
    """The room of this thread for rows of a size; the last few are kept."""
    return _room(size, threading.get_ident())


@lru_cache(KEPT)
def _room(size: int, thread: int) -> Room:
    return Room(size)
