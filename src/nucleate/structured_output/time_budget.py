"""The CPU time budget of a constraint for slow grammar masks, shared by its sequences."""

from __future__ import annotations

import threading
from time import monotonic, perf_counter, thread_time
from typing import Final, final

import numpy as np

FREE_SECONDS: Final = 0.005
"""Time of a call that is not charged."""
REFILL_RATE: Final = 0.1
"""Seconds added to a budget per second."""


class _CpuTime(threading.local):
    marked = -np.inf  # CPU seconds of this thread at the last mark


_CPU_TIME = _CpuTime()


def mark_cpu_time() -> None:
    """Record the CPU time of this thread. Called once per batch of calls, which is cheaper than for each call."""
    _CPU_TIME.marked = thread_time()


def chargeable_seconds(begin: float) -> float:
    """Return the seconds by which a call that began at ``begin`` (``perf_counter``) exceeded FREE_SECONDS.

    At most the CPU time of this thread since ``mark_cpu_time`` counts, so that the load of the machine is not charged.
    """
    wall = perf_counter() - begin
    if wall <= FREE_SECONDS:
        return 0.0
    marked = _CPU_TIME.marked
    mark_cpu_time()
    return max(0.0, min(wall, _CPU_TIME.marked - marked) - FREE_SECONDS)


@final
class TimeBudget:
    """A token bucket of seconds: the time that all sequences of a constraint may take beyond FREE_SECONDS per call.

    When it is empty, slow sequences end with an error; fast ones are not affected.
    """

    __slots__ = ("_lock", "_refilled_at", "_remaining", "capacity")

    def __init__(self, seconds: float) -> None:
        self.capacity = self._remaining = seconds
        self._refilled_at = monotonic()
        self._lock = threading.Lock()

    @property
    def remaining(self) -> float:
        self._refill()
        return self._remaining

    @property
    def empty(self) -> bool:
        return self.remaining < 0

    def charge(self, begin: float) -> bool:
        """Charge a call that began at ``begin`` (``perf_counter``). Returns whether it was slow."""
        seconds = chargeable_seconds(begin)
        if seconds <= 0:
            return False
        self._refill()
        with self._lock:
            self._remaining -= seconds
        return True

    def _refill(self) -> None:
        with self._lock:
            now = monotonic()
            self._remaining = min(self.capacity, self._remaining + REFILL_RATE * (now - self._refilled_at))
            self._refilled_at = now
