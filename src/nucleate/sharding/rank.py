"""One rank of a tensor-parallel model: its shards of the weights, KV caches and logits, and its samplers.

All ranks make the same calls in the same order, see ``RankGroup``. Objects have numbers, which rank 0 chooses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nucleate.models.protocol import ModelError
from nucleate.models.runner import Fork, Move
from nucleate.models.transformers.batched_model import BatchedTransformers
from nucleate.models.transformers.ragged_attention import IncompatibleModelError
from nucleate.models.transformers.sharded_model import ShardedTransformers, check_shardable
from nucleate.models.transformers.transformers_model import libraries
from nucleate.outputs import StepLogprobs
from nucleate.parameters.converters import one_line
from nucleate.sampling.sampler import SamplerOutput
from nucleate.sharding.rank_agreement import check_equal, gather_text, version
from nucleate.sharding.rank_channel import InputUnpacker, PackedInput, RankChannel
from nucleate.sharding.rank_exchange import ProcessGroupExchange
from nucleate.sharding.shard_layout import ShardLayout, gather_rows, shard_logits
from nucleate.sharding.sharded_sampler import ShardedSampler

END_BYTES = 1 << 16
"""Bytes at the beginning and at the end of each file of weights that the ranks compare."""


class SetupError(ModelError):
    """The ranks cannot run a model. All of them raise it, and none waits for another one."""


class Rank:
    """rank, size: of this process in the default group of torch.distributed. timeout: seconds, see ``RankGroup``.

    All ranks create it together.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self.channel = RankChannel(timeout)
        self._setup = ProcessGroupExchange(self.channel.group, timeout)
        self._exchange = ProcessGroupExchange(None, timeout)
        self._objects: dict[int, Any] = {}

    def load(self, folder: Path, device: str, dtype: str) -> None:
        """Load this rank's shard of a model. Raises SetupError on all ranks if one fails or has something else."""
        facts = {"models": _checksum(folder), "versions of nucleate": version(), **_library_versions()}

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
        """Forget objects."""
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

    def fork(self, runner: int, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        self._objects[runner][0].fork(forks)

    def move(self, runner: int, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        self._objects[runner][0].move(moves)

    def capture(self, runner: int, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``: all ranks have the same hidden states, and rank 0 keeps them."""
        batched = self._objects[runner][0]
        self._together(lambda: batched.capture_hidden_states(layers))
        batched.capture_enabled = self.rank == 0

    def whole(self, number: int, rows: Any) -> Any:
        """Rows of logits [R, V] from all ranks, NumPy float32. rows: an index."""
        local_RN = shard_logits(self._objects[number][rows])
        return gather_rows(self._exchange, self._layout, local_RN).float().numpy()

    def new_sampler(self, number: int, backend: str) -> None:
        """Create a sampler."""
        self._objects[number] = ShardedSampler(self.model.vocab_size, backend=backend, timeout=self._timeout)

    def add(self, sampler: int, pipeline: Any, prompt_ids: Any, output_ids: Any, seed: int) -> int:
        """See ``Sampler.add``."""
        added: int = self._objects[sampler].add(pipeline, prompt_ids, output_ids=output_ids, seed=seed)
        return added

    def remove(self, sampler: int, row: int) -> None:
        """See ``Sampler.remove``."""
        self._objects[sampler].remove(row)

    def sample(self, sampler: int, source: Any, rows: Sequence[int], mask: Any) -> SamplerOutput:
        """See ``Sampler.__call__``. source: a number of logits with an index, or whole rows [R, V]."""
        sampled: SamplerOutput = self._objects[sampler](self._local(source), self.model.first_id, rows, mask=mask)
        return sampled

    def accept(
        self, sampler: int, row: int, token: int, source: Any, mask_W: Any, distribution: Any
    ) -> StepLogprobs | None:
        """See ``Sampler.accept``. source: as for ``sample``, of one row; None: the token is forced."""
        local_N = None if source is None else self._local(source)[0]
        accepted: StepLogprobs | None = self._objects[sampler].accept(
            row, token, local_N, self.model.first_id, mask_W, distribution=distribution
        )
        return accepted

    def _local(self, source: Any) -> Any:
        """This rank's columns [R, N] of some logits."""
        if isinstance(source, tuple):
            number, rows = source
            return self._objects[number][rows]
        return source[:, self.model.first_id : self.model.first_id + self.model.columns]


def _library_versions() -> dict[str, str]:
    _, transformers = libraries()
    return {"versions of torch": torch.__version__, "versions of Transformers": transformers.__version__}


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
