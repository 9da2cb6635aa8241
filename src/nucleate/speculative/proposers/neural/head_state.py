"""State shared by draft heads that attend to the target's hidden states: sequences, progress, KV cache blocks."""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.paged_cache import BatchLayout
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.speculative.draft import DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder
from nucleate.speculative.proposers.neural.hidden_states import CapturedHiddenStates
from nucleate.speculative.proposers.neural.kv_slots import KVSlots
from nucleate.speculative.proposers.neural.layer import rms_normalize


class TrackedSequences:
    """The sequences whose hidden states are received, and the KV cache blocks of a head."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._kv_slots = KVSlots(blocks, block_size)
        self._captured: dict[int, CapturedHiddenStates] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        for output in outputs:
            self._captured.setdefault(output.key, CapturedHiddenStates()).add(output)

    def forget(self, key: int) -> None:
        """See ``Proposer.forget``."""
        self._captured.pop(key, None)
        self._kv_slots.free_sequence(key)

    def ready(self, chains: Sequence[ChainBuilder], num_draft_tokens: int | None = None) -> list[ChainBuilder]:
        """The chains that can be drafted: all but the last token have hidden states, and the KV cache has space.

        num_draft_tokens: draft tokens to allocate KV cache for; None: ``max_tokens`` of each chain.
        """
        keys = [chain.context.key for chain in chains]
        ready = []
        for chain in chains:
            count = chain.max_tokens if num_draft_tokens is None else num_draft_tokens
            if chain.max_tokens > 0 and self._allocate(chain.context, count, keys):
                ready.append(chain)
        return ready

    def _allocate(self, context: DraftContext, num_draft_tokens: int, keys: list[int]) -> bool:
        states = self._captured.get(context.key)
        if states is None or states.stop != len(context.token_ids) - 1 or not states.count:
            return False
        for key in self._kv_slots.allocate(context.key, states.count + num_draft_tokens, keys):
            self._captured.pop(key, None)
        return context.key in self._captured

    def captured(self, chain: ChainBuilder) -> CapturedHiddenStates:
        """The hidden states of a sequence."""
        return self._captured[chain.context.key]

    def model_input(self, chain: ChainBuilder, start: int, stop: int, shift: int = 0) -> ModelInput:
        """The model input for the captured tokens ``start`` to ``stop`` of a sequence, ``shift`` positions later."""
        ids = chain.ids[self._captured[chain.context.key].base + shift :]
        return ModelInput(chain.context.key, ids, start, stop, self._kv_slots.tables[chain.context.key], 1)

    def pending_layout(self, chains: Sequence[ChainBuilder], shift: int = 0) -> BatchLayout:
        """The layout of the tokens whose hidden states are not processed yet."""
        found = [(chain, self._captured[chain.context.key]) for chain in chains]
        parts = [self.model_input(chain, one.num_processed, one.count, shift) for chain, one in found]
        return BatchLayout(parts, self._kv_slots.block_size)


class DraftHead(Proposer):
    """Base class of proposers with a KV cache over hidden states. tokens: KV cache size, for all sequences together."""

    def __init__(self, target: Llama, tokens: int) -> None:
        self._target, self._sequences = target, TrackedSequences(tokens // BLOCK, BLOCK)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        self._sequences.observe(outputs)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._sequences.forget(key)

    def _rms_norm(self, x_TX: Floats, norm_X: Floats) -> Floats:
        return rms_normalize(x_TX, self._target.epsilon) * norm_X
