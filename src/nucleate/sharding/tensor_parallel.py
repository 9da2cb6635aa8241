"""Tensor-parallel models: one Transformers model sharded over several processes, see ``LLM(tensor_parallel=...)``.

An engine gets a runner whose logits stay on the ranks, and a sampler that samples on all of them. Whole rows of logits
are gathered where an array is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.models.loader import check_options
from nucleate.models.protocol import DecodingContext, ModelError
from nucleate.models.runner import ModelInput, Move, Runner
from nucleate.models.transformers.sharded_model import check_shardable
from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.distributions import TargetDistributions
from nucleate.sampling.pipeline import PreparedPipeline
from nucleate.sampling.route import TENSOR_BACKENDS
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Pipeline
from nucleate.sharding.rank_channel import InputPacker, encode
from nucleate.sharding.rank_group import RankGroup
from nucleate.sharding.rank_processes import is_torchrun, join_torchrun, load_arguments, start


class RankedRows:
    """The result of a forward pass on all ranks: its number, and V."""

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self.group, self.vocab_size = group, vocab_size
        self.number = group.number(self)


class ShardedLogits:
    """Logits [R, V], or [V], as an array that can be indexed by rows. ``np.asarray`` gathers them from the ranks.

    index: the rows of the forward pass.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, rows: RankedRows, index: Sequence[int], *, one: bool = False) -> None:
        self._rows, self._index, self._one = rows, index, one

    @property
    def source(self) -> tuple[int, slice | list[int]]:
        """The number of the logits on all ranks, and the index of the rows."""
        index = self._index
        is_slice = isinstance(index, range) and index.step == 1
        return self._rows.number, slice(index.start, index.stop) if is_slice else list(index)  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        size = self._rows.vocab_size
        return (size,) if self._one else (len(self._index), size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> ShardedLogits:
        """Some rows, without an exchange; ``None`` makes [1, V] of [V]."""
        if index is None and self._one:
            return ShardedLogits(self._rows, self._index)
        if self._one:
            raise TypeError("whole rows only: convert it with np.asarray first")
        if isinstance(index, int | np.integer):
            return ShardedLogits(self._rows, [self._index[int(index)]], one=True)
        chosen = self._index[index] if isinstance(index, slice) else [self._index[each] for each in index]
        return ShardedLogits(self._rows, chosen)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        whole_RV = self._rows.group.call("whole", *self.source)
        return np.asarray(whole_RV[0] if self._one else whole_RV, dtype or self.dtype)


class RankedSampler:
    """The methods of ``Sampler`` that an engine needs, each as there. Logits are ``ShardedLogits``, or whole rows.

    Raises ParameterError for a backend that needs whole rows on a device.
    """

    def __init__(self, group: RankGroup, backend: str) -> None:
        if backend in TENSOR_BACKENDS:
            raise ParameterError("backend", f"backend {backend!r} samples on one device; tensor_parallel needs 'auto'")
        self._group, self._number = group, group.number(self)
        group.call("new_sampler", self._number, backend)
        self._own: Sampler = group.rank.get(self._number).sampler

    def add(
        self,
        pipeline: PreparedPipeline,
        prompt_ids: Sequence[int] = (),
        *,
        output_ids: Sequence[int] = (),
        seed: int,
    ) -> int:
        return int(self._group.call("add", self._number, pipeline, list(prompt_ids), list(output_ids), seed))

    @staticmethod
    def check_pipeline(pipeline: PreparedPipeline) -> None:
        """Raise ParameterError for a pipeline that the other processes cannot make."""
        rule = "with tensor_parallel, other processes sample as well, so stages must be defined in an importable module"
        try:
            encode(pipeline)
            for stage in pipeline.given:
                if type(stage).__module__ == "__main__":
                    raise TypeError(f"{type(stage).__name__} is defined in __main__")
        except Exception as error:  # pickle raises errors of many types
            raise ParameterError("sampling_params", f"{rule}: {one_line(error)}") from error

    def remove(self, row: int) -> None:
        self._group.call("remove", self._number, row)

    def stages(self, row: int) -> Pipeline:
        return self._own.stages(row)

    def distributions(
        self,
        row: int,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
    ) -> TargetDistributions:
        """Gathers whole rows; rank 0 computes."""
        return self._own.distributions(row, np.asarray(logits_NV), tokens, masks, parents=parents)

    def accept(
        self, row: int, token: int, logits_V: Any = None, mask_W: Any = None, *, distribution: Any = None
    ) -> Any:
        source = None if logits_V is None else _source(logits_V[None])
        return self._group.call("accept", self._number, row, int(token), source, mask_W, distribution)

    def __call__(self, logits_RV: Any, rows: Sequence[int], *, mask: Any = None) -> Any:
        return self._group.call("sample", self._number, _source(logits_RV), list(rows), mask)


def _source(logits_RV: Any) -> Any:
    """What ``Rank.sample`` takes: whole rows are those that rank 0 has combined with others."""
    return logits_RV.source if isinstance(logits_RV, ShardedLogits) else np.asarray(logits_RV)


class ShardedRunner(Runner):
    """See ``Runner``. memory: bytes for the KV cache of each rank. Raises ModelError."""

    tree_attention = copies_blocks = True

    def __init__(self, group: RankGroup, memory: int) -> None:
        self._group, self._packer = group, InputPacker()
        self._number = group.number(self)
        group.call("new_runner", self._number, memory)
        self._own = own = group.rank.get(self._number)[0]
        self.vocab_size, self.context_length, self.runtime = own.vocab_size, own.context_length, own.runtime
        self.block_size, self.blocks, self.asynchronous = own.block_size, own.blocks, own.asynchronous

    def new_sampler(self, backend: str) -> RankedSampler:
        """The sampler of an engine that runs this model. Raises ParameterError."""
        return RankedSampler(self._group, backend)

    def forward(self, inputs: Sequence[ModelInput]) -> ShardedLogits:
        rows = RankedRows(self._group, self.vocab_size)
        count = self._group.call("forward", self._number, rows.number, *self._packer.pack(inputs))
        return ShardedLogits(rows, range(count))

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        self._group.call("capture", self._number, tuple(layers))

    @property
    def capture_enabled(self) -> bool:
        """See ``Runner.capture_enabled``: rank 0 captures."""
        return bool(self._own.capture_enabled)

    @capture_enabled.setter
    def capture_enabled(self, value: bool) -> None:
        self._own.capture_enabled = value

    @property
    def hidden_states(self) -> Any:
        """See ``Runner.hidden_states``: all ranks have the same."""
        return self._own.hidden_states

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._group.call("copy_blocks", self._number, list(pairs))

    def move(self, moves: Sequence[Move]) -> None:
        self._group.call("move", self._number, [move._replace(blocks=list(move.blocks)) for move in moves])

    def forget(self, key: int) -> None:
        """See ``Runner.forget``. The other ranks forget it with the next forward pass."""
        self._packer.forget(key)


class TensorParallelModel:
    """See ``Model``. It can only run batched, through ``new_runner``."""

    def __init__(self, group: RankGroup) -> None:
        self._group, own = group, group.rank.model
        self.vocab_size, self.context_length, self.runtime = own.vocab_size, own.context_length, own.runtime
        self.bidirectional_prompt = own.bidirectional_prompt
        self.token_bytes = own.token_bytes  #: on each rank

    @property
    def free_memory(self) -> int:
        """Bytes free now for each rank."""
        return self._group.rank.model.free_memory

    def new_runner(self, memory: int) -> ShardedRunner:
        """A runner on all ranks. memory: bytes for the KV cache of each rank. Raises ModelError."""
        return ShardedRunner(self._group, memory)

    def begin(self) -> DecodingContext:
        """Raises ModelError: sequences run batched only."""
        raise ModelError("a tensor-parallel model runs its sequences in an engine only")

    def close(self) -> None:
        """End the other processes. The model cannot be used again."""
        self._group.close()


def load_sharded(folder: Path, size: int, device: str, dtype: str, runtime: str) -> TensorParallelModel:
    """Load the model of a folder on ``size`` ranks: new processes on this machine, or those of torchrun.

    Under torchrun, it returns on rank 0 only: the other processes serve it, and exit with status 0 when it closes.
    device: "auto", "cpu" or "cuda". dtype, runtime: as for ``nucleate.models.loader.load``. Raises ModelError and
    ParameterError, on all ranks.
    """
    if runtime == "numpy":
        raise ParameterError("runtime", "tensor_parallel needs runtime 'auto' or 'torch', got 'numpy'")
    arguments = load_arguments(folder, device, dtype, size)
    check_options(arguments[1], dtype, runtime)
    check_shardable(folder, size)  # before other processes start
    return TensorParallelModel((join_torchrun if is_torchrun() else start)(size, arguments))
