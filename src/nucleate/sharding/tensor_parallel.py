"""Tensor-parallel models: one Transformers model sharded over several processes, see ``LLM(tensor_parallel=...)``."""

from __future__ import annotations

from pathlib import Path

from nucleate.models.loader import check_options
from nucleate.models.protocol import DecodingContext, ModelError
from nucleate.models.transformers.sharded_model import check_shardable
from nucleate.parameters.parameter import ParameterError
from nucleate.sharding.rank_group import RankGroup
from nucleate.sharding.rank_processes import is_torchrun, join_torchrun, load_arguments, start
from nucleate.sharding.sharded_runner import ShardedRunner


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
