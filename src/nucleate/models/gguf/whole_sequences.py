"""Sequences whose cache cannot be cut or shared in part, such as the state of a recurrent model. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nucleate.models.gguf.sequence_map import Cells, Slot
from nucleate.models.protocol import ModelError


class WholeSequences:
    """As ``SequenceMap``, without blocks. A sequence that does not continue at its end is computed from its start."""

    def __init__(self, cells: Cells, count: int) -> None:
        self._cells = cells
        self._free = list(range(count - 1, -1, -1))
        self._active: dict[int, Slot] = {}

    def prepare(
        self, key: int, start: int, stop: int, _block_ids: Sequence[int], _compute: Callable[[], None]
    ) -> tuple[int, int]:
        """See ``SequenceMap.prepare``."""
        slot = self._active.get(key)
        if slot is None:
            slot = self._active[key] = self._new_slot()
        if slot.length != start:
            self._clear(slot)
        first, slot.length = slot.length, stop
        return slot.number, first

    def mark_computed(self) -> None:
        """See ``SequenceMap.mark_computed``."""

    def fork(self, key: int, child: int, _block: tuple[int, int] | None) -> None:
        """See ``SequenceMap.fork``."""
        parent = self._active.get(key)
        if parent is None or not self._has_room():  # the child is computed from its start
            return
        slot = self._active[child] = self._new_slot()
        if parent.length:
            self._cells.copy(parent.number, slot.number, 0, parent.length)
        slot.length = parent.length

    def invalidate(self, key: int, _length: int) -> None:
        """See ``SequenceMap.invalidate``. All tokens are lost."""
        if key in self._active:
            self._clear(self._active[key])

    def forget(self, key: int) -> None:
        """See ``SequenceMap.forget``."""
        slot = self._active.pop(key, None)
        if slot is not None:
            self._clear(slot)
            self._free.append(slot.number)

    def _has_room(self) -> bool:
        return bool(self._free)

    def _new_slot(self) -> Slot:
        if not self._free:
            raise ModelError("too many sequences at a time for llama.cpp; reduce max_num_seqs")
        return Slot(self._free.pop())

    def _clear(self, slot: Slot) -> None:
        if slot.length:
            self._cells.remove(slot.number, 0)
            slot.length = 0
