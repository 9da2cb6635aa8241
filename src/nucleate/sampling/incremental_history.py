"""The history of a row, updated in constant time per token. Equal to ``History``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import changed_copy
from nucleate.sampling.history import Context, History, TokenCounts
from nucleate.sampling.inputs import history
from nucleate.sampling.stage import Draw, Pipeline, Shift, Transform


class IncrementalHistory:
    """The history of one row, a HistoryView. Set ``mask`` before each step."""

    __slots__ = (
        *("_contexts", "_counters", "_history", "_listings", "_origin", "_stages", "_updated", "_values"),
        *("mask", "output", "prompt"),
    )

    def __init__(self, stages: Pipeline, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.prompt, self.output = [int(token) for token in prompt], [int(token) for token in output]
        self.mask: NDArray[np.int32] | None = None
        self._origin: IncrementalHistory | None = None
        readers = [s for s in stages if isinstance(s, Shift | Transform) or (isinstance(s, Draw) and s.keyed)]
        self._stages: tuple[Any, ...] = tuple(readers)  # keeps the ids of _listings valid
        self._history = History(self.prompt, self.output)  # shares the growing lists
        self._counters: dict[int | None, TokenCounter] = {}  # by window, created on first use
        self._contexts: dict[int, ContextIndex] = {}  # by length, created on first use
        self._values: dict[int, tuple[Any, Any, Any]] = {}  # by id of the stage: stage, last output tokens, values
        shifts = [stage for stage in readers if isinstance(stage, Shift)]
        self._listings = {
            id(stage): listing for stage in shifts if (listing := stage.incremental_listing(self._history)) is not None
        }
        self._updated: tuple[Any, ...] = tuple(self._listings.values())  # what a token updates

    def fork(self) -> IncrementalHistory:
        """A copy that continues on its own. This history must not change any more: copies share what it has computed.

        A stage whose incremental listing cannot fork computes its own.
        """
        past, listings = History(self.prompt, self.output.copy()), {}
        for stage in self._stages:
            if (listing := self._listings.get(id(stage))) is not None:
                listings[id(stage)] = listing.fork() if hasattr(listing, "fork") else stage.incremental_listing(past)
        changed = {"_history": past, "_listings": listings, "_updated": tuple(listings.values()), "_origin": self}
        return changed_copy(self, output=past.output, mask=None, _counters={}, _contexts={}, _values={}, **changed)

    def push(self, token: int) -> None:
        """Append a token."""
        self.output.append(token)
        for each in self._updated:
            each.push(token)

    def pop(self, count: int) -> None:
        """Take back the last output tokens. Counts are updated per token; other listings are computed again."""
        for _ in range(count if self._counters else 0):
            total = len(self.prompt) + len(self.output) - 1
            for counter in self._counters.values():
                counter.pop(self.output[-1], self.prompt, self.output, total)
            del self.output[-1]
        if not self._counters:
            del self.output[len(self.output) - count :]
        for stage in self._stages:
            if id(stage) in self._listings:
                self._listings[id(stage)] = stage.incremental_listing(self._history)
        self._contexts, self._origin = {}, None
        self._updated = *self._listings.values(), *self._counters.values()

    @property
    def append(self) -> Callable[[int], None]:
        """As ``push``, and faster: if no stage reads the history, nothing but the list of tokens is touched."""
        return self.push if self._stages else self.output.append

    def counts(self, window: int | None) -> TokenCounts:
        return self._counter(window).counts()

    def table(self, window: int | None) -> NDArray[np.int64]:
        """The addresses of these counts, see ``TokenCounter.table``."""
        return self._counter(window).table

    def _counter(self, window: int | None) -> TokenCounter:
        counter = self._counters.get(window)
        if counter is None:
            origin = self._origin
            if origin is not None and len(origin.output) == len(self.output):  # nothing was appended since the fork
                counter = origin._counter(window).fork()  # noqa: SLF001
            else:
                counter = TokenCounter(self._history, window)
            if self._stages:  # see ``append``
                self._counters[window] = counter
                self._updated += (counter,)
        return counter

    def listing(self, stage: Shift) -> Mapping[int, float]:
        incremental = self._listings.get(id(stage))
        return stage.listing(self._history) if incremental is None else incremental.listing()

    def values(self, stage: Shift, size: int) -> Any:
        """See ``HistoryView``. Computed again if the last ``Shift.context`` output tokens have changed."""
        if stage.context is None:
            return stage.values(self, size)
        last = size, self.output[len(self.output) - min(stage.context, len(self.output)) :]
        known, before, found = self._values.get(id(stage), (None, None, None))
        if known is not stage or before != last:
            found = stage.values(self, size)
            if len(self._values) > len(self._stages):  # of stages whose state has changed
                self._values.clear()
            self._values[id(stage)] = stage, last, found
        return found

    def context(self, n: int) -> Context | None:
        index = self._contexts.get(n)
        if index is None:
            index = ContextIndex(self.output, n)
            if self._stages:  # see ``append``
                self._contexts[n] = index
                self._updated += (index,)
        return index.last()


class HistoryMaker:
    """Makes the histories of new rows of a vocabulary size. Raises ParameterError for token ids outside of it.

    Rows with the same stages, prompt and output, one after another, are the n outputs of a request: what their
    histories have in common is computed for the first two, and the others share it with the second.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: tuple[Any, ...] = ()  # stages, prompt and output of the last row
        self._origin: IncrementalHistory | None = None  # what the histories of rows like the last one are copies of

    def new(self, stages: Pipeline, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> IncrementalHistory:
        """The history of a row."""
        prompt = history(prompt_ids, self._size, "prompt_ids").tolist()
        output = history(output_ids, self._size, "output_ids").tolist()
        given = [*map(id, stages)], prompt, output
        if given != self._last[1:]:
            self._last, self._origin = (stages, *given), None
            return IncrementalHistory(stages, prompt, output)
        if self._origin is None:
            self._origin = IncrementalHistory(stages, prompt, output)
        return self._origin.fork()


class ContextIndex:
    """The last n output tokens, and those before each earlier token. output: the growing list."""

    def __init__(self, output: list[int], n: int) -> None:
        self._output, self._n = output, n
        self._earlier = {tuple(output[end - n : end]) for end in range(n, len(output))}

    def push(self, token: int) -> None:
        end = len(self._output) - 1
        if end >= self._n:
            self._earlier.add(tuple(self._output[end - self._n : end]))

    def last(self) -> Context | None:
        if len(self._output) < self._n:
            return None
        tokens = tuple(self._output[len(self._output) - self._n :])
        return Context(tokens, tokens in self._earlier)


class TokenCounter:
    """Counts the tokens of a window: a sparse table with one entry per distinct token.

    ``table`` is int64 [4], for kernels: the addresses of the token ids, their counts in the prompt and their counts in
    the output, each int64, and the number of entries. Its own address does not change.
    """

    def __init__(self, history: History, window: int | None) -> None:
        start = history.counts(window)
        self._window = window
        self._size = len(start.ids_K)
        self._columns = np.array(start, np.int64)  # ids, prompt counts, output counts
        self.table = np.zeros(4, np.int64)
        self._grow(8)
        self._positions = {int(token): position for position, token in enumerate(start.ids_K)}
        self._recent = deque(history.last(window)[1].tolist()) if window is not None and window >= 0 else None

    def fork(self) -> Self:
        """A copy that continues on its own."""
        recent = None if self._recent is None else self._recent.copy()
        forked = changed_copy(self, _positions=self._positions.copy(), _recent=recent, table=np.zeros(4, np.int64))
        forked._grow(8)  # noqa: SLF001  # its own columns
        return forked

    def push(self, token: int) -> None:
        recent = self._recent
        self._add(token, 1)
        if recent is not None:
            recent.append(token)
            if self._window is not None and len(recent) > self._window:
                self._add(recent.popleft(), -1)

    def pop(self, token: int, prompt: list[int], output: list[int], total: int) -> None:
        """Take back the last token. prompt, output: the tokens with it. total: their number without it."""
        if self._window == 0:
            return
        self._add(token, -1)
        if self._recent is not None:
            self._recent.pop()
            start = total - (self._window or 0)
            if start >= 0:  # a token enters at the start of the window
                entering = prompt[start] if start < len(prompt) else output[start - len(prompt)]
                self._add(entering, 1)
                self._recent.appendleft(entering)

    def _add(self, token: int, change: int) -> None:
        ids, prompt, output = self._views
        position = self._positions.get(token)
        if position is None:
            position = self._size
            if position == len(ids):
                self._grow(position)
                ids, prompt, output = self._views
            self._positions[token] = position
            ids[position], prompt[position], output[position] = token, 0, 0
            self._size = self._table_view[3] = position + 1
        output[position] += change
        if change < 0 and not output[position] and not prompt[position]:  # replace it by the last entry
            last = self._size = self._table_view[3] = self._size - 1
            moved = ids[last]
            ids[position], prompt[position], output[position] = moved, prompt[last], output[last]
            self._positions[moved] = position
            del self._positions[token]

    def _grow(self, more: int) -> None:
        """Add space, which moves the columns. Memoryviews access single numbers faster than arrays."""
        self._columns = np.concatenate((self._columns, np.zeros((3, more), np.int64)), axis=1)
        self._views, self._table_view = [column.data for column in self._columns], self.table.data
        self.table[:] = *(column.ctypes.data for column in self._columns), self._size

    def counts(self) -> TokenCounts:
        return TokenCounts(*self._columns[:, : self._size])
