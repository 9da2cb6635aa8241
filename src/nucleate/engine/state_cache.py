"""State cache: prefix caching for a runner that keeps the state of each sequence elsewhere, and can save it.

The state of a hybrid or recurrent model continues a sequence only after exactly the tokens that it has read. Two kinds
are worth their memory (Pan et al., Marconi, arXiv 2411.19379): the state of a sequence that ends, which the next turn
of a chat continues, or that is preempted, which continues itself; and the state where a prompt departs from the tokens
of an earlier sequence, as the next one with the same beginning may do. A prompt stops there once for its state.

Blocks are only counted. States use those that no sequence needs; the least recently used ones are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from nucleate.engine.kv_cache import KVCacheManager
from nucleate.models.runner import Runner, SavedState

MIN_TOKENS = 32
"""The fewest tokens for which a state is kept. On a CPU, a forward pass of its own costs about as much as these."""


class StateCache(KVCacheManager):
    """See ``KVCacheManager``; blocks are never shared. runner: with ``saves_states``."""

    def __init__(self, num_blocks: int, block_size: int, runner: Runner, *, prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self._runner, self._enabled = runner, prefix_caching
        self._states: OrderedDict[tuple[int, ...], tuple[SavedState, list[int]]] = OrderedDict()  # with their blocks
        self._state_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those of states included."""
        return len(self._free) + self._state_blocks

    def allocate(self, count: int) -> list[int] | None:
        """See ``KVCacheManager.allocate``."""
        if count > self.num_free_blocks:
            return None
        while count > len(self._free):
            self._drop(next(iter(self._states)))
        return super().allocate(count)

    def resume(
        self, key: int, token_ids: Sequence[int], running: Iterable[tuple[Sequence[int], int]]
    ) -> tuple[int, int]:
        """Continue a new sequence from the longest state of a prefix of its tokens.

        running: the tokens of other sequences, each with the length of the prefix whose state it will save, or 0.
        Returns how many tokens are computed, and the length of the prefix whose state this sequence should save, or 0.
        """
        if not self._enabled:
            return 0, 0
        ids = tuple(token_ids[:-1])  # the last token is always computed
        shared = longest = 0
        best: tuple[int, ...] = ()
        for known in self._states:
            same = _common_prefix(ids, known)
            shared = max(shared, same)
            if len(best) < same == len(known):
                best = known
        if best:
            self._states.move_to_end(best)
            with suppress(Exception):  # the model's code may raise anything: then the prompt is computed from its start
                self._runner.restore(key, self._states[best][0])
                longest = len(best)
        computed = longest
        for other, save_at in running:
            same = _common_prefix(ids, other)
            shared = max(shared, same)
            longest = max(longest, save_at if save_at <= same else 0)
        return computed, shared if shared >= longest + MIN_TOKENS else 0

    def keep(self, key: int, token_ids: Sequence[int]) -> None:
        """Save the state of a sequence that continues. token_ids: those that are computed."""
        with suppress(Exception):  # the model's code may raise anything: then the sequence is computed again
            saved = self._runner.save(key)
            if saved is not None:
                self._runner.restore(key, saved)
                self._store(token_ids, saved)

    def take(self, key: int, token_ids: Sequence[int]) -> None:
        """Save the state of a sequence that has stopped and freed its blocks. token_ids: those that are computed."""
        if self._enabled and len(token_ids) >= MIN_TOKENS:
            with suppress(Exception):  # the model's code may raise anything
                saved = self._runner.save(key)
                if saved is not None:
                    self._store(token_ids, saved)

    def _store(self, token_ids: Sequence[int], saved: SavedState) -> None:
        ids = tuple(token_ids)
        if ids in self._states:
            self._drop(ids)
        if saved.length == len(ids) and (blocks := self.allocate(saved.blocks)) is not None:
            self._states[ids] = saved, blocks
            self._state_blocks += len(blocks)

    def _drop(self, ids: tuple[int, ...]) -> None:
        _, blocks = self._states.pop(ids)
        self._state_blocks -= len(blocks)
        self.free(blocks)


def _common_prefix(ids: tuple[int, ...], other: Sequence[int]) -> int:
    """The number of equal tokens at the beginning; 0 if they are fewer than MIN_TOKENS."""
    if tuple(other[:MIN_TOKENS]) != ids[:MIN_TOKENS]:
        return 0
    known, low, high = tuple(other), 0, min(len(ids), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == known[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
