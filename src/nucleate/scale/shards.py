"""The public names of sampling on sharded logits, see ``nucleate.sharding``."""

from __future__ import annotations

from nucleate.sharding.rank_exchange import ShardError as ShardError  # noqa: PLC0414
from nucleate.sharding.rank_exchange import ShardStats as ShardStats  # noqa: PLC0414
from nucleate.sharding.sharded_sampler import ShardedSampler as ShardedSampler  # noqa: PLC0414
