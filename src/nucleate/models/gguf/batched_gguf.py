"""A GGUF model as a Runner: batches of many sequences in one call of llama.cpp.

The engine manages the KV cache in blocks, which sequences share and which stay valid after a sequence has ended, for
prefixes. llama.cpp has cells that belong to sequences by number: cells can be added to another sequence, and removed
from one. A *slot* is a sequence of llama.cpp with the blocks of the engine that it holds. The slot of a finished
sequence is kept, as its blocks may be cached prefixes, until its number is needed or its blocks are written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.models.gguf.cell_log import CellLog
from nucleate.models.gguf.llama_library import INVARIANT_ROWS, SPARE, GgufContext, Token, llama_cpp
from nucleate.models.paged_cache import free_memory
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, Fork, ModelInput, Runner

MAX_SLOTS = 254
"""Sequences of a context: running ones, and finished ones whose cells may be reused. llama.cpp allows no more."""


class BatchedGguf(Runner):
    """See ``Runner``. model: a ``GgufModel``; memory: bytes of KV cache. Raises ModelError for less than a block.

    slots: sequences of the context. row_multiple: of micro-batches that are the same in every batch, see
    ``GgufContext``.
    """

    def __init__(
        self,
        model: Any,
        memory: int,
        block_size: int = BLOCK,
        *,
        slots: int = MAX_SLOTS,
        row_multiple: int = 0,
    ) -> None:
        self.model, self.block_size, self.paged = model, block_size, not model.recurrent
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self.batch_invariant, self.copies_blocks = row_multiple > 0, self.paged
        self.blocks = memory // model.token_bytes // block_size
        if not self.blocks:
            needed = block_size * model.token_bytes
            raise ModelError(f"the KV cache needs at least {needed} bytes (one block), got {memory}")
        self._check_memory(self.blocks * block_size)
        self.max_sequences = min(slots, llama_cpp().llama_max_parallel_sequences() - SPARE)
        tokens = self.blocks * block_size
        slots = min(self.max_sequences, tokens)  # llama.cpp aborts if there are more sequences than tokens

        def new_context(size: int, slots: int) -> GgufContext:
            self._check_memory(size)
            return GgufContext(model, size, slots, row_multiple)

        size = tokens + INVARIANT_ROWS
        self._cells = CellLog(new_context, size, slots) if self.paged else new_context(size, slots)
        self._map = SequenceMap(self._cells, slots, block_size, model.options.prefix_cache_tokens, whole=not self.paged)

    def _check_memory(self, tokens: int) -> None:
        """Raise ModelError for a KV cache that does not fit: llama.cpp would try to write to all of it."""
        needed, left = tokens * self.model.token_bytes, free_memory()
        if not self.model.uses_gpu and needed > left:
            memory = f"{needed >> 20} MiB, but only {left >> 20} MiB are free"
            raise ModelError(f"a KV cache of {tokens} tokens needs {memory}; reduce n_ctx")

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``. The logits are valid until the next call.

        Raises ValueError for ids outside the vocabulary and positions past the context, and ModelError.
        """
        for each in inputs:
            self._check(each)
        tokens: list[Token] = []
        done: list[tuple[int, int]] = []
        parts: list[NDArray[np.float32]] = []

        def compute() -> None:
            parts.append(self._cells.forward(tokens).copy())
            tokens.clear()

        try:
            for each in inputs:
                slot, first = self._map.prepare(each.key, each.start, each.stop, each.block_ids, compute)
                done.append((each.key, first))
                with_logits = each.stop - each.num_logits
                tokens += [
                    Token(token, position, slot, position >= with_logits)
                    for position, token in enumerate(each.token_ids[first : each.stop], first)
                ]
            logits_LV = self._cells.forward(tokens)
        except BaseException:
            for key, first in done:
                self._map.invalidate(key, first)
            raise
        finally:
            self._map.mark_computed()
        return np.concatenate([*parts, logits_LV]) if parts else logits_LV

    def _check(self, each: ModelInput) -> None:
        if each.stop > self.context_length:
            raise ValueError(f"{each.stop} tokens exceed the context length {self.context_length}")
        ids = each.token_ids[each.start : each.stop]
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}")

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for key, child, block in forks:
            self._map.fork(key, child, block)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runner.copy_blocks``."""
        for source, target in pairs:
            self._map.copy(source, target)

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""
        self._map.forget(key)


class Slot:
    """A sequence of llama.cpp."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.blocks: list[int] = []
        self.length = 0  #: tokens in the cache; the blocks have room for them


