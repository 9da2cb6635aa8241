"""A model without weights whose logits come from a function, also behind the runner of GGUF models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.models.gguf.batched_gguf import BatchedGguf, SequenceMap
from nucleate.models.gguf.llama_library import Token
from nucleate.models.paged_cache import TreeMask
from nucleate.models.protocol import ModelError
from nucleate.models.runner import Fork, ModelInput, Move


class Toy:
    """A Model with ``vocab_size`` tokens. ``rule`` maps all token ids so far to the next logits [V]."""

    runtime = "toy"

    def __init__(
        self, rule: Callable[[tuple[int, ...]], NDArray[np.float32]], vocab_size: int, context_length: int = 1024
    ) -> None:
        self.rule, self.vocab_size, self.context_length = rule, vocab_size, context_length

    @classmethod
    def script(cls, token_ids: Sequence[int], vocab_size: int, prompt_length: int, context_length: int = 1024) -> Toy:
        """A model that generates these tokens after a prompt of the given length, then repeats the last one."""

        def rule(seen: tuple[int, ...]) -> NDArray[np.float32]:
            logits_V = np.zeros(vocab_size, np.float32)
            logits_V[token_ids[min(len(seen) - prompt_length, len(token_ids) - 1)]] = 1000.0
            return logits_V

        return cls(rule, vocab_size, context_length)

    def begin(self) -> ToyContext:
        return ToyContext(self)


class ToyContext:
    """One sequence: the ids so far."""

    def __init__(self, model: Toy) -> None:
        self.model = model
        self.seen: tuple[int, ...] = ()

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward``."""
        self.seen += tuple(token_ids)
        return self.model.rule(self.seen)

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward_all``."""
        logits = []
        for token in token_ids:
            self.seen += (token,)
            logits.append(self.model.rule(self.seen))
        return np.stack(logits)


class PagedToy:
    """A Toy as a Runner whose blocks store token ids: it uses only what is in the blocks.

    asynchronous: the value of the attribute; calls are synchronous. ``forwards`` records the inputs. The hidden state
    of a token is its position and its id, in all layers.
    """

    paged = True
    tree_attention = True
    unbatched_reason = ""

    def __init__(self, model: Toy, blocks: int, block_size: int = 16, *, asynchronous: bool = False) -> None:
        self.model, self.blocks, self.block_size, self.asynchronous = model, blocks, block_size, asynchronous
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self.forwards: list[list[tuple[int, int, int]]] = []  # key, start, stop
        self._stored = np.full((blocks, block_size), -1, np.int64)
        self.capture_hidden_states(())

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``."""
        self.watched = tuple(layers)
        self.hidden_states = np.empty((0, 2 * len(self.watched)), np.float32)

    def forward(self, parts: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``."""
        self.forwards.append([(part.key, part.start, part.stop) for part in parts])
        for part in parts:
            for position in range(part.start, part.stop):
                block = part.block_ids[position // self.block_size]
                self._stored[block, position % self.block_size] = part.token_ids[position]
        if self.watched:
            read = [
                (position, part.token_ids[index])
                for part in parts
                for index, position in zip(range(part.start, part.stop), _positions(part), strict=True)
            ]
            self.hidden_states = np.tile(np.array(read, np.float32).reshape(-1, 2), len(self.watched))
        rows = [
            self.model.rule(self._seen(part, index))
            for part in parts
            for index in range(part.stop - part.num_logits, part.stop)
        ]
        return np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)

    def _seen(self, part: ModelInput, index: int) -> tuple[int, ...]:
        """The tokens up to an index, along its branch."""
        stored = self._stored[list(part.block_ids)].ravel().tolist()
        base, path = part.stop - len(part.parents or ()), []
        while index >= base and part.parents:
            path.append(stored[index])
            index = base + part.parents[index - base]
        return (*stored[: index + 1], *reversed(path))

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        for _, blocks, sources, start in moves:
            for target, source in enumerate(sources, start):
                (block, index), (old, at) = divmod(target, self.block_size), divmod(source, self.block_size)
                self._stored[blocks[block], index] = self._stored[blocks[old], at]

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for _, _, pair in forks:
            if pair is not None:
                self._stored[pair[1]] = self._stored[pair[0]]

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""


def _positions(part: ModelInput) -> list[int]:
    """The positions of the computed tokens in the sequence."""
    if not part.parents:
        return [*range(part.start, part.stop)]
    tree = TreeMask(part.parents, part.stop)
    return [*range(part.start, min(part.stop, tree.base)), *tree.positions(part.start).tolist()]


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
        """See ``GgufContext.remove``."""
        own = self.slots.get(slot, {})
        assert not self.whole or not start
        self.slots[slot] = {position: cell for position, cell in own.items() if position < start}

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See ``GgufContext.copy``."""
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
