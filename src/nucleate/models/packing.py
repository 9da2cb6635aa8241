"""The parts of a forward side by side as arrays: which token is where, and which blocks it sees. Knows no model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nucleate.models.runner import Part

SHORT = 8
"""Up to so many new tokens, a part is attended token by token: a decode, or a few tokens to verify."""


class Packing:
    """T tokens of P parts, one after the other.

    ids_T, positions_T, kept_L (whose logits are wanted) are int64. blocks are the parts' own, end to end, int32.
    ``parts`` is int64 [P, 4]: first token, start, stop, where its blocks begin.
    ``short`` are the rows of parts that the kernel takes; ``long`` those left.
    """

    def __init__(self, parts: Sequence[Part], block_size: int, short: int = SHORT) -> None:
        _, tokens, start, stop, blocks, logits = zip(*parts, strict=True)
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
        if self.size == len(parts):  # nothing but decodes
            self.ids_T = np.array([ids[i] for ids, i in zip(tokens, start, strict=True)], np.int64)
            self.positions_T, self._tables_T = start_P, tables_P
        else:
            read = [ids[i:j] for ids, i, j in zip(tokens, start, stop, strict=True)]
            self.ids_T = np.fromiter(chain.from_iterable(read), np.int64, self.size)
            self.positions_T = np.arange(self.size) + np.repeat(start_P - self.parts[:, 0], count_P)
            self._tables_T = np.repeat(tables_P, count_P)
        self.block_size = block_size
        most = int(logits_P.max())
        if most <= 1:
            self.kept_L = end_P[logits_P > 0] - 1
        else:
            self.kept_L = np.concatenate([np.arange(e - n, e) for e, n in zip(end_P, logits_P, strict=True)])
        is_short_P = count_P <= short
        every = bool(is_short_P.all())
        self.short = self.parts if every else self.parts[is_short_P]
        self.long = self.parts[:0] if every else self.parts[~is_short_P]
        self.reach = int(self.short[:, 2].sum())  # how many tokens the short parts see together
        self._cuts: dict[tuple[int, int, int], list[int]] = {}

    @functools.cached_property
    def slots(self) -> NDArray[np.int64]:
        """Where the keys and values of each token go [T]: block * block size + place."""
        block, place = np.divmod(self.positions_T, self.block_size)
        slots: NDArray[np.int64] = self.blocks[self._tables_T + block] * np.int64(self.block_size) + place
        return slots

    def cuts(self, kv_heads: int, window: int, count: int) -> list[int]:
        """Where to cut the items (short part, kv head) into ``count`` ranges of about equal work, 0 and the end too."""
        found = self._cuts.get((kv_heads, window, count))
        if found is None:
            found = [0, len(self.short) * kv_heads]
            if count > 1:
                seen = np.minimum(self.short[:, 2], window) if window else self.short[:, 2]
                work = np.repeat(seen * (self.short[:, 2] - self.short[:, 1]), kv_heads).cumsum()
                found[1:1] = np.searchsorted(work, work[-1] * np.arange(1, count) / count).tolist()
            self._cuts[kv_heads, window, count] = found
        return found
