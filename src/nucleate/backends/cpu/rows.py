"""Rows of logits through the compiled chain: made contiguous where they are not, drawn on one thread or several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu.chain import draw_rows, room_for
from nucleate.backends.cpu.halves import widen
from nucleate.backends.cpu.report import report
from nucleate.backends.cpu.simd import GROUP
from nucleate.core.event import StepLogprobs, TokenLogprob
from nucleate.core.parameter import ParameterError

AT_ONCE = 16
"""Rows that are copied together, where they must be."""

WORTH_A_THREAD = 1 << 21
"""Scores per thread: fewer take less time than waking it."""

Ids = NDArray[np.int64]


class Chains:
    """Draws from rows of ``size`` scores. Has room to work in, so that no call takes any that grows with the row."""

    def __init__(self, size: int) -> None:
        self.size, self.padded = size, -(-size // GROUP) * GROUP
        self._rooms: list[NDArray[np.float64]] = []
        self._copies: NDArray[np.float32] | None = None

    def draw(
        self,
        logits: Any,
        places: Ids,
        slots: Ids,
        columns: NDArray[np.float64],
        seeds: NDArray[np.uint64],
        steps: NDArray[np.uint64],
        edit: Callable[[int, NDArray[np.float32]], None] | None = None,
    ) -> Ids:
        """The tokens of the rows at some places: int64, NOT_DRAWN where there is none.

        logits: a ``rows.Logits``. edit(place, x_V): changes a row's scores; it is given a copy.
        """
        tokens = np.empty(len(places), np.int64)
        rows = logits.plain() if self.size == self.padded and edit is None else None
        if rows is not None:
            self._draw(rows, places, slots, columns, seeds, steps, tokens)
            return tokens
        copies = self._copy()
        for start in range(0, len(places), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            for i, place in enumerate(places[part]):
                fill(copies[i, : self.size], logits, int(place))
                if edit is not None:
                    edit(int(place), copies[i, : self.size])
            own = np.arange(len(places[part]))
            self._draw(copies, own, slots[part], columns, seeds, steps, tokens[part])
        return tokens

    def report(self, row_V: NDArray[np.float32], chosen: int, top: int, asked: tuple[int, ...]) -> StepLogprobs:
        """What ``backends.logprobs.logprobs`` says of a whole row."""
        if self.size != self.padded or not (row_V.flags.c_contiguous and row_V.flags.writeable):
            padded = self._copy()[0]
            padded[: self.size] = row_V
            row_V = padded
        if not self._rooms:
            self._rooms.append(np.empty(room_for(self.padded)))
        tokens, count = np.array([chosen, *asked], np.int64), min(top, self.size)
        ids, ranks = np.empty(count, np.int64), np.empty(len(tokens), np.int64)
        numbers = np.empty(len(tokens) + count)
        found = report(row_V, tokens, count, ids, numbers, ranks, self._rooms[0])
        one, *others = (
            TokenLogprob(*each)
            for each in zip(tokens.tolist(), numbers.tolist(), (rank or None for rank in ranks.tolist()), strict=False)
        )
        likeliest = zip(ids[:found].tolist(), numbers[len(tokens) :].tolist(), range(1, found + 1), strict=False)
        return StepLogprobs(one, tuple(TokenLogprob(*each) for each in likeliest), tuple(others))

    def _copy(self) -> NDArray[np.float32]:
        """Rows to copy into, padded."""
        if self._copies is None:
            self._copies = np.full((AT_ONCE, self.padded), -np.inf, np.float32)
        return self._copies

    def _draw(self, rows: Any, places: Ids, slots: Ids, columns: Any, seeds: Any, steps: Any, tokens: Ids) -> None:
        threads = max(1, min(cores(), len(places), len(places) * self.size // WORTH_A_THREAD))
        while len(self._rooms) < threads:
            self._rooms.append(np.empty(room_for(self.padded)))
        if threads == 1:
            draw_rows(rows, places, slots, columns, seeds, steps, tokens, self._rooms[0])
            return
        bounds = np.linspace(0, len(places), threads + 1).astype(int)
        parts = [slice(low, high) for low, high in pairwise(bounds)]
        jobs = [
            pool().submit(draw_rows, rows, places[p], slots[p], columns, seeds, steps, tokens[p], room)
            for p, room in zip(parts[1:], self._rooms[1:], strict=False)
        ]
        first = parts[0]
        draw_rows(rows, places[first], slots[first], columns, seeds, steps, tokens[first], self._rooms[0])
        for job in jobs:
            job.result()


def fill(x_V: NDArray[np.float32], logits: Any, place: int) -> None:
    """Copy a row of a ``rows.Logits``, as float32."""
    halves = logits.halves(place)
    if halves is None:
        x_V[:] = logits[place]
    else:
        widen(*halves, x_V)


_own = threading.local()


def chains(size: int) -> Chains:
    """The ``Chains`` of this thread for rows of a size; the last few sizes are kept."""
    kept: dict[int, Chains] = _own.__dict__.setdefault("kept", {})
    if size not in kept:
        if len(kept) == 4:
            del kept[next(iter(kept))]
        kept[size] = Chains(size)
    return kept[size]


@cache
def cores() -> int:
    """How many threads draw at most: those this process may run on, or NUCLEATE_THREADS."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("NUCLEATE_THREADS", "").strip()
    if asked and not (asked.isdecimal() and int(asked)):
        raise ParameterError("NUCLEATE_THREADS", f"NUCLEATE_THREADS must be an integer >= 1, got {asked!r:.40}")
    return int(asked) if asked else mine


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, cores() - 1), thread_name_prefix="nucleate")


def warm() -> None:
    """Compile every kernel, or load it from where it is kept."""
    from nucleate.backends.cpu.shifts import forbid

    room, one = Chains(GROUP), np.zeros(1, np.int64)
    x = np.zeros((1, GROUP), np.float32)
    counts = one.astype(np.uint64)
    room._draw(x, one, one, np.array([[1.0], [0.0], [0.0], [0.0], [1.0]]), counts, counts, one)  # noqa: SLF001
    room.report(x[0], 0, 1, ())
    widen(np.zeros(GROUP, np.uint16), False, x[0])
    forbid(x[0], np.full(GROUP // 32, -1, np.int32))
