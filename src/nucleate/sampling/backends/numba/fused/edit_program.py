"""Compiles the Shifts of a row to logit edits for the kernel: a list of commands, four integers each.

Commands hold addresses; the program keeps the buffers alive that they point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.dispatch.fused_pipeline import CountPenalties, Edit, unchanging
from nucleate.sampling.history import HistoryView
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.stage import Shift

PENALISE, ADD, ALLOW = range(3)
"""Commands: PENALISE tokens that occurred (table, rules, number of rules); ADD to scores (ids, values, number of ids);
ALLOW only the tokens of a bitmask (words)."""

INVALID_IDS = np.array([-1], np.int64)
"""An id list that the kernel rejects; the fallback path then raises the error."""


class EditProgram:
    """The edits of a row. ``commands``: int64 [K, 4]. Call ``refresh`` before each step."""

    def __init__(self, edits: Sequence[Edit], past: HistoryView, size: int) -> None:
        self.commands = np.zeros((len(edits), 4), np.int64)
        self._past, self._size = past, size
        self._buffers: list[Any] = [None] * len(edits)
        self._dynamic: list[tuple[int, Shift]] = []
        for index, edit in enumerate(edits):
            if isinstance(edit, CountPenalties):
                table, rules = count_table(past, edit.window), np.array(edit.rules, np.float64)
                self._set_command(index, PENALISE, table[0], rules, len(rules), table)
            elif unchanging(edit):
                self._set_listing(index, edit)
            else:
                self._dynamic.append((index, edit))
        self.commands_at = self.commands.ctypes.data, len(edits)
        self.refresh()

    @property
    def is_dynamic(self) -> bool:
        """Whether some token list depends on the history."""
        return bool(self._dynamic)

    def refresh(self) -> None:
        """Update the token lists that depend on the history."""
        for index, stage in self._dynamic:
            self._set_listing(index, stage)

    def _set_listing(self, index: int, stage: Shift) -> None:
        try:
            listing = self._past.listing(stage)
            ids = np.fromiter(listing, np.int64, len(listing))
            values = np.fromiter(listing.values(), np.float64, len(listing))
        except Exception:  # noqa: BLE001  # custom stages may raise anything
            ids = INVALID_IDS
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._size:
            self._set_command(index, ADD, INVALID_IDS, np.zeros(1), 1)
        elif stage.touches == "listed":
            self._set_command(index, ADD, ids, values, len(ids))
        else:
            allowed = np.zeros(-(-self._size // 32) * 32, bool)
            allowed[ids] = True
            words = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
            self._set_command(index, ALLOW, words, words, 0)

    def _set_command(self, index: int, code: int, first: Any, second: Any, count: int, *buffers: Any) -> None:
        self._buffers[index] = first, second, buffers
        self.commands[index] = code, first.ctypes.data, second.ctypes.data, count


def count_table(past: HistoryView, window: int | None) -> tuple[NDArray[np.int64], Any]:
    """The addresses of token counts, see ``IncrementalHistory.table``, and the object that owns them."""
    if isinstance(past, IncrementalHistory):
        return past.table(window), past
    columns = np.array(past.counts(window), np.int64)
    return np.array([*(column.ctypes.data for column in columns), columns.shape[1]], np.int64), columns
