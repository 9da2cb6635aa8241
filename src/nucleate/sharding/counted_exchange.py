"""Counts the exchanges of a rank and their bytes, and refuses further ones after one has failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nucleate.sharding.rank_exchange import RankExchange
from nucleate.sharding.shard_error import ShardError


@dataclass
class ShardStats:
    """What a ``ShardedSampler`` has sampled and exchanged so far. Bytes: received by this rank, its own included."""

    calls: int = 0
    rows: Counter[str] = field(default_factory=Counter)  #: rows sampled, by what they exchanged
    exchanges: int = 0
    received_bytes: int = 0


class CountedExchange:
    """A ``RankExchange`` with statistics. A failed exchange leaves the ranks in different states: it is the last."""

    def __init__(self, inner: RankExchange, stats: ShardStats) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner, self._stats = inner, stats
        self._failure: str | None = None

    def gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._failure is not None:
            raise ShardError(self._failure)
        self._stats.exchanges += 1
        self._stats.received_bytes += self.size * len(payload)
        try:
            wait = self._inner.gather(payload)
        except ShardError as error:
            self._failure = str(error)
            raise

        def finish() -> torch.Tensor:
            try:
                return wait()
            except ShardError as error:
                self._failure = str(error)
                raise

        return finish
