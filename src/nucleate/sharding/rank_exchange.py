"""All-gather of bytes between the ranks, over a process group of torch.distributed, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nucleate.sharding.shard_error import ShardError

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
