"""The ranks of a tensor-parallel model: each has shards of the weights, KV caches and logits, and its samplers.

A call of rank 0 is made on all ranks, in the same order. Objects have numbers, which rank 0 chooses.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from nucleate.models.protocol import ModelError, RunnerLostError
from nucleate.models.runner import Move
from nucleate.models.transformers.batched_model import BatchedTransformers
from nucleate.models.transformers.ragged_attention import IncompatibleModelError
from nucleate.models.transformers.sharded_model import ShardedTransformers, check_shardable
from nucleate.models.transformers.transformers_model import libraries
from nucleate.parameters.converters import one_line
from nucleate.sharding.rank_channel import InputUnpacker, PackedInput, RankChannel, encode
from nucleate.sharding.rank_exchange import ProcessGroupExchange, check_equal, gather_text, version
from nucleate.sharding.shard_layout import ShardLayout, gather_rows, shard_logits
from nucleate.sharding.sharded_sampler import ShardedSampler

END_BYTES = 1 << 16
"""Bytes at the beginning and at the end of each file of weights that the ranks compare."""


class SetupError(ModelError):
    """The ranks cannot run a model. All of them raise it, and none waits for another one."""


class Rank:
    """What one rank has. Methods with names of ``Runner`` and ``Sampler`` do the same, for an object by its number.

    rank, size: of this process in the default group of torch.distributed. timeout: seconds, see ``RankGroup``. All
    ranks create it together.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self.channel = RankChannel(timeout)
        self._setup = ProcessGroupExchange(self.channel.group, timeout)
        self._exchange = ProcessGroupExchange(None, timeout)
        self._objects: dict[int, Any] = {}

    def load(self, folder: Path, device: str, dtype: str) -> None:
        """Load this rank's shard of a model. Raises SetupError on all ranks if one fails or has something else."""
        facts = {
            "models": _checksum(folder),
            "versions of nucleate": version(),
            "versions of torch": torch.__version__,
            "versions of Transformers": libraries()[1].__version__,
        }

        def load() -> None:
            self.model = ShardedTransformers(folder, device, dtype, self.rank, self.size)

        self._together(lambda: check_shardable(folder, self.size), facts)  # first: loading exchanges
        self._together(load)
        first_ids, columns = zip(*map(self.model.columns_of, range(self.size)), strict=True)
        self._layout = ShardLayout(first_ids, columns, self.model.vocab_size)

    def _together(self, action: Callable[[], None], facts: dict[str, str] | None = None) -> None:
        """Do something that can fail on one rank alone. Raises SetupError on all ranks."""
        problem = ""
        try:
            action()
        except Exception as error:  # noqa: BLE001  # raised below, when all ranks know
            problem = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {one_line(error)}"
        own = {"problem": problem.encode("ascii", "replace").decode()[:500], **(facts or {})}
        found = [json.loads(text) for text in gather_text(self._setup, json.dumps(own))]
        if problem:
            raise SetupError(problem)
        for rank, one in enumerate(found):
            if one["problem"]:
                raise SetupError(f"rank {rank}: {one['problem']}")
        try:
            for name in facts or ():
                check_equal(f"the {name}", [one[name] for one in found])
        except RuntimeError as error:
            raise SetupError(str(error)) from None

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._objects.pop(number, None)

    def get(self, number: int) -> Any:
        """An object by its number."""
        return self._objects[number]

    def new_runner(self, number: int, memory: int) -> None:
        """Create a runner. memory: bytes for the KV cache of this rank. Raises SetupError."""

        def create() -> None:
            try:
                self._objects[number] = BatchedTransformers(self.model, memory), InputUnpacker()
            except IncompatibleModelError as error:
                raise ModelError(f"tensor_parallel needs a model that runs batched, but {error}") from error

        self._together(create)

    def forward(self, runner: int, number: int, forgotten: Sequence[int], inputs: Sequence[PackedInput]) -> int:
        """Compute inputs. The logits [L, columns of this rank] get a number. Returns L."""
        batched, unpacker = self._objects[runner]
        logits_LN = batched.forward(unpacker.unpack(forgotten, inputs))
        self._objects[number] = logits_LN
        return len(logits_LN)

    def copy_blocks(self, runner: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._objects[runner][0].copy_blocks(pairs)

    def move(self, runner: int, moves: Sequence[Move]) -> None:
        self._objects[runner][0].move(moves)

    def capture(self, runner: int, layers: Sequence[int]) -> None:
        """Capture hidden states: all ranks have the same, and rank 0 keeps them."""
        batched = self._objects[runner][0]
        self._together(lambda: batched.capture_hidden_states(layers))
        batched.capture_enabled = self.rank == 0

    def whole(self, number: int, rows: Any) -> Any:
        """Rows of logits [R, V] from all ranks, NumPy float32. rows: an index."""
        local_RN = shard_logits(self._objects[number][rows])
        return gather_rows(self._exchange, self._layout, local_RN).float().numpy()

    def new_sampler(self, number: int, backend: str) -> None:
        self._objects[number] = ShardedSampler(self.model.vocab_size, backend=backend, timeout=self._timeout)

    def add(self, sampler: int, pipeline: Any, prompt_ids: Any, output_ids: Any, seed: int) -> Any:
        return self._objects[sampler].add(pipeline, prompt_ids, output_ids=output_ids, seed=seed)

    def remove(self, sampler: int, row: int) -> None:
        self._objects[sampler].remove(row)

    def sample(self, sampler: int, source: Any, rows: Sequence[int], mask: Any) -> Any:
        """Call a sampler. source: a number of logits with an index, or whole rows [R, V]."""
        return self._objects[sampler](self._local(source), self.model.first_id, rows, mask=mask)

    def accept(self, sampler: int, row: int, token: int, source: Any, mask_W: Any, distribution: Any) -> Any:
        """source: as for ``sample``, of one row; None: the token is forced."""
        local_N, first_id = None if source is None else self._local(source)[0], self.model.first_id
        return self._objects[sampler].accept(row, token, local_N, first_id, mask_W, distribution=distribution)

    def _local(self, source: Any) -> Any:
        """This rank's columns [R, N] of some logits."""
        if isinstance(source, tuple):
            return self._objects[source[0]][source[1]]
        return source[:, self.model.first_id : self.model.first_id + self.model.columns]


def _checksum(folder: Path) -> str:
    """A checksum of a model's config, and of the sizes, beginnings and ends of its weights."""
    found = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode() + file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES))
            found.update(file.read())
    return found.hexdigest()[:16]


