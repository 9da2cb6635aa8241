"""Compiles the Shifts of a row to logit edits for the kernel: a list of commands, four integers each.

Orders point into memory: a program lives as long as its row, and holds what it points to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.dispatch.fused_pipeline import CountPenalties, LogitEdit, has_constant_listing
from nucleate.sampling.history import HistoryView
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.stage import Shift

COUNTED, ADD, ALLOW = range(3)
"""Orders: penalties of tokens that occurred (table, rules, how many rules); numbers to add to tokens (ids, numbers, how
many); a bitmask of the tokens that stay (words)."""

WRONG = np.array([-1], np.int64)
"""A list that a kernel refuses: whoever runs the row instead says what is wrong."""


class EditProgram:
    """The edits of a row. ``orders``: int64 [K, 4]; ``refresh`` before each step."""

    def __init__(self, edits: Sequence[LogitEdit], past: HistoryView, size: int) -> None:
        self.orders = np.zeros((len(edits), 4), np.int64)
        self._past, self._size = past, size
        self._held: list[Any] = [None] * len(edits)
        self._changing: list[tuple[int, Shift]] = []
        for place, one in enumerate(edits):
            if isinstance(one, CountPenalties):
                table, rules = table_of(past, one.window), np.array(one.rules, np.float64)
                self._order(place, COUNTED, table[0], rules, len(rules), table)
            elif has_constant_listing(one):
                self._list(place, one)
            else:
                self._changing.append((place, one))
        self.at = self.orders.ctypes.data, len(edits)
        self.refresh()

    @property
    def changes(self) -> bool:
        """Whether ``refresh`` has anything to do."""
        return bool(self._changing)

    def refresh(self) -> None:
        """Ask Shifts whose lists depend on what was said for the lists of this step."""
        for place, stage in self._changing:
            self._list(place, stage)

    def _list(self, place: int, stage: Shift) -> None:
        try:
            listing = self._past.listing(stage)
            ids = np.fromiter(listing, np.int64, len(listing))
            numbers = np.fromiter(listing.values(), np.float64, len(listing))
        except Exception:  # noqa: BLE001  # a stage of one's own may raise anything
            ids = WRONG
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._size:
            self._order(place, ADD, WRONG, np.zeros(1), 1)
        elif stage.touches == "listed":
            self._order(place, ADD, ids, numbers, len(ids))
        else:
            allowed = np.zeros(-(-self._size // 32) * 32, bool)
            allowed[ids] = True
            words = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
            self._order(place, ALLOW, words, words, 0)

    def _order(self, place: int, code: int, first: Any, second: Any, count: int, *held: Any) -> None:
        self._held[place] = first, second, held
        self.orders[place] = code, first.ctypes.data, second.ctypes.data, count


def table_of(past: HistoryView, window: int | None) -> tuple[NDArray[np.int64], Any]:
    """Where counts are, see ``TokenCounter.table``, and what holds them there."""
    if isinstance(past, IncrementalHistory):
        return past.table(window), past
    columns = np.array(past.counts(window), np.int64)
    return np.array([*(column.ctypes.data for column in columns), columns.shape[1]], np.int64), columns
