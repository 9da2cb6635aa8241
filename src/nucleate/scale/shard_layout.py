"""Which rank has which columns of the logits, and the groups of 256 token ids that they contain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.scale.shard_error import ShardError


class ShardLayout:
    """The shards of a vocabulary of ``size`` tokens, in the order of the ranks.

    first_ids, columns: per rank. Columns from ``size`` on are padding. Raises ShardError unless the shards hold every
    token once.
    """

    def __init__(self, first_ids: Sequence[int], columns: Sequence[int], size: int) -> None:
        self.columns = tuple(columns)
        self.size, self.group_count = size, -(-size // GROUP_SIZE)
        self.first_ids = tuple(first_ids)
        self.counts = tuple(
            max(0, min(first + count, size) - first) for first, count in zip(first_ids, columns, strict=True)
        )
        self.order = [rank for rank in np.argsort(first_ids, kind="stable").tolist() if self.counts[rank]]
        end, before = 0, "but the vocabulary begins"
        for rank in self.order:
            if first_ids[rank] != end:
                raise ShardError(
                    f"the shards do not fit: rank {rank} starts at token {first_ids[rank]}, {before} at {end}"
                )
            end, before = first_ids[rank] + self.counts[rank], f"but rank {rank} ends"
        if end != size:
            raise ShardError(f"the shards do not fit: they end at token {end}, but the vocabulary has {size} tokens")
        self.first_groups = tuple(first // GROUP_SIZE for first in first_ids)
        self.pieces = tuple(
            (first + count - 1) // GROUP_SIZE - first // GROUP_SIZE + 1 if count else 0
            for first, count in zip(first_ids, self.counts, strict=True)
        )
        """Per rank: the number of groups that it has a part of."""

    def group_maxima(self, parts_RBP: NDArray[np.float32]) -> NDArray[np.float32]:
        """The maxima of all groups [B, G] from those of the parts [ranks, B, P]; NaN where a part is NaN."""
        maxima_BG = np.full((parts_RBP.shape[1], self.group_count), -np.inf, np.float32)
        for rank in self.order:
            part = maxima_BG[:, self._groups(rank)]
            np.maximum(part, parts_RBP[rank, :, : self.pieces[rank]], out=part)
        return maxima_BG

    def group_masses(
        self,
        masses_RBP: NDArray[np.float64],
        parts_RBP: NDArray[np.float32],
        maxima_BG: NDArray[np.float32],
        t_B: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The masses of all groups [B, G], relative to their maxima, from those of the parts, relative to theirs."""
        masses_BG = np.zeros(maxima_BG.shape)
        for rank in self.order:
            groups, own_BP = self._groups(rank), parts_RBP[rank, :, : self.pieces[rank]].astype(np.float64)
            with np.errstate(invalid="ignore"):
                below_BP = np.where(own_BP > -np.inf, own_BP - maxima_BG[:, groups], -np.inf)
            masses_BG[:, groups] += masses_RBP[rank, :, : self.pieces[rank]] * np.exp(below_BP / t_B[:, None])
        return masses_BG

    def _groups(self, rank: int) -> slice:
        return slice(self.first_groups[rank], self.first_groups[rank] + self.pieces[rank])