class SequenceMap:
    """Assigns slots to the sequences of the engine.

    count: slots, numbered from 0. block_size: tokens per block. keep: how many tokens of finished sequences are kept:
    llama.cpp reads all used cells in each forward pass, so that they make it slower. whole: whether the memory of a
    sequence cannot be cut or shared in part, as the state of a recurrent model: it is removed as a whole.
    """

    def __init__(
        self, cells: CellLog | GgufContext, count: int, block_size: int, keep: int, *, whole: bool = False
    ) -> None:
        self._cells, self._size, self._keep, self._whole = cells, block_size, keep, whole
        if isinstance(cells, CellLog):
            cells.evict = self._evict
        self._free = list(range(count - 1, -1, -1))
        self._active: dict[int, Slot] = {}  # by the key of the sequence
        self._kept: OrderedDict[int, Slot] = OrderedDict()  # of finished sequences, by number, the oldest first
        self._pending: dict[Slot, int] = {}  # prepared, but not computed, from this position on
        self._holders: dict[int, dict[Slot, int]] = {}  # by block: the slots that hold it, with its index in them
        self._copied: dict[int, int] = {}  # by block: the one that it is a copy of, until either is written

    def prepare(
        self, key: int, start: int, stop: int, block_ids: Sequence[int], compute: Callable[[], None]
    ) -> tuple[int, int]:
        """Prepare to compute the tokens up to ``stop``, of which the engine counts those before ``start`` as cached.

        compute: computes what was prepared before. It is called if this sequence continues such tokens, which happens
        when two sequences have a prefix whose cells are gone. Returns the number of the sequence, and the first
        position to compute: before ``start`` if the cells of cached blocks are gone. Raises ModelError if all slots are
        in use.
        """
        slot = self._active.get(key)
        if slot is None:
            if isinstance(self._cells, CellLog) and self._free and self._free[-1] >= self._cells.slots:
                self._cells.add_slots()
            slot = self._active[key] = self._new_slot()
        same = 0
        while same < len(slot.blocks) and same < len(block_ids) and slot.blocks[same] == block_ids[same]:
            same += 1
        self._cut(slot, min(slot.length, same * self._size, start))
        while slot.length < start and (other := self._holder(slot, block_ids)) is not None:
            if self._pending.get(other, other.length) < min(start, other.length):
                compute()
                self._pending.clear()
            self._extend(slot, other, start, block_ids)
        first = slot.length
        for index in range(first // self._size, -(-stop // self._size)):
            self._take(slot, index, block_ids[index])
        slot.length = stop
        self._pending[slot] = first
        return slot.number, first

    def _take(self, slot: Slot, index: int, block: int) -> None:
        """A slot writes to a block: no other slot holds it any more."""
        self._give_up(block, slot)
        if index >= len(slot.blocks):
            slot.blocks.append(block)
            self._holders.setdefault(block, {})[slot] = index
        if self._copied:
            self._copied = {to: of for to, of in self._copied.items() if block not in (to, of)}

    def _give_up(self, block: int, slot: Slot | None = None) -> None:
        """No slot holds a block any more, except for this one."""
        for other, place in [*self._holders.get(block, {}).items()]:
            if other is not slot:
                self._cut(other, place * self._size)

    def mark_computed(self) -> None:
        """What was prepared is computed, or was invalidated."""
        self._pending.clear()

    def fork(self, key: int, child: int, block: tuple[int, int] | None) -> None:
        """A new sequence that continues another one. block: see ``Fork``."""
        parent = self._active.get(key)
        if parent is None or not (self._has_slot() or self._evict()):  # the child is computed from its start
            return
        slot = self._active[child] = self._new_slot()
        slot.length = parent.length
        slot.blocks = parent.blocks[: -(-slot.length // self._size)]
        if block is not None and slot.blocks and slot.blocks[-1] == block[0]:
            slot.blocks[-1] = block[1]
        if slot.length:
            self._cells.copy(parent.number, slot.number, 0, slot.length)
        for index, one in enumerate(slot.blocks):
            self._holders.setdefault(one, {})[slot] = index

    def copy(self, source: int, target: int) -> None:
        """A block is a copy of another one. A sequence that holds it shares the cells of the other one."""
        self._give_up(target)
        self._copied[target] = source

    def invalidate(self, key: int, length: int) -> None:
        """Only so many tokens of a sequence were computed."""
        slot = self._active.get(key)
        if slot is not None and slot.length > length:
            self._cut(slot, length)

    def forget(self, key: int) -> None:
        """A sequence has finished. Its cells stay, for sequences with the same prefix."""
        slot = self._active.pop(key, None)
        if slot is None:
            return
        if not slot.length:
            self._free.append(slot.number)
            return
        self._kept[slot.number] = slot
        while sum(one.length for one in self._kept.values()) > self._keep:
            self._evict()

    def _evict(self) -> bool:
        """Free the slot of the sequence that finished first; False if there is none."""
        if self._kept:
            self._cut(next(iter(self._kept.values())), 0)
            return True
        return False

    def _has_slot(self) -> bool:
        """Whether a number is free now. The lowest ones are the last in the list, until all of them are in use."""
        return bool(self._free) and self._free[-1] < self._cells.slots

    def _new_slot(self) -> Slot:
        if not self._has_slot() and not self._evict():
            raise ModelError("too many sequences at a time for llama.cpp; reduce max_num_seqs")
        return Slot(self._free.pop())

    def _cut(self, slot: Slot, length: int) -> None:
        """Remove the tokens of a slot from a position on."""
        if length < slot.length:
            length = 0 if self._whole else length
            self._cells.remove(slot.number, length)
            slot.length = length
        while len(slot.blocks) * self._size >= length + self._size:
            block = slot.blocks.pop()
            holders = self._holders[block]
            del holders[slot]
            if not holders:
                del self._holders[block]
        if not length and self._kept.pop(slot.number, None) is not None:
            self._free.append(slot.number)

    def _holder(self, slot: Slot, block_ids: Sequence[int]) -> Slot | None:
        """Another slot with the cells of the next block of a slot."""
        index, offset = divmod(slot.length, self._size)
        if offset or not isinstance(self._cells, CellLog):
            return None
        holders = self._holders.get(self._copied.get(block_ids[index], block_ids[index]), {})
        found = (one for one, i in holders.items() if i == index and one.length > slot.length)
        return next((one for one in found if self._cells.follows(slot.number, one.number)), None)

    def _extend(self, slot: Slot, other: Slot, start: int, block_ids: Sequence[int]) -> None:
        """Continue a slot up to ``start`` with the cells of another one, as long as it has the same blocks."""
        end = slot.length // self._size
        while (
            end < len(other.blocks)
            and end * self._size < min(start, other.length)
            and other.blocks[end] == self._copied.get(block_ids[end], block_ids[end])
        ):
            slot.blocks.append(block_ids[end])
            self._holders.setdefault(block_ids[end], {})[slot] = end
            end += 1
        stop = min(end * self._size, start, other.length)
        self._cells.copy(other.number, slot.number, slot.length, stop)
        slot.length = stop
