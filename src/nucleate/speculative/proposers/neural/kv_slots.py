"""Allocates KV cache blocks of a draft head; the least recently used sequences are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class KVSlots:
    """Which blocks a sequence has. blocks: how many there are; block_size: tokens in each."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(blocks))
        self.tables: OrderedDict[int, list[int]] = OrderedDict()

    def room(self, key: int, tokens: int, others: Iterable[int]) -> list[int]:
        """Have a sequence keep so many tokens; the keys that lost what they had for that. None of ``others`` does.

        If there is not enough, the sequence itself loses what it had.
        """
        table = self.tables.setdefault(key, [])
        self.tables.move_to_end(key)
        missing = -(-tokens // self.block_size) - len(table)
        lost: list[int] = []
        if missing > len(self.free):
            spared = {key, *others}
            for old in [old for old in self.tables if old not in spared]:
                lost.append(old)
                self.leave(old)
                if missing <= len(self.free):
                    break
        if missing > len(self.free):
            self.leave(key)
            return [*lost, key]
        table += [self.free.pop() for _ in range(missing)]
        return lost

    def leave(self, key: int) -> None:
        """A sequence needs none any more."""
        self.free += self.tables.pop(key, [])
