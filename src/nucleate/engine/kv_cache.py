"""KV cache manager: allocates the blocks of the paged KV cache, and finds cached prefixes. Pure Python.

A block is *free*, *used* by one or more sequences, or *cached*: unused, but still holding a prefix that a later
sequence may reuse. When no block is free, cached blocks are evicted, least recently used first.

A full block can be put into the prefix cache, where it is found by its tokens and those before it. Tokens are compared
themselves, not by a hash of them: two different prefixes are never confused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

START, COMPANION_START = 0, -1
"""The prefix nodes before the first block of every sequence: of the model, and of the companion model."""

_CacheKey = tuple[int, tuple[int, ...]]  # the prefix node before a block, and the tokens in it


class PrefixHit(NamedTuple):
    """A cached prefix of a sequence."""

    block_ids: list[int]
    node: int  #: the prefix that ends with the last of them; START for none


class KVCacheManager:
    """Allocates ``num_blocks`` blocks of ``block_size`` tokens. prefix_caching: whether prefixes are kept for reuse."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first; popping a dict's first item is slow
        self._cached: dict[_CacheKey, tuple[int, int]] = {}  # to the block and its own node
        self._keys: dict[int, _CacheKey] = {}  # of the cached blocks
        self._last_node = START

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences use."""
        return self.num_blocks - self.num_free_blocks

    def blocks_needed(self, tokens: int) -> int:
        """The number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate blocks for one sequence; None, without any effect, if too few are free."""
        if count > self.num_free_blocks:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._cached[self._keys.pop(block)]
            self._ref_counts[block] = 1
            taken.append(block)
        return taken

    def match_prefix(self, token_ids: Sequence[int], root: int = START) -> PrefixHit:
        """Find and use the longest cached prefix of a sequence after a root. It never covers the last token."""
        blocks: list[int] = []
        node, size = root, self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            found = self._cached.get((node, tuple(token_ids[start : start + size])))
            if found is None:
                break
            block, node = found
            if not self._ref_counts[block]:
                del self._evictable[block]
            self._ref_counts[block] += 1
            blocks.append(block)
        return PrefixHit(blocks, node)

    def add_reference(self, block_ids: Iterable[int]) -> None:
        """One more sequence uses these blocks, which are in use and full."""
        for block in block_ids:
            self._ref_counts[block] += 1

    def cache_block(self, block: int, node: int, token_ids: Sequence[int]) -> int:
        """Put a full block in use into the prefix cache: it holds these tokens, after the prefix ``node``.

        Returns the node of the prefix that ends with it. If another block already holds the same prefix, that one stays
        the cached one.
        """
        if not self.prefix_caching:
            return START
        key = node, tuple(token_ids)
        found = self._cached.get(key)
        if found is not None:
            return found[1]
        self._last_node += 1
        self._cached[key], self._keys[block] = (block, self._last_node), key
        return self._last_node

    def free(self, block_ids: Iterable[int]) -> None:
        """A sequence no longer uses its blocks, given in order: the end of a prefix is evicted first."""
        for block in reversed(list(block_ids)):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
