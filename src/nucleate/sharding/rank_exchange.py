"""Exchanges bytes between the ranks, and checks with them that all ranks have the same setup, rows and parameters.

An exchange is an all-gather over a process group of torch.distributed, with a time limit. A difference between ranks is
the same ShardError on all of them, and says what differs and where.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nucleate.sampling import noise


class ShardError(RuntimeError):
    """The ranks cannot sample together: their setups differ, or a rank has ended. The sampler cannot be used again."""


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of tensors, uint8 [N], on a device."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8).to(device) for tensor in tensors])


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


NUMPY_TYPES = {getattr(torch, name): np.dtype(name) for name in ("float64", "float32", "int64", "int32", "uint8")}


def gather_arrays(exchange: RankExchange, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Send tensors, of the same types and shapes on all ranks. The result waits, and returns arrays [ranks, *shape]."""
    receive = exchange.gather(pack(tensors, exchange.device))

    def wait() -> list[NDArray[Any]]:
        data, at, arrays = receive().cpu().numpy(), 0, []
        for tensor in tensors:
            dtype = NUMPY_TYPES[tensor.dtype]
            end = at + tensor.numel() * dtype.itemsize
            arrays.append(np.ascontiguousarray(data[:, at:end]).view(dtype).reshape(len(data), *tensor.shape))
            at = end
        return arrays

    return wait


class ProcessGroupExchange:
    """A process group. group: None for the default one. timeout: seconds until a rank that does not answer is an error.

    NCCL groups exchange on the current CUDA device, others on the CPU. Raises RuntimeError if torch.distributed is not
    initialized, ValueError if this process is not in the group.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("ShardedSampler needs a process group: call torch.distributed.init_process_group first")
        self._group, self._timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
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


Result = TypeVar("Result")


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
        wait = self._recorded(lambda: self._inner.gather(payload))
        return lambda: self._recorded(wait)

    def _recorded(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except ShardError as error:
            self._failure = str(error)
            raise


STEP_NUMBERS, TEXT_BYTES = 12, 1024
"""The sizes of messages, which must not depend on what may differ between the ranks."""

ROW_FACTS = ("rows", "seeds of the rows", "parameters of the rows", "tokens of the rows")
"""What a ``RowLog`` keeps checksums of."""


def version() -> str:
    """The version of nucleate on this rank."""
    return str(sys.modules["nucleate"].__version__)  # an import would be circular


def arithmetic() -> str:
    """A checksum of the float64 functions with which the ranks decide alike: it depends on NumPy and the processor."""
    x_N = noise.uniform(1, 0, noise.TOKEN, np.arange(1000))
    results = np.exp(-30.0 * x_N), np.log(x_N), np.log1p(-x_N), np.cumsum(x_N), np.array([x_N.sum()])
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def agree_on_setup(exchange: RankExchange, vocab_size: int) -> int:
    """Check the setups of all ranks. Returns a random seed that is the same on all of them."""
    own = {
        "versions of nucleate": version(),
        "vocabulary sizes": vocab_size,
        "checksums of the arithmetic of NumPy and the processor": arithmetic(),
    }
    setups = [json.loads(text) for text in gather_text(exchange, json.dumps({**own, "seed": noise.fresh_seed()}))]
    for name in own:
        check_equal(f"the {name}", [setup.get(name) for setup in setups])
    return int(setups[0]["seed"])


def check_equal(name: str, values: Sequence[Any], *, show: bool = True) -> None:
    """Raise ShardError if a fact differs between ranks. show: whether the message has the values."""
    by_value: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        groups = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" + (f" ({value})" if show else "")
            for value, ranks in by_value.items()
        ]
        raise ShardError(f"{name} differ between ranks: {' against '.join(groups)}")


class RowLog:
    """A running checksum of what was done with the rows on this rank."""

    def __init__(self) -> None:
        self.facts: dict[str, int] = dict.fromkeys(ROW_FACTS, 0)

    def record(self, fact: str, *values: Any) -> None:
        """Include values in a checksum."""
        self.facts[fact] = zlib.crc32(repr(values).encode(), self.facts[fact])


def agree_on_step(
    exchange: RankExchange, facts: Mapping[str, int], first_id: int, columns: int, problem: str
) -> Callable[[], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start to compare a step's facts. The result waits, and returns the first ids and the columns of all ranks.

    problem: why this rank cannot take the step; "" if it can. The other ranks then raise ShardError, too.
    """
    numbers = np.zeros(STEP_NUMBERS, np.uint32)
    values = [bool(problem), first_id, columns, *facts.values()]
    numbers[: len(values)] = values
    receive = gather_arrays(exchange, [torch.from_numpy(numbers.view(np.uint8))])

    def wait() -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows_RN = receive()[0].view(np.uint32)
        if rows_RN[:, 0].any():
            problems = gather_text(exchange, problem)
            rank = int(rows_RN[:, 0].argmax())
            if not problem:
                raise ShardError(f"rank {rank} failed: {problems[rank]}")
        elif (rows_RN[:, 3:] != rows_RN[0, 3:]).any():
            for name, values in zip(facts, rows_RN[:, 3:].T.tolist(), strict=False):
                check_equal(f"the {name}", values, show=False)
        return tuple(rows_RN[:, 1].tolist()), tuple(rows_RN[:, 2].tolist())

    return wait


def gather_text(exchange: RankExchange, text: str) -> list[str]:
    """A text of each rank, cut to TEXT_BYTES."""
    data = np.frombuffer(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.uint8).copy()
    [received] = gather_arrays(exchange, [torch.from_numpy(data)])()
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in received]
