"""Toy models behind the runner of GGUF models, with a simulated memory of llama.cpp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from toy_models import Toy

from nucleate.models.gguf.batched_gguf import BatchedGguf, SequenceMap
from nucleate.models.gguf.llama_library import Token
from nucleate.models.protocol import ModelError


class SimulatedContext:
    """A context whose cells store token ids; see ``GgufContext``. It uses only what is in the cells.

    cells: how many there are. whole: the memory cannot be cut, as that of recurrent models.
    """

    def __init__(self, model: Toy, cells: int, *, whole: bool = False) -> None:
        self.model, self.cells, self.whole = model, cells, whole
        self.slots: dict[int, dict[int, list[int]]] = {}  # by slot and position: the cell, a list with its token
        self.computed = 0

    @property
    def used(self) -> int:
        return len({id(cell) for slot in self.slots.values() for cell in slot.values()})

    def remove(self, slot: int, start: int) -> None:
        """See ``Cells.remove``."""
        own = self.slots.get(slot, {})
        assert not self.whole or not start
        self.slots[slot] = {position: cell for position, cell in own.items() if position < start}

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See ``Cells.copy``."""
        own = self.slots.setdefault(target, {})
        assert start < stop <= len(self.slots[source])
        assert len(own) == start
        assert not self.whole or (start == 0 and stop == len(self.slots[source]))
        for position in range(start, stop):
            cell = self.slots[source][position]
            own[position] = [*cell] if self.whole else cell

    def forward(self, tokens: list[Token]) -> NDArray[np.float32]:
        """See ``GgufContext.forward``."""
        self.computed += len(tokens)
        rows = []
        for token, position, slot, logits in tokens:
            own = self.slots.setdefault(slot, {})
            if position != len(own):
                raise ModelError(f"position {position} after {len(own)} tokens")
            own[position] = [token]
            if logits:
                rows.append(self.model.rule(tuple(own[i][0] for i in range(position + 1))))
        assert self.whole or self.used <= self.cells, "the KV cache is full"
        return np.stack(rows) if rows else np.empty((0, self.model.vocab_size), np.float32)


class CellToy(BatchedGguf):
    """A Toy behind ``BatchedGguf``. slots: sequences of llama.cpp. whole: see ``SimulatedContext``."""

    def __init__(
        self, model: Toy, blocks: int, block_size: int, *, slots: int = 24, keep: int = 10**6, whole: bool = False
    ) -> None:
        self.model, self.blocks, self.block_size, self.paged = model, blocks, block_size, not whole
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, "cells"
        self.max_sequences = slots
        self._context = self.context = SimulatedContext(model, blocks * block_size, whole=whole)
        self._map = SequenceMap(self.context, slots, block_size, keep, whole=whole)
