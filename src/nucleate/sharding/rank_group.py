"""The ranks of a tensor-parallel model, from rank 0: every call is made on all ranks, in the same order."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from nucleate.models.protocol import RunnerLostError
from nucleate.sharding.rank import Rank, SetupError
from nucleate.sharding.rank_channel import encode

CLOSE = "close"
"""The name of the last call."""

CHECKED = {"new_runner", "new_sampler", "capture", "add", "remove", "sample", "accept"}
SAME_ON_ALL = ValueError, TypeError, SetupError
"""Calls whose arguments are checked before anything is exchanged, and the errors that all ranks raise then."""

REPORT_SECONDS = 1.0
"""How long a failed call waits for a process to end, to name it."""


class OtherProcesses(Protocol):
    """The processes of the ranks from 1 on."""

    def ended(self) -> str:
        """Those that have ended, as text; "" if none has, or if it is not known."""

    def stop(self, *, wait: bool) -> None:
        """End the processes, and leave the process group. wait: for them to end by themselves, for a few seconds."""


class RankGroup:
    """The driver: owns rank 0. Thread-safe: one call runs at a time.

    A call that fails on one rank only is the last: the ranks may be in different states.
    """

    def __init__(self, rank: Rank, processes: OtherProcesses) -> None:
        self.rank, self.processes = rank, processes
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._numbers, self._released = itertools.count(), deque[int]()
        atexit.register(self.close)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of ``Rank`` on all ranks. Returns the result of rank 0. Raises RunnerLostError."""
        with self._lock:
            if self._failure is not None:
                raise RunnerLostError(self._failure)
            released = [self._released[at] for at in range(len(self._released))]  # it may grow at any time
            payload = encode((released, name, arguments))
            for _ in released:
                self._released.popleft()
            try:
                if lost := self.processes.ended():
                    raise RuntimeError(lost)
                self.rank.channel.send(payload)
                self.rank.release(released)
                return getattr(self.rank, name)(*arguments)
            except BaseException as error:
                if is_same_on_all(name, error):
                    raise
                self._fail(error)
                if isinstance(error, Exception):
                    raise RunnerLostError(self._failure) from error
                raise

    def number(self, owner: Any) -> int:
        """A new number for an object on all ranks, which is released with its owner here."""
        number = next(self._numbers)
        weakref.finalize(owner, self._released.append, number).atexit = False
        return number

    def _fail(self, error: BaseException) -> None:
        end = time.monotonic() + REPORT_SECONDS
        while not (ended := self.processes.ended()) and time.monotonic() < end:
            time.sleep(0.02)
        why = ended or " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._failure = f"the ranks of the model (tensor_parallel={self.rank.size}) have stopped: {why}"
        self.processes.stop(wait=False)
        atexit.unregister(self.close)

    def close(self) -> None:
        """End the other ranks. Later calls raise RunnerLostError."""
        if not self._lock.acquire(timeout=5.0):  # a thread that is in a call when the process ends
            self.processes.stop(wait=False)
            return
        try:
            if self._failure is None:
                self._failure = "the model was closed"
                with suppress(RuntimeError):
                    self.rank.channel.send(encode(((), CLOSE, ())))
                self.processes.stop(wait=True)
                atexit.unregister(self.close)
        finally:
            self._lock.release()


def follow(rank: Rank) -> None:
    """Make the calls of rank 0 on another rank, until it closes.

    Raises any other error than those that all ranks raise.
    """
    while True:
        released, name, arguments = rank.channel.receive()
        rank.release(released)
        if name == CLOSE:
            return
        try:
            getattr(rank, name)(*arguments)
        except Exception as error:
            if not is_same_on_all(name, error):
                raise


def is_same_on_all(name: str, error: BaseException) -> bool:
    """Whether all ranks raise this error of a call."""
    return name in CHECKED and isinstance(error, SAME_ON_ALL)
