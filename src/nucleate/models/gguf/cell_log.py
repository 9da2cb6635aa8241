"""Keeps the KV cache of llama.cpp in the order in which it was computed.

Flash attention adds the cells of a sequence up one after another, from the first cell of the cache to the last, and
skips those of others. Its result therefore depends on the order of a sequence's cells, down to the last bit. llama.cpp
puts a new token into the first free cell, so after a removal a later token may get an earlier cell. Here cells are only
added at the end: removed ones stay, as cells of a sequence that nobody reads, until the others are moved together, in
the same order. In the same way they are moved to a larger context: llama.cpp writes to all of its memory at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.models.gguf.llama_library import GgufContext, Token
from nucleate.models.protocol import ModelError

MAX_DEAD = 512
"""As many removed cells are always kept. Each forward pass reads all cells, and moving them takes as long as a few."""


class Piece(NamedTuple):
    """Successive cells that the same sequences hold."""

    start: int  #: the position of the first one
    cells: NDArray[np.int64]
    slots: list[int]


class CellLog:
    """The cells of sequences that are numbered from 0: at most ``max_size`` cells and ``max_slots`` sequences.

    new_context: creates a context with so many cells and sequences. Raises ModelError.
    """

    first_size, first_slots = 1024, 16
    """Of the first context; the next ones are twice as large as the one before."""

    def __init__(self, new_context: Callable[[int, int], GgufContext], max_size: int, max_slots: int) -> None:
        self._new_context, self._max_size, self._max_slots = new_context, max_size, max_slots
        self._size, self.slots = min(self.first_size, max_size), min(self.first_slots, max_slots)  #: of the context
        self._context = new_context(self._size, self.slots)
        self._cells: list[list[int]] = [[] for _ in range(max_slots)]  # of each sequence, by position
        self._holders = np.zeros(max_size, np.int16)  # sequences by cell
        self.end = self.dead = 0  # cells in use, and those of them that no sequence holds
        self.evict: Callable[[], bool] = lambda: False
        """Removes a sequence that is not needed any more; returns whether there was one."""

    def remove(self, slot: int, start: int) -> None:
        """Remove the tokens of a sequence from a position on."""
        own = self._cells[slot]
        gone = own[start:]
        del own[start:]
        self._holders[gone] -= 1
        kept = len(gone)
        while kept and gone[kept - 1] == self.end - 1 and not self._holders[self.end - 1]:
            kept, self.end = kept - 1, self.end - 1
        if kept:
            self._context.copy(slot, self.slots, start, start + kept)  # the first number that is no sequence's
            self.dead += int(np.count_nonzero(self._holders[gone[:kept]] == 0))
        self._context.remove(slot, start)  # also tokens of a call that failed

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Add the cells of the positions start to stop - 1 of one sequence to another one, which ends at ``start``."""
        shared = self._cells[source][start:stop]
        self._cells[target] += shared
        self._holders[shared] += 1
        self._context.copy(source, target, start, stop)

    def follows(self, slot: int, other: int) -> bool:
        """Whether the next cells of a sequence may be those of another one: they come after its own."""
        own, cells = self._cells[slot], self._cells[other]
        return not own or len(own) >= len(cells) or cells[len(own)] > own[-1]

    def forward(self, tokens: list[Token]) -> NDArray[np.float32]:
        """Compute tokens. Returns the requested logits [L, V], valid until the next call. Raises ModelError."""
        size, parts = self._context.batch_size, []
        for begin in range(0, len(tokens), size):
            some = tokens[begin : begin + size]
            self._make_room(len(some) + self._context.padding(len(some)))
            parts.append(self._context.decode(some))
            if len(tokens) > size:
                parts[-1] = parts[-1].copy()
            for cell, (_, _, slot, _) in enumerate(some, self.end):
                self._cells[slot].append(cell)
            self._holders[self.end : self.end + len(some)] = 1
            self.end += len(some)
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, self._context.no_logits])

    def _make_room(self, count: int) -> None:
        while self.end + count > self._size:
            live = self.end - self.dead
            if self._size < self._max_size and 2 * (live + count) > self._size:
                self._move(max(2 * self._size, live + count), self.slots)
            elif self.dead or self.evict():
                self._move(self._size, self.slots)
            else:
                raise ModelError("llama.cpp failed: the KV cache is full")
        if self.dead > max(MAX_DEAD, self.end - self.dead):
            self._move(self._size, self.slots)

    def add_slots(self) -> None:
        """Allow twice as many sequences. The last logits become invalid. Raises ModelError."""
        self._move(self._size, 2 * self.slots)

    def _move(self, size: int, slots: int) -> None:
        """Move the cells that sequences hold to the beginning of a context of this size, in their order.

        If there is no memory for a larger one, the context keeps its size.
        """
        pieces = self._pieces()
        saved = [self._context.save(one.slots[0], one.start, one.start + len(one.cells)) for one in pieces]
        size, slots, old = min(size, self._max_size), min(slots, self._max_slots), (self._size, self.slots)
        failure: ModelError | None = None
        if (size, slots) == old:
            self._context.clear()
        else:
            self._context.close()
            try:
                self._context = self._new_context(size, slots)
                self._size, self.slots = size, slots
            except ModelError as error:
                failure = error
                self._context = self._new_context(*old)
        moved = np.zeros(self._max_size, np.int64)
        self.end = self.dead = 0
        for (start, cells, holders), data in zip(pieces, saved, strict=True):
            self._context.restore(data, holders, start, start + len(cells))
            moved[cells] = np.arange(self.end, self.end + len(cells))
            self.end += len(cells)
        self._holders[:] = 0
        for slot, own in enumerate(self._cells):
            if own:
                self._cells[slot] = moved[own].tolist()
                self._holders[self._cells[slot]] += 1
        if failure is not None:
            raise failure

    def _pieces(self) -> list[Piece]:
        """All cells that sequences hold, by position: an order in which each sequence finds its own ones in order.

        A piece spans no multiple of the attention window: llama.cpp saves no cells that the last one does not see.
        """
        holders = np.zeros((len(self._cells), self.end), bool)
        for slot, own in enumerate(self._cells):
            holders[slot, own] = True
        window, found = self._context.window, np.zeros(self.end, bool)
        pieces = []
        for own in self._cells:
            cells = np.asarray(own, np.int64)
            if not len(cells) or found[cells].all():
                continue
            new, held = ~found[cells], holders[:, cells]
            borders = (new[1:] != new[:-1]) | (held[:, 1:] != held[:, :-1]).any(axis=0)
            starts = {0, *(np.flatnonzero(borders) + 1).tolist(), *(range(0, len(cells), window) if window else ())}
            ends = [*sorted(starts)[1:], len(cells)]
            for start, stop in zip(sorted(starts), ends, strict=True):
                if new[start]:
                    pieces.append(Piece(start, cells[start:stop], np.flatnonzero(held[:, start]).tolist()))
            found[cells] = True
        return sorted(pieces, key=lambda one: one.start)
