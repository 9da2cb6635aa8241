"""Rows of logits whose columns are on several ranks. Whole rows are gathered where an array is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sharding.rank_group import RankGroup


class RankedRows:
    """The result of a forward pass on all ranks: its number, and V."""

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self.group, self.vocab_size = group, vocab_size
        self.number = group.number(self)


class ShardedLogits:
    """Logits [R, V], or [V], as an array that can be indexed by rows. ``np.asarray`` gathers them from the ranks.

    index: the rows of the forward pass, a slice with start and stop or a list.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, rows: RankedRows, index: slice | list[int], *, one: bool = False) -> None:
        self._rows, self._index, self._one = rows, index, one

    @property
    def source(self) -> tuple[int, slice | list[int]]:
        """The number of the logits on all ranks, and the index of the rows."""
        return self._rows.number, self._index

    @property
    def shape(self) -> tuple[int, ...]:
        size = self._rows.vocab_size
        return (size,) if self._one else (len(self._numbers), size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def _numbers(self) -> Any:
        index = self._index
        return range(index.start, index.stop) if isinstance(index, slice) else index

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> ShardedLogits:
        """Some rows, without an exchange; ``None`` makes [1, V] of [V]."""
        if index is None and self._one:
            return ShardedLogits(self._rows, self._index)
        if self._one:
            raise TypeError("whole rows only: convert it with np.asarray first")
        if isinstance(index, slice):
            chosen = self._numbers[index]
            if isinstance(chosen, range) and chosen.step == 1:
                return ShardedLogits(self._rows, slice(chosen.start, chosen.stop))
            return ShardedLogits(self._rows, list(chosen))
        if isinstance(index, int | np.integer):
            return ShardedLogits(self._rows, [self._numbers[index]], one=True)
        numbers = self._numbers
        return ShardedLogits(self._rows, [numbers[each] for each in index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        whole_RV = self._rows.group.call("whole", *self.source)
        return np.asarray(whole_RV[0] if self._one else whole_RV, dtype or self.dtype)
