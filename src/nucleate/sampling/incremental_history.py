"""The history of a row, updated at constant cost per token. Equal to ``History``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.history import History, TokenCounts
from nucleate.sampling.stage import Pipeline, Shift


class IncrementalHistory:
    """The history of one row, as stages read it. ``mask`` can be set before each step."""

    def __init__(self, stages: Pipeline, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.prompt, self.output = [int(token) for token in prompt], [int(token) for token in output]
        self.mask: NDArray[np.int32] | None = None
        self._stages = tuple(stage for stage in stages if isinstance(stage, Shift))  # kept, because ids of them are
        history = History(self.prompt, self.output)
        self._history = history  # its lists grow
        self._tallies: dict[int | None, Tally] = {}  # created on first use
        self._followers = {
            id(stage): follower
            for stage in self._stages
            if (follower := stage.incremental_listing(history)) is not None
        }

    def push(self, token: int) -> None:
        """Append a token."""
        self.output.append(token)
        if self._tallies:
            for tally in self._tallies.values():
                tally.push(token)
        if self._followers:
            for follower in self._followers.values():
                follower.push(token)

    def counts(self, window: int | None) -> TokenCounts:
        return self._tally(window).counts()

    def table(self, window: int | None) -> NDArray[np.int64]:
        """Where these counts are, see ``Tally.table``."""
        return self._tally(window).table

    def _tally(self, window: int | None) -> Tally:
        if window not in self._tallies:
            self._tallies[window] = Tally(self._history, window)
        return self._tallies[window]

    def listing(self, stage: Shift) -> Mapping[int, float]:
        follower = self._followers.get(id(stage))
        return stage.listing(self._history) if follower is None else follower.listing()


class Tally:
    """How often each token occurred: sparse columns with a place per token, those at zero taken out.

    ``table`` is int64 [4], for kernels: the addresses of ids, counts in the prompt and counts in the output, all int64,
    and how many there are. It stays where it is.
    """

    def __init__(self, history: History, window: int | None) -> None:
        start = history.counts(window)
        self._window = window
        self._used = len(start.ids_K)
        self._columns = np.array(start, np.int64)  # ids, in the prompt, in the output
        self.table = np.zeros(4, np.int64)
        self._grow(8)
        self._places = {int(token): place for place, token in enumerate(start.ids_K)}
        self._recent = deque(history.last(window)[1].tolist()) if window is not None and window >= 0 else None

    def push(self, token: int) -> None:
        recent = self._recent
        self._add(token, 1)
        if recent is not None:
            recent.append(token)
            if self._window is not None and len(recent) > self._window:
                self._add(recent.popleft(), -1)

    def _add(self, token: int, change: int) -> None:
        ids, prompt, output = self._seen
        place = self._places.get(token)
        if place is None:
            place = self._used
            if place == len(ids):
                self._grow(place)
                ids, prompt, output = self._seen
            self._places[token] = place
            ids[place], prompt[place], output[place] = token, 0, 0
            self._used = self._seen_table[3] = place + 1
        output[place] += change
        if change < 0 and not output[place] and not prompt[place]:  # the last takes its place
            last = self._used = self._seen_table[3] = self._used - 1
            moved = ids[last]
            ids[place], prompt[place], output[place] = moved, prompt[last], output[last]
            self._places[moved] = place
            del self._places[token]

    def _grow(self, more: int) -> None:
        """Make room for more columns, which are somewhere else then. Views give one number faster than arrays do."""
        self._columns = np.concatenate((self._columns, np.zeros((3, more), np.int64)), axis=1)
        self._seen, self._seen_table = [column.data for column in self._columns], self.table.data
        self.table[:] = *(column.ctypes.data for column in self._columns), self._used

    def counts(self) -> TokenCounts:
        return TokenCounts(*self._columns[:, : self._used])
