"""A model without weights whose logits come from a function, also behind the runner of GGUF models."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.models.gguf.batched_gguf import BatchedGguf, SequenceMap
from nucleate.models.gguf.cell_log import CellLog
from nucleate.models.gguf.llama_library import Token
from nucleate.models.paged_cache import TreeMask
from nucleate.models.protocol import ModelError
from nucleate.models.runner import Fork, ModelInput, Move, SavedState, SequentialRunner


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


class SavingToy(SequentialRunner):
    """A Toy whose states can be saved. ``forwards`` records the inputs, ``saved`` the lengths of the states."""

    saves_states = True

    def __init__(self, model: Toy, blocks: int, block_size: int = 16) -> None:
        super().__init__(model, blocks, block_size)
        self.forwards: list[list[tuple[int, int, int]]] = []  # key, start, stop
        self.saved: list[int] = []

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``."""
        self.forwards.append([(each.key, each.start, each.stop) for each in inputs])
        return super().forward(inputs)

    def save(self, key: int) -> SavedState | None:
        """See ``Runner.save``."""
        context, length = self._open.pop(key, (None, 0))
        if context is None:
            return None
        self.saved.append(length)
        return SavedState(length, -(-length // self.block_size), context.seen)

    def restore(self, key: int, saved: SavedState) -> None:
        """See ``Runner.restore``."""
        context = self.model.begin()
        context.seen = saved.state
        self._open[key] = context, saved.length


class PagedToy:
    """A Toy as a Runner whose blocks store token ids: it uses only what is in the blocks.

    asynchronous: the value of the attribute; calls are synchronous. ``forwards`` records the inputs. The hidden state
    of a token is its position and its id, in all layers.
    """

    paged = True
    tree_attention = True
    copies_blocks = True
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
        self.copy_blocks([pair for _, _, pair in forks if pair is not None])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runner.copy_blocks``."""
        for source, target in pairs:
            self._stored[target] = self._stored[source]

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""


def _positions(part: ModelInput) -> list[int]:
    """The positions of the computed tokens in the sequence."""
    if not part.parents:
        return [*range(part.start, part.stop)]
    tree = TreeMask(part.parents, part.stop)
    return [*range(part.start, min(part.stop, tree.base)), *tree.positions(part.start).tolist()]


class SimulatedContext:
    """A context whose cells store token ids, in a fixed order; see ``GgufContext``. It uses only what is in the cells.

    A token gets the first free cell. cells: how many there are. slots: sequences. whole: the memory cannot be cut, as
    that of recurrent models, and has any size; else the cells of a sequence must be in the order of its positions.
    """

    batch_size, window = 32, 12

    def __init__(self, model: Toy, cells: int, slots: int, *, whole: bool = False) -> None:
        self.model, self.whole = model, whole
        self.no_logits = np.empty((0, model.vocab_size), np.float32)
        self.computed = 0
        self.resized(cells, slots)

    def resized(self, cells: int, slots: int) -> SimulatedContext:
        """Itself, empty, with another size."""
        self.cells, self.slots = cells, slots
        self.clear()
        return self

    def clear(self) -> None:
        """See ``GgufContext.clear``."""
        self._tokens: dict[int, int] = {}  # by cell
        self._holders: dict[int, int] = {}  # the number of sequences by cell
        self._places: dict[int, list[int]] = {}  # the cells of each sequence
        self._free = [*range(self.cells * (100 if self.whole else 1))]  # a heap

    def close(self) -> None:
        """See ``GgufContext.close``."""

    @property
    def used(self) -> int:
        return len({cell for slot, own in self._places.items() if slot < self.slots for cell in own})

    def padding(self, count: int) -> int:
        """See ``GgufContext.padding``."""
        return -count % 4

    def remove(self, slot: int, start: int) -> None:
        """See ``GgufContext.remove``. The sequence of removed cells has positions several times, and is never read."""
        assert not self.whole or not start
        own = self._places.get(slot, [])
        for cell in own[start:]:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                heapq.heappush(self._free, cell)
        del own[start:]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See ``GgufContext.copy``."""
        own = self._places[source][start:stop]
        assert len(own) == stop - start > 0
        if self.whole:
            own = [self._new_cell(self._tokens[cell]) for cell in own]
        else:
            for cell in own:
                self._holders[cell] += 1
        self._places.setdefault(target, []).extend(own)

    def save(self, slot: int, start: int, stop: int) -> list[int]:
        """See ``GgufContext.save``. As llama.cpp, it saves no more than a window."""
        assert start // self.window == (stop - 1) // self.window
        return [self._tokens[cell] for cell in self._places[slot][start:stop]]

    def restore(self, data: list[int], slots: Sequence[int], start: int, stop: int) -> None:
        """See ``GgufContext.restore``."""
        assert len(data) == stop - start
        cells = [self._new_cell(token) for token in data]
        for slot in slots:
            own = self._places.setdefault(slot, [])
            assert len(own) == start, "a piece is missing"
            assert not own or own[-1] < cells[0], "the order has changed"
            own.extend(cells)
            for cell in cells:
                self._holders[cell] += 1
        for cell in cells:
            self._holders[cell] -= 1  # the first one of ``_new_cell``

    def decode(self, tokens: list[Token]) -> NDArray[np.float32]:
        """See ``GgufContext.decode``."""
        assert 0 < len(tokens) <= self.batch_size
        assert len(tokens) + self.padding(len(tokens)) <= len(self._free), "the KV cache is full"
        return self.forward(tokens)

    def forward(self, tokens: list[Token]) -> NDArray[np.float32]:
        """See ``GgufContext.forward``."""
        self.computed += len(tokens)
        rows = []
        for token, position, slot, logits in tokens:
            own = self._places.setdefault(slot, [])
            if position != len(own):
                raise ModelError(f"position {position} after {len(own)} tokens")
            own.append(self._new_cell(token))
            assert self.whole or position == 0 or own[-2] < own[-1], "the cells of a sequence are not in order"
            if logits:
                rows.append(self.model.rule(tuple(self._tokens[cell] for cell in own)))
        return np.stack(rows) if rows else self.no_logits

    def _new_cell(self, token: int) -> int:
        cell = heapq.heappop(self._free)
        self._tokens[cell], self._holders[cell] = token, 1
        return cell


class SmallLog(CellLog):
    """Grows soon."""

    first_size, first_slots = 12, 3


class CellToy(BatchedGguf):
    """A Toy behind ``BatchedGguf``. slots: sequences of llama.cpp. whole: see ``SimulatedContext``."""

    def __init__(
        self, model: Toy, blocks: int, block_size: int, *, slots: int = 24, keep: int = 10**6, whole: bool = False
    ) -> None:
        self.model, self.blocks, self.block_size, self.paged = model, blocks, block_size, not whole
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, "cells"
        self.max_sequences, self.copies_blocks = slots, not whole
        cells = blocks * block_size + 3  # padding
        self.context = SimulatedContext(model, cells, slots, whole=whole)
        self._cells = self.context if whole else SmallLog(self.context.resized, cells, slots)
        self._map = SequenceMap(self._cells, slots, block_size, keep, whole=whole)
