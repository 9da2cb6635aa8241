"""What one form may cost: the seconds its answers share beyond what each call may take for free."""

from __future__ import annotations

import threading
from time import monotonic, perf_counter, thread_time
from typing import Final, final

import numpy as np

FREE_SECONDS: Final = 0.005
"""What a call may take at any time. Only what is more counts."""
FILLED: Final = 0.1
"""Seconds by which a budget fills in a second."""


class _Marks(threading.local):
    own = -np.inf  # seconds of this thread, when they were looked at last


_MARKS = _Marks()


def mark() -> None:
    """Look at the time of this thread: what follows is measured from here, which is cheaper than for each call."""
    _MARKS.own = thread_time()


def beyond_free(begin: float) -> float:
    """By how many seconds a call that began at this time of ``perf_counter`` took more than what is free.

    Of this thread, since an answer is not to pay for what else the machine does: no more than those since ``mark``.
    """
    wall = perf_counter() - begin
    if wall <= FREE_SECONDS:
        return 0.0
    before = _MARKS.own
    mark()
    return max(0.0, min(wall, _MARKS.own - before) - FREE_SECONDS)


@final
class TimeBudget:
    """The seconds that all answers of one form may take beyond what is free. It fills again, slowly.

    Who is slow when it is empty ends; who is not does not mind.
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
        """For a call that began at this time of ``perf_counter``. Whether it was slow."""
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
            self._left = min(self.most, self._left + FILLED * (now - self._filled))
            self._filled = now
