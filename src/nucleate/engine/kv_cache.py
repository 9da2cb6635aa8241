"""KV cache manager: allocates the blocks of the paged KV cache, and finds cached prefixes. Pure Python.

A block is *free*, *used* by one or more sequences, or *cached*: unused, but still holding a prefix that a later
sequence may reuse. When no block is free, cached blocks are evicted, least recently used first.

A full block can be put into the prefix cache, where it is found by its tokens and those before it. Tokens are compared
themselves, not by a hash of them: two different prefixes are never confused.

Where a runner can copy blocks, a prefix may end within a block: its copy holds the first tokens of a new sequence. The
last block of a sequence that has ended, which is not full, is kept for this, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

START, COMPANION_START = 0, -1
"""The prefix nodes before the first block of every sequence: of the model, and of the companion model."""

MAX_COMPARED = 8
"""At most so many blocks are compared to find the one that has most tokens in common with a sequence."""

_CacheKey = tuple[int, tuple[int, ...]]  # the prefix node before a block, and the tokens in it


class PrefixHit(NamedTuple):
    """A cached prefix of a sequence."""

    block_ids: list[int]
    node: int  #: the prefix that ends with the last of them; START for none
    partial: tuple[int, int] | None = None  #: a block to copy, and how many of its tokens continue this prefix


class KVCacheManager:
    """Allocates ``num_blocks`` blocks of ``block_size`` tokens.

    prefix_caching: whether prefixes are kept for reuse. copies: whether they may end within a block, which is copied.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, copies: bool = False) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.copies = copies and prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first; popping a dict's first item is slow
        self._cached: dict[_CacheKey, tuple[int, int]] = {}  # to the block and its own node
        self._keys: dict[int, _CacheKey] = {}  # of the cached blocks
        self._next: dict[tuple[int, int], dict[int, None]] = {}  # by node and first token: cached blocks after it
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
                self._forget(block)
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
        rest = token_ids[len(blocks) * size : len(token_ids) - 1] if self.copies else ()
        return PrefixHit(blocks, node, self._partial(node, rest) if rest else None)

    def _partial(self, node: int, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Of the latest blocks after a prefix, the one that has most of these tokens, and how many."""
        best = None
        for block in islice(reversed(self._next.get((node, token_ids[0]), {})), MAX_COMPARED):
            count = 0
            for own, other in zip(self._keys[block][1], token_ids, strict=False):
                if own != other:
                    break
                count += 1
            if best is None or count > best[1]:
                best = block, count
        if best is not None and best[0] in self._evictable:
            self._evictable.move_to_end(best[0])
        return best

    def add_reference(self, block_ids: Iterable[int]) -> None:
        """One more sequence uses these blocks, which are in use and full."""
        for block in block_ids:
            self._ref_counts[block] += 1

    def cache_block(self, block: int, node: int, token_ids: Sequence[int]) -> int:
        """Put a block in use into the prefix cache: it holds these tokens, after the prefix ``node``.

        It must be full, or never be written again. Returns the node of the prefix that ends with it. If another block
        already holds the same prefix, that one stays the cached one.
        """
        if not self.prefix_caching:
            return START
        key = node, tuple(token_ids)
        found = self._cached.get(key)
        if found is not None:
            return found[1]
        self._last_node += 1
        self._cached[key], self._keys[block] = (block, self._last_node), key
        if self.copies:
            self._next.setdefault((node, token_ids[0]), {})[block] = None
        return self._last_node

    def _forget(self, block: int) -> None:
        """Take a block out of the prefix cache."""
        key = self._keys.pop(block)
        del self._cached[key]
        if self.copies:
            place = key[0], key[1][0]
            siblings = self._next[place]
            del siblings[block]
            if not siblings:
                del self._next[place]

    def free(self, block_ids: Iterable[int]) -> None:
        """A sequence no longer uses its blocks, given in order: the end of a prefix is evicted first."""
        for block in reversed(list(block_ids)):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
