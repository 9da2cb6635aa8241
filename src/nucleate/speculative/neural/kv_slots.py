"""Allocates KV cache blocks of a draft head; the least recently used sequences are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class KVSlots:
    """The block tables of sequences. blocks: number of blocks; block_size: tokens per block."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(blocks))
        self.tables: OrderedDict[int, list[int]] = OrderedDict()

    def allocate(self, key: int, tokens: int, protected_keys: Iterable[int]) -> list[int]:
        """Allocate blocks for ``tokens`` tokens of a sequence. Returns the keys of the sequences evicted for it.

        ``protected_keys`` are not evicted. If there are not enough blocks, the sequence itself is evicted.
        """
        table = self.tables.setdefault(key, [])
        self.tables.move_to_end(key)
        num_missing = -(-tokens // self.block_size) - len(table)
        evicted: list[int] = []
        if num_missing > len(self.free):
            protected = {key, *protected_keys}
            for old in [old for old in self.tables if old not in protected]:
                evicted.append(old)
                self.free_sequence(old)
                if num_missing <= len(self.free):
                    break
        if num_missing > len(self.free):
            self.free_sequence(key)
            return [*evicted, key]
        table += [self.free.pop() for _ in range(num_missing)]
        return evicted

    def free_sequence(self, key: int) -> None:
        """Free the blocks of a sequence."""
        self.free += self.tables.pop(key, [])
