"""The paged KV cache: its arrays, the layout of a ragged batch over it, draft trees, and the memory free for it.

Keys are [blocks, kv heads, head size, block size], values [blocks, kv heads, block size, head size]: what a head reads
of a block is contiguous, in the order in which the attention kernel reads it. The block size and the allocated head
size of values are multiples of ``VECTOR_SIZE``.

The tokens of a draft tree are computed one after the other, and their keys and values are stored in that order. But the
position of a token is given by its depth, and of the tree it attends to its ancestors and itself only.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.models.runner import ModelInput, Move

DEFAULT_FREE_MEMORY = 4 << 30
"""Assumed if the free memory cannot be determined."""


def free_memory() -> int:
    """Bytes of main memory available without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    except OSError:  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return DEFAULT_FREE_MEMORY


Floats = NDArray[np.float32]
KVCache = tuple[Floats, Floats]
"""Keys and values of a layer."""
NO_SINKS = np.empty(0, np.float32)
VECTOR_SIZE = 16
"""Float32 numbers per vector instruction of the kernels."""


def allocate_kv_cache(blocks: int, block_size: int, kv_heads: int, key_size: int, value_size: int) -> KVCache:
    """An empty cache. The system assigns memory when a block is first written."""
    if block_size % VECTOR_SIZE:
        raise ValueError(f"block_size must be a multiple of {VECTOR_SIZE}, got {block_size}")
    keys = np.empty((blocks, kv_heads, key_size, block_size), np.float32)
    return keys, np.empty((blocks, kv_heads, block_size, -(-value_size // VECTOR_SIZE) * VECTOR_SIZE), np.float32)


def copy_blocks(cache: KVCache, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks: pairs of source and target. No target is the source of a later pair."""
    for source, target in pairs:
        for array in cache:
            array[target] = array[source]


def copy_slots(cache: KVCache, sources_N: NDArray[np.int64], targets_N: NDArray[np.int64]) -> None:
    """Copy slots (block * block size + offset). All sources are read before any target is written."""
    size = cache[0].shape[3]
    (from_N, from_offset_N), (to_N, to_offset_N) = np.divmod(sources_N, size), np.divmod(targets_N, size)
    for array in token_major(cache, cache[1].shape[3]):
        array[to_N, :, to_offset_N] = array[from_N, :, from_offset_N]


class AttentionRule(NamedTuple):
    """The attention settings of a layer."""

    scaling: float  #: factor of the scores
    window: int = 0  #: size of the sliding window in tokens, the token itself included; 0: none
    softcap: float = 0.0  #: c in c * tanh(score / c); 0: none
    sinks: Floats = NO_SINKS  #: attention sinks: one extra score per head, without a value


def token_major(cache: KVCache, value_size: int) -> KVCache:
    """Views of keys and values as [blocks, kv heads, block size, head size]."""
    return cache[0].swapaxes(2, 3), cache[1][..., :value_size]


MAX_TREE_TOKENS = 33
"""Maximum number of new tokens of an input with a tree that the attention kernel takes."""


class TreeMask:
    """A draft tree in the last tokens of a sequence of ``stop`` tokens.

    parents: for each token of the tree, the index in the tree of its parent, an earlier one; -1 for the token before
    the tree.
    """

    def __init__(self, parents: Sequence[int], stop: int) -> None:
        self.parents, self.stop = parents, stop
        self.size, self.base = len(parents), stop - len(parents)  #: base: the index of the first token of the tree
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = depths

    def positions(self, start: int) -> NDArray[np.int64]:
        """The positions of the tokens of the tree, from token ``start`` of the sequence on."""
        return np.array(self.depths[max(0, start - self.base) :], np.int64) + self.base

    def mask(self, start: int, window: int = 0) -> NDArray[np.bool_]:
        """Whether each token from ``start`` on attends to each token of the sequence, [stop - start, stop].

        window: size of the sliding window, see ``AttentionRule``, counted in positions; 0: none.
        """
        index_L = np.arange(self.stop)
        position_L = index_L.copy()
        position_L[self.base :] = self.positions(0)
        mask_TL = (index_L < self.base) & (index_L <= position_L[start:, None])
        tree_NN = np.eye(self.size, dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                tree_NN[node] |= tree_NN[parent]
        first = max(0, start - self.base)
        mask_TL[len(mask_TL) - self.size + first :, self.base :] = tree_NN[first:]
        if window:
            mask_TL &= position_L > position_L[start:, None] - window
        return mask_TL


MAX_DECODE_TOKENS = 8
"""Inputs of at most this many new tokens use the decode kernel: decoding, or verifying a few draft tokens."""

NO_TREES = np.empty((0, 2), np.int64)


class BatchLayout:
    """The T new tokens of P inputs, concatenated.

    ids_T, positions_T: int64. logits_indices: int64 indices of the tokens whose logits are requested.
    blocks: int32, the concatenated block tables of the inputs.
    inputs: int64 [P, 4]: index of the first new token, start, stop (see ``ModelInput``), offset of the block table.
    short, long: the rows of ``inputs`` that the decode kernel takes, and the others. split: cut the others into rows of
    ``max_short`` tokens, also for the kernel; their keys and values must be stored before.
    trees: the draft trees, by the index of the input's first new token.
    tree_links_T2: the position of each token and the index of its parent token; empty without trees.
    """

    def __init__(
        self, inputs: Sequence[ModelInput], block_size: int, max_short: int = MAX_DECODE_TOKENS, *, split: bool = False
    ) -> None:
        _, tokens, start, stop, blocks, logits, parents = zip(*inputs, strict=True)
        table = np.array((start, stop, logits, list(map(len, blocks))), np.int64)
        start_P, stop_P, logits_P, blocks_P = table
        count_P = stop_P - start_P
        end_P = count_P.cumsum()
        self.size = int(end_P[-1])
        self.inputs = np.empty((len(inputs), 4), np.int64)
        self.inputs[:, 0] = end_P - count_P
        self.inputs[:, 1], self.inputs[:, 2] = start_P, stop_P
        tables_P = self.inputs[:, 3] = blocks_P.cumsum() - blocks_P
        self.blocks = np.fromiter(chain.from_iterable(blocks), np.int32, int(blocks_P.sum()))
        new = [ids[i:j] for ids, i, j in zip(tokens, start, stop, strict=True)]
        self.ids_T = np.fromiter(chain.from_iterable(new), np.int64, self.size)
        self.positions_T = np.arange(self.size) + np.repeat(start_P - self.inputs[:, 0], count_P)
        self._tables_T = np.repeat(tables_P, count_P)
        self.block_size = block_size
        self.trees: dict[int, TreeMask] = {}
        self.tree_links_T2, self._indices_T = NO_TREES, self.positions_T
        is_short_P = count_P <= max_short
        if any(parents):
            self._add_trees(parents, is_short_P, MAX_TREE_TOKENS if max_short > 1 else 1)
        self.logits_indices = np.arange(logits_P.sum()) + np.repeat(end_P - logits_P.cumsum(), logits_P)
        all_short = bool(is_short_P.all())
        self.short = self.inputs if all_short else self.inputs[is_short_P]
        self.long = self.inputs[:0] if all_short else self.inputs[~is_short_P]
        self.has_long = not all_short
        if split and not all_short:
            kept = np.array([first in self.trees for first in self.long[:, 0].tolist()])
            rows = [_split(row, max_short) for row in self.long[~kept].tolist()]
            self.short, self.long = np.concatenate([self.short, *rows]), self.long[kept]
        self.total_keys = int(self.short[:, 2].sum())  #: of the short inputs
        self.max_keys = int(self.short[:, 2].max(initial=0))
        self._splits: dict[tuple[int, int, int], list[int]] = {}

    def _add_trees(
        self, parents: Sequence[Sequence[int] | None], is_short_P: NDArray[np.bool_], max_tokens: int
    ) -> None:
        """Apply the draft trees: the positions of their tokens differ from their index in the sequence."""
        self.positions_T = self.positions_T.copy()
        parents_T = np.arange(-1, self.size - 1)
        for row, tree_parents in enumerate(parents):
            if not tree_parents or list(tree_parents) == list(range(-1, len(tree_parents) - 1)):
                continue
            first, start, stop, _ = self.inputs[row].tolist()
            tree = self.trees[first] = TreeMask(tree_parents, stop)
            positions = tree.positions(start)
            end, count = first + stop - start, len(positions)
            self.positions_T[end - count : end] = positions
            parents_T[end - count : end] = end - tree.size + np.array(tree_parents[tree.size - count :])
            is_short_P[row] = start <= tree.base and stop - start <= max_tokens
        self.tree_links_T2 = np.stack((self.positions_T, parents_T), axis=1)

    @functools.cached_property
    def slots(self) -> NDArray[np.int64]:
        """The slot mapping: the KV cache slot of each token [T], block * block size + offset."""
        block, offset = np.divmod(self._indices_T, self.block_size)
        slots: NDArray[np.int64] = self.blocks[self._tables_T + block] * np.int64(self.block_size) + offset
        return slots

    def split(self, kv_heads: int, window: int, count: int) -> list[int]:
        """Boundaries that split the items (short input, kv head) into ``count`` ranges of about equal work."""
        bounds = self._splits.get((kv_heads, window, count))
        if bounds is None:
            bounds = [0, len(self.short) * kv_heads]
            if count > 1:
                keys = np.minimum(self.short[:, 2], window) if window else self.short[:, 2]
                work = np.repeat(keys * (self.short[:, 2] - self.short[:, 1]), kv_heads).cumsum()
                bounds[1:1] = np.searchsorted(work, work[-1] * np.arange(1, count) / count).tolist()
            self._splits[kv_heads, window, count] = bounds
        return bounds


def _split(row: Sequence[int], count: int) -> NDArray[np.int64]:
    """A row of ``inputs`` as rows of at most so many tokens."""
    first, start, stop, table = row
    starts = np.arange(start, stop, count, dtype=np.int64)
    ends = np.minimum(starts + count, stop)
    return np.stack((first + starts - start, starts, ends, np.full_like(starts, table)), axis=1)


def slots_of(moves: Sequence[Move], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source and target slots of moves: block * block size + offset."""
    slots: tuple[list[int], list[int]] = [], []
    for _, blocks, sources, start in moves:
        for listed, indices in zip(slots, (sources, range(start, start + len(sources))), strict=True):
            listed += [blocks[index // block_size] * block_size + index % block_size for index in indices]
    return np.array(slots[0], np.int64), np.array(slots[1], np.int64)
