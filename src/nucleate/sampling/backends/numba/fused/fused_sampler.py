"""Runs rows of logits through the fused kernel, on one thread or several."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import CHAIN
from nucleate.jit.thread_pool import cores, pool
from nucleate.sampling.backends.numba.fused.row_table import room_for

WORTH_A_THREAD = 250e-6
"""Seconds of work per thread: with less, waking it costs more than it saves, where a model's own threads are awake."""

KEPT = 16
"""Threads and sizes of rows for which there is room."""


class FusedSampler:
    """Draws from rows of ``size`` scores. Has room to work in, so that no call takes any that grows with the row."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._draw_rows = CHAIN.draw_rows
        self._rooms: list[NDArray[np.float64]] = []
        self._at: list[int] = []
        self._add_room()
        self._begun = np.zeros(1, np.int64)  #: how many rows of this call threads have begun with
        self._begun_at = self._begun.ctypes.data
        self._pace = size * 1e-10  # seconds per row, as of late

    def _add_room(self) -> None:
        self._rooms.append(np.empty(room_for(self.size)))
        self._at.append(self._rooms[-1].ctypes.data)

    def draw(self, lying: tuple[Any, int, int, int], count: int, control: int, masks: tuple[int, int] = (0, 0)) -> None:
        """Draw from some rows. control: the address of that of a ``Table``, which has the tokens afterwards.

        lying: where the rows are, see ``inputs.Lying``. masks: where the bitmask of the first row is, and how many
        bytes further the next. A row from which nothing is drawn has NOT_DRAWN."""
        self._begun[0] = 0
        if count == 1:
            self._draw_rows(*lying, self.size, *masks, 1, self._begun_at, control, self._at[0])
            return
        part: tuple[Any, ...] = (*lying, self.size, *masks, count, self._begun_at, control)
        jobs: list[Future[int]] = []
        if count * self._pace > 2 * WORTH_A_THREAD and cores() > 1:
            threads = min(int(count * self._pace / WORTH_A_THREAD), count, cores())
            while len(self._at) < threads:
                self._add_room()
            jobs = [pool().submit(self._draw_rows, *(*part, at)) for at in self._at[1:threads]]
        try:
            start = perf_counter()
            drawn = self._draw_rows(*part, self._at[0])
            if drawn:
                self._pace = min((perf_counter() - start) / drawn, 8 * self._pace)  # a call that compiles says little
        finally:
            for job in jobs:
                if not job.cancel():  # else nobody has begun with it: its core has other things to do
                    job.result()


def chains(size: int) -> FusedSampler:
    """The ``FusedSampler`` of this thread for rows of a size; the last few are kept."""
    return _chains(size, threading.get_ident())


@lru_cache(KEPT)
def _chains(size: int, thread: int) -> FusedSampler:
    return FusedSampler(size)
