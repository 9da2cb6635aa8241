"""The layout of a ragged batch as arrays: positions, block tables, and which tokens each sequence attends to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nucleate.models.paged.tree_mask import MOST, TreeMask
from nucleate.models.runner import ModelInput, Move

SHORT = 8
"""Inputs of at most so many new tokens use the decode kernel: decoding, or verifying a few draft tokens."""

NO_TREES = np.empty((0, 2), np.int64)


class BatchLayout:
    """T tokens of P inputs, concatenated.

    ids_T, positions_T, kept_L (whose logits are wanted) are int64. blocks are the parts' own, end to end, int32.
    ``parts`` is int64 [P, 4]: first token, start, stop, where its blocks begin.
    ``short`` are the rows of parts that the kernel takes; ``long`` those left.
    trees: those of the parts that have one, by first token. ``followed_T2`` is of every token its position and the
    token (of the T) that it follows, if there is a tree, and else empty.
    """

    def __init__(self, parts: Sequence[ModelInput], block_size: int, short: int = SHORT) -> None:
        _, tokens, start, stop, blocks, logits, parents = zip(*parts, strict=True)
        table = np.array((start, stop, logits, list(map(len, blocks))), np.int64)
        start_P, stop_P, logits_P, blocks_P = table
        count_P = stop_P - start_P
        end_P = count_P.cumsum()
        self.size = int(end_P[-1])
        self.parts = np.empty((len(parts), 4), np.int64)
        self.parts[:, 0] = end_P - count_P
        self.parts[:, 1], self.parts[:, 2] = start_P, stop_P
        tables_P = self.parts[:, 3] = blocks_P.cumsum() - blocks_P
        self.blocks = np.fromiter(chain.from_iterable(blocks), np.int32, int(blocks_P.sum()))
        if self.size == len(parts):  # only decodes
            self.ids_T = np.array([ids[i] for ids, i in zip(tokens, start, strict=True)], np.int64)
            self.positions_T, self._tables_T = start_P, tables_P
        else:
            read = [ids[i:j] for ids, i, j in zip(tokens, start, stop, strict=True)]
            self.ids_T = np.fromiter(chain.from_iterable(read), np.int64, self.size)
            self.positions_T = np.arange(self.size) + np.repeat(start_P - self.parts[:, 0], count_P)
            self._tables_T = np.repeat(tables_P, count_P)
        self.block_size = block_size
        self.trees: dict[int, TreeMask] = {}
        self.followed_T2, self._places_T = NO_TREES, self.positions_T
        is_short_P = count_P <= short
        if any(parents):
            self._grow(parents, is_short_P, MOST if short > 1 else 1)
        most = int(logits_P.max())
        if most <= 1:
            self.kept_L = end_P[logits_P > 0] - 1
        else:
            self.kept_L = np.concatenate([np.arange(e - n, e) for e, n in zip(end_P, logits_P, strict=True)])
        every = bool(is_short_P.all())
        self.short = self.parts if every else self.parts[is_short_P]
        self.long = self.parts[:0] if every else self.parts[~is_short_P]
        self.reach = int(self.short[:, 2].sum())  # total number of keys of the short inputs
        self.longest = int(self.short[:, 2].max(initial=0))
        self._cuts: dict[tuple[int, int, int], list[int]] = {}

    def _grow(self, parents: Sequence[Sequence[int] | None], is_short_P: NDArray[np.bool_], most: int) -> None:
        """Apply the trees of some inputs: their positions differ from the order in which they are stored."""
        self.positions_T = self.positions_T.copy()
        follows_T = np.arange(-1, self.size - 1)
        for part, own in enumerate(parents):
            if not own or list(own) == list(range(-1, len(own) - 1)):
                continue
            first, start, stop, _ = self.parts[part].tolist()
            tree = self.trees[first] = TreeMask(own, stop)
            positions = tree.positions(start)
            end = first + stop - start
            self.positions_T[end - len(positions) : end] = positions
            follows_T[end - len(positions) : end] = end - tree.size + np.array(own[tree.size - len(positions) :])
            is_short_P[part] = start <= tree.base and stop - start <= most
        self.followed_T2 = np.stack((self.positions_T, follows_T), axis=1)

    @functools.cached_property
    def slots(self) -> NDArray[np.int64]:
        """The KV cache slot of each token [T]: block * block size + offset."""
        block, place = np.divmod(self._places_T, self.block_size)
        slots: NDArray[np.int64] = self.blocks[self._tables_T + block] * np.int64(self.block_size) + place
        return slots

    def cuts(self, kv_heads: int, window: int, count: int) -> list[int]:
        """Boundaries that split the items (short input, kv head) into ``count`` ranges of about equal work."""
        found = self._cuts.get((kv_heads, window, count))
        if found is None:
            found = [0, len(self.short) * kv_heads]
            if count > 1:
                seen = np.minimum(self.short[:, 2], window) if window else self.short[:, 2]
                work = np.repeat(seen * (self.short[:, 2] - self.short[:, 1]), kv_heads).cumsum()
                found[1:1] = np.searchsorted(work, work[-1] * np.arange(1, count) / count).tolist()
            self._cuts[kv_heads, window, count] = found
        return found


def slots_of(moves: Sequence[Move], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source and target slots of moves: block * block size + offset."""
    found: tuple[list[int], list[int]] = [], []
    for _, blocks, sources, start in moves:
        for slots, places in zip(found, (sources, range(start, start + len(sources))), strict=True):
            slots += [blocks[place // block_size] * block_size + place % block_size for place in places]
    return np.array(found[0], np.int64), np.array(found[1], np.int64)
