"""Which rank has which columns of the logits; and the exchanges of whole rows, and of some tokens of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sharding.rank_exchange import RankExchange, ShardError, gather_arrays, pack, padded

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
        shards = zip(first_ids, columns, strict=True)
        self.counts = tuple(max(0, min(first + count, size) - first) for first, count in shards)
        self.order = [rank for rank in np.argsort(first_ids, kind="stable").tolist() if self.counts[rank]]
        end, before = 0, "but the vocabulary begins"
        for rank in self.order:
            if (start := first_ids[rank]) != end:
                raise ShardError(f"the shards do not fit: rank {rank} starts at token {start}, {before} at {end}")
            end, before = start + self.counts[rank], f"but rank {rank} ends"
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

    def holds(self, rank: int, group_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some groups a rank has a part of."""
        begin = self.first_groups[rank]
        return (group_B >= begin) & (group_B < begin + self.pieces[rank])

    def _groups(self, rank: int) -> slice:
        return slice(self.first_groups[rank], self.first_groups[rank] + self.pieces[rank])


def shard_logits(logits: Any) -> torch.Tensor:
    """The logits of a shard, NumPy or torch, as a tensor [R, N] without a gradient. Raises ValueError, TypeError."""
    tensor = logits.detach() if hasattr(logits, "detach") else torch.from_numpy(_readable(logits))
    if tensor.ndim != 2:
        raise ValueError(f"logits must have the shape [rows, columns of the shard], got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"logits must be floating-point numbers, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def _readable(logits: Any) -> Any:
    """An array that torch can share: in rows, writable, of a type that torch has."""
    array = np.require(logits, requirements=["C", "W", "A"])
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def gather_rows(exchange: RankExchange, layout: ShardLayout, logits_RN: torch.Tensor) -> torch.Tensor:
    """Rows of logits [R, V] from the columns [R, N] of all ranks, in their data type, on the CPU."""
    rows, most = len(logits_RN), max(layout.counts)
    own_RN = padded(logits_RN[:, : layout.counts[exchange.rank]], most, 0.0)
    received = exchange.gather(pack([own_RN], exchange.device))().cpu()
    parts_SRN = received.view(logits_RN.dtype).view(exchange.size, rows, most)
    return torch.cat([parts_SRN[rank, :, : layout.counts[rank]] for rank in layout.order], 1)


class FoundTokens(NamedTuple):
    """The tokens that decide a row, with ascending ids."""

    ids_N: NDArray[np.int64]
    raw_N: NDArray[np.float32]  #: their logits


def exchange_tokens(
    exchange: RankExchange,
    layout: ShardLayout,
    counts_B: NDArray[np.int64],
    columns_K: torch.Tensor,
    raw_K: torch.Tensor,
    capacity: int,
) -> list[FoundTokens | None]:
    """The tokens of all ranks, per row; None for a row of which a rank has too many to send.

    counts_B: how many tokens of each row this rank sends, -1 for too many. columns_K, raw_K: their columns and logits,
    row by row. capacity: the tokens of a rank for which the first exchange has room, the same on all ranks.
    """
    count, part = len(counts_B), min(len(columns_K), capacity)
    ids_K = (columns_K + layout.first_ids[exchange.rank]).to(torch.int32)
    head = torch.from_numpy(counts_B.astype(np.int32))
    send = [head, _filled(ids_K[:part], capacity), _filled(raw_K[:part], capacity)]
    counts_RB, ids_RK, raw_RK = gather_arrays(exchange, send)()
    sent_RB = np.maximum(counts_RB, 0)
    more = int(sent_RB.sum(1).max()) - capacity
    if more > 0:
        later = gather_arrays(exchange, [_filled(ids_K[part:], more), _filled(raw_K[part:], more)])()
        ids_RK, raw_RK = (np.concatenate(pair, 1) for pair in zip((ids_RK, raw_RK), later, strict=True))
    ends_RB = np.cumsum(sent_RB, axis=1)
    found: list[FoundTokens | None] = []
    for row in range(count):
        spans = [(rank, slice(ends_RB[rank, row] - sent_RB[rank, row], ends_RB[rank, row])) for rank in layout.order]
        ids_N = np.concatenate([ids_RK[span] for span in spans]).astype(np.int64)
        tokens = FoundTokens(ids_N, np.concatenate([raw_RK[span] for span in spans]))
        found.append(tokens if counts_RB[:, row].min() >= 0 else None)
    return found


def _filled(x_K: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor [size] that begins with x_K."""
    return torch.nn.functional.pad(x_K, (0, size - len(x_K)))
