"""Exchanges the tokens that each rank sends of some rows: as many as there are, in one all-gather if they fit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sharding.rank_exchange import RankExchange, pack, unpack
from nucleate.sharding.shard_layout import ShardLayout


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
    fields = [(np.int32, (count,)), (np.int32, (capacity,)), (np.float32, (capacity,))]
    head = torch.from_numpy(counts_B.astype(np.int32))
    send = pack([head, _filled(ids_K[:part], capacity), _filled(raw_K[:part], capacity)], exchange.device)
    counts_RB, ids_RK, raw_RK = unpack(exchange.gather(send)(), fields)
    sent_RB = np.maximum(counts_RB, 0)
    more = int(sent_RB.sum(1).max()) - capacity
    if more > 0:
        send = pack([_filled(ids_K[part:], more), _filled(raw_K[part:], more)], exchange.device)
        later = unpack(exchange.gather(send)(), [(np.int32, (more,)), (np.float32, (more,))])
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
