"""Which rank has which columns of the logits, and the groups of 256 token ids that they contain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sharding.rank_exchange import ShardError

Floats = NDArray[np.float64]


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

    def group_weights(
        self, masses_RMP: NDArray[np.float64], tops_RM: NDArray[np.float32], top_M: Floats, t_M: Floats
    ) -> Floats:
        """The masses of all groups [M, G] relative to the tops of the rows, from those of the parts [ranks, M, P].

        The masses of each rank are relative to its own tops_RM.
        """
        weights_MG = np.zeros((len(top_M), self.group_count))
        for rank in self.order:
            own_M = tops_RM[rank].astype(np.float64)
            scale_M = np.where(own_M > -np.inf, np.exp((own_M - top_M) / t_M), 0.0)
            weights_MG[:, self._groups(rank)] += masses_RMP[rank, :, : self.pieces[rank]] * scale_M[:, None]
        return weights_MG

    def _groups(self, rank: int) -> slice:
        return slice(self.first_groups[rank], self.first_groups[rank] + self.pieces[rank])
