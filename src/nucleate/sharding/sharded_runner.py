"""A Runner whose model is sharded over ranks. See ``Runner``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nucleate.models.runner import Fork, ModelInput, Move
from nucleate.sharding.rank_channel import InputPacker
from nucleate.sharding.rank_group import RankGroup
from nucleate.sharding.ranked_sampler import RankedSampler
from nucleate.sharding.sharded_logits import RankedRows, ShardedLogits


class ShardedRunner:
    """memory: bytes for the KV cache of each rank. Raises ModelError."""

    paged = True
    tree_attention = True
    unbatched_reason = ""

    def __init__(self, group: RankGroup, memory: int) -> None:
        self._group, self._packer = group, InputPacker()
        self._number = group.number(self)
        group.call("new_runner", self._number, memory)
        self._own = own = group.rank.get(self._number)[0]
        self.vocab_size, self.context_length, self.runtime = own.vocab_size, own.context_length, own.runtime
        self.block_size, self.blocks, self.asynchronous = own.block_size, own.blocks, own.asynchronous

    def new_sampler(self, backend: str) -> RankedSampler:
        """The sampler of an engine that runs this model. Raises ParameterError."""
        return RankedSampler(self._group, self.vocab_size, backend)

    def forward(self, inputs: Sequence[ModelInput]) -> ShardedLogits:
        """See ``Runner.forward``. Raises RunnerLostError."""
        rows = RankedRows(self._group, self.vocab_size)
        count = self._group.call("forward", self._number, rows.number, *self._packer.pack(inputs))
        return ShardedLogits(rows, slice(0, count))

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``."""
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

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        if any(fork.block is not None for fork in forks):
            self._group.call("fork", self._number, list(forks))

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        self._group.call("move", self._number, [move._replace(blocks=list(move.blocks)) for move in moves])

    def forget(self, key: int) -> None:
        """See ``Runner.forget``. The other ranks forget it with the next forward pass."""
        self._packer.forget(key)

    def warm(self) -> None:
        """Nothing to do."""