CLOSE = "close"
"""The name of the last call."""

CHECKED = {"new_runner", "new_sampler", "capture", "add", "remove", "sample", "accept"}
SAME_ON_ALL = ValueError, TypeError, SetupError
"""Calls whose arguments are checked before anything is exchanged, and the errors that all ranks raise then."""

REPORT_SECONDS = 1.0
"""How long a failed call waits for a process to end, to name it."""


class OtherProcesses(Protocol):
    """The processes of the ranks from 1 on."""

    def ended(self) -> str:
        """Those that have ended, as text; "" if none has, or if it is not known."""

    def stop(self, *, wait: bool) -> None:
        """End the processes, and leave the process group. wait: for them to end by themselves, for a few seconds."""


class RankGroup:
    """The driver: owns rank 0. Thread-safe: one call runs at a time.

    A call that fails on one rank only is the last: the ranks may be in different states.
    """

    def __init__(self, rank: Rank, processes: OtherProcesses) -> None:
        self.rank, self.processes = rank, processes
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._numbers, self._released = itertools.count(), deque[int]()
        atexit.register(self.close)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of ``Rank`` on all ranks. Returns the result of rank 0. Raises RunnerLostError."""
        with self._lock:
            if self._failure is not None:
                raise RunnerLostError(self._failure)
            released = [self._released[at] for at in range(len(self._released))]  # it may grow at any time
            payload = encode((released, name, arguments))
            for _ in released:
                self._released.popleft()
            try:
                if lost := self.processes.ended():
                    raise RuntimeError(lost)
                self.rank.channel.send(payload)
                self.rank.release(released)
                return getattr(self.rank, name)(*arguments)
            except BaseException as error:
                if is_same_on_all(name, error):
                    raise
                self._fail(error)
                if isinstance(error, Exception):
                    raise RunnerLostError(self._failure) from error
                raise

    def number(self, owner: Any) -> int:
        """A new number for an object on all ranks, which is released with its owner here."""
        number = next(self._numbers)
        weakref.finalize(owner, self._released.append, number).atexit = False
        return number

    def _fail(self, error: BaseException) -> None:
        end = time.monotonic() + REPORT_SECONDS
        while not (ended := self.processes.ended()) and time.monotonic() < end:
            time.sleep(0.02)
        why = ended or " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._failure = f"the ranks of the model (tensor_parallel={self.rank.size}) have stopped: {why}"
        self.processes.stop(wait=False)
        atexit.unregister(self.close)

    def close(self) -> None:
        """End the other ranks. Later calls raise RunnerLostError."""
        if not self._lock.acquire(timeout=5.0):  # a thread that is in a call when the process ends
            self.processes.stop(wait=False)
            return
        try:
            if self._failure is None:
                self._failure = "the model was closed"
                with suppress(RuntimeError):
                    self.rank.channel.send(encode(((), CLOSE, ())))
                self.processes.stop(wait=True)
                atexit.unregister(self.close)
        finally:
            self._lock.release()


def follow(rank: Rank) -> None:
    """Make the calls of rank 0 on another rank, until it closes.

    Raises any other error than those that all ranks raise.
    """
    while True:
        released, name, arguments = rank.channel.receive()
        rank.release(released)
        if name == CLOSE:
            return
        try:
            getattr(rank, name)(*arguments)
        except Exception as error:
            if not is_same_on_all(name, error):
                raise


def is_same_on_all(name: str, error: BaseException) -> bool:
    """Whether all ranks raise this error of a call."""
    return name in CHECKED and isinstance(error, SAME_ON_ALL)
