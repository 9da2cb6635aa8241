"""Exchanges bytes between the ranks: an all-gather over a process group of torch.distributed, with a time limit.

``pack`` and ``unpack`` turn tensors into these bytes. ``CountedExchange`` keeps statistics, and refuses further
exchanges after one has failed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class ShardError(RuntimeError):
    """The ranks cannot sample together: their setups differ, or a rank has ended. The sampler cannot be used again."""


Field = tuple[Any, tuple[int, ...]]
"""The NumPy data type and the shape of a tensor."""


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of tensors, uint8 [N], on a device."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([part.to(device) for part in parts]) if parts else torch.zeros(0, dtype=torch.uint8, device=device)


def unpack(received: torch.Tensor, fields: Sequence[Field]) -> list[NDArray[Any]]:
    """The arrays [ranks, *shape] of payloads uint8 [ranks, N]."""
    data, at, arrays = received.cpu().numpy(), 0, []
    for dtype, shape in fields:
        end = at + prod(shape) * np.dtype(dtype).itemsize
        arrays.append(np.ascontiguousarray(data[:, at:end]).view(dtype).reshape(len(data), *shape))
        at = end
    return arrays


def padded(x: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """A tensor [R, N] with N increased to ``size``."""
    return x if x.shape[1] == size else torch.nn.functional.pad(x, (0, size - x.shape[1]), value=value)


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The new name, where torch has it: the old one is deprecated."""


class RankExchange(Protocol):
    """The connection of one rank with the others."""

    rank: int
    size: int  #: the number of ranks
    device: torch.device  #: on which payloads are

    def gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send uint8 [N], with the same N on all ranks. The result waits, and returns uint8 [size, N]."""


class ProcessGroupExchange:
    """A process group. group: None for the default one. timeout: seconds until a rank that does not answer is an error.

    NCCL groups exchange on the current CUDA device, others on the CPU. Raises RuntimeError if torch.distributed is not
    initialized, ValueError if this process is not in the group.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("ShardedSampler needs a process group: call torch.distributed.init_process_group first")
        self.rank, self.size, self._group, self._timeout = (
            dist.get_rank(group),
            dist.get_world_size(group),
            group,
            timeout,
        )
        if self.rank < 0:
            raise ValueError("this process is not in the process group")
        self._on_gpu = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")

    def gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See ``RankExchange``. Raises ShardError if a rank has ended or does not answer in time."""
        received = torch.empty(self.size * len(payload), dtype=torch.uint8, device=self.device)
        try:
            work = all_gather(received, payload, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._failure(error) from error

        def wait() -> torch.Tensor:
            try:
                self._wait(work)
            except RuntimeError as error:
                raise self._failure(error) from error
            return received.view(self.size, -1)

        return wait

    def _wait(self, work: Any) -> None:
        if not self._on_gpu:
            work.wait(timedelta(seconds=self._timeout))
            return
        end = time.monotonic() + self._timeout  # NCCL's wait blocks the stream only, and a copy would wait forever
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("timeout")
        work.wait()

    def _failure(self, error: RuntimeError) -> ShardError:
        why = " ".join(str(error).split())[:200]
        return ShardError(
            f"rank {self.rank} of {self.size} could not exchange logits: another rank has ended, or did not answer "
            f"within {self._timeout:g} s ({why})"
        )


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
