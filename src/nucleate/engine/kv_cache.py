"""The pool of blocks that hold keys and values: who uses which, and which beginnings can be shared. Pure Python.

Knows token ids and counts; refuses to know what a block holds, and who asks.

A block is *free*, *used* by one sequence or several, or *kept*: used by none, but it still holds a beginning that a
later sequence may share. Kept blocks are given away when no free one is left, those first that are out of use longest.

A full block can be *sealed*: then it can be found again by what it holds and by what is before it. Beginnings are found
by comparing their tokens, not by a digest of them: two different ones are never taken for the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

START = 0
"""The node before the first block of every sequence."""

_Place = tuple[int, tuple[int, ...]]  # the node before a block, and the tokens in it


class PrefixHit(NamedTuple):
    """The beginning of a sequence that is there already."""

    blocks: list[int]
    node: int  #: the beginning that ends with the last of them; START for none


class KVCacheManager:
    """``count`` blocks of ``block_size`` tokens, numbered 0 to count - 1. sharing: whether beginnings are kept."""

    def __init__(self, count: int, block_size: int, *, sharing: bool = True) -> None:
        if count < 1 or block_size < 1:
            raise ValueError(f"a pool has one or more blocks of one or more tokens, got {count} of {block_size}")
        self.count, self.block_size, self.sharing = count, block_size, sharing
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._kept: OrderedDict[int, None] = OrderedDict()  # as they fell out of use; a dict is slow to pop its first
        self._sealed: dict[_Place, tuple[int, int]] = {}  # to its block and its own node
        self._places: dict[int, _Place] = {}  # of the sealed blocks
        self._last = START

    @property
    def available(self) -> int:
        """How many blocks can be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """How many blocks are in use."""
        return self.count - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """So many blocks for one sequence, or None, and nothing happens, if there are not enough."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._give_up()
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, token_ids: Sequence[int]) -> PrefixHit:
        """Use the blocks that hold the longest known beginning of a sequence, never all of its tokens."""
        blocks: list[int] = []
        node, size = START, self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            found = self._sealed.get((node, tuple(token_ids[start : start + size])))
            if found is None:
                break
            block, node = found
            if not self._users[block]:
                del self._kept[block]
            self._users[block] += 1
            blocks.append(block)
        return PrefixHit(blocks, node)

    def join(self, blocks: Iterable[int]) -> None:
        """One more sequence uses blocks that are in use, and full: nobody writes to them any more."""
        for block in blocks:
            self._users[block] += 1

    def seal(self, block: int, node: int, token_ids: Sequence[int]) -> int:
        """A block in use is full, and will not change: it holds these tokens, after the beginning ``node``.

        Returns the node of the beginning that ends with it. If another block holds the same, that one stays the one
        to be shared.
        """
        if not self.sharing:
            return START
        place = node, tuple(token_ids)
        found = self._sealed.get(place)
        if found is not None:
            return found[1]
        self._last += 1
        self._sealed[place], self._places[block] = (block, self._last), place
        return self._last

    def release(self, blocks: Iterable[int]) -> None:
        """A sequence no longer uses its blocks, given in their order: the end of a beginning is given away first."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if not self._users[block]:
                if block in self._places:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def _give_up(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._sealed[self._places.pop(block)]
        return block
