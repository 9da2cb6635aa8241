"""The time budget of a constraint, shared by its sequences."""

from __future__ import annotations

import threading
from time import monotonic, perf_counter, thread_time
from typing import Final, final

import numpy as np

FREE_SECONDS: Final = 0.005
"""Time of a call that is free of charge."""
REFILL_RATE: Final = 0.1
"""Seconds by which a budget refills per second."""


class _Marks(threading.local):
    own = -np.inf  # CPU seconds of this thread at the last mark


_MARKS = _Marks()


def mark() -> None:
    """Record the CPU time of this thread; once per batch of calls, which is cheaper than for each call."""
    _MARKS.own = thread_time()


def beyond_free(begin: float) -> float:
    """Return by how many seconds a call that began at this ``perf_counter`` time exceeded the free time.

    At most the CPU time of this thread since ``mark``, so that the load of the machine is not charged.
    """
    wall = perf_counter() - begin
    if wall <= FREE_SECONDS:
        return 0.0
    before = _MARKS.own
    mark()
    return max(0.0, min(wall, _MARKS.own - before) - FREE_SECONDS)


@final
class TimeBudget:
    """The time that all sequences of a constraint may take beyond the free time; it refills slowly.

    When it is empty, slow sequences end with an error; fast ones are not affected.
    """

    __slots__ = ("_filled", "_left", "_lock", "most")

    def __init__(self, seconds: float) -> None:
        self.most = self._left = seconds
        self._filled = monotonic()
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        self._fill()
        return self._left

    @property
    def empty(self) -> bool:
        return self.left < 0

    def charge(self, begin: float) -> bool:
        """Charge a call that began at this ``perf_counter`` time. Returns whether it was slow."""
        more = beyond_free(begin)
        if more <= 0:
            return False
        self._fill()
        with self._lock:
            self._left -= more
        return True

    def _fill(self) -> None:
        with self._lock:
            now = monotonic()
            self._left = min(self.most, self._left + REFILL_RATE * (now - self._filled))
            self._filled = now
