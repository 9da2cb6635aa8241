"""Exchanges all logits of some rows, for those that need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nucleate.sharding.rank_exchange import RankExchange, pack, padded
from nucleate.sharding.shard_layout import ShardLayout


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
