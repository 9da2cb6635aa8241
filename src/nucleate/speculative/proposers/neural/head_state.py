"""State shared by draft heads that attend to the target's hidden states: sequences, progress, KV cache blocks."""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.paged.batch_layout import BatchLayout
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.speculative.draft import DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder
from nucleate.speculative.proposers.neural.hidden_states import CapturedHiddenStates
from nucleate.speculative.proposers.neural.kv_slots import KVSlots
from nucleate.speculative.proposers.neural.layer import unit


class Followed:
    """The sequences whose hidden states are received, and the KV cache blocks of a head."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._rooms = KVSlots(blocks, block_size)
        self._heard: dict[int, CapturedHiddenStates] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        for read in readings:
            self._heard.setdefault(read.key, CapturedHiddenStates()).add(read)

    def forget(self, key: int) -> None:
        """See ``Proposer.forget``."""
        self._heard.pop(key, None)
        self._rooms.leave(key)

    def ready(self, chains: Sequence[ChainBuilder], more: int | None = None) -> list[ChainBuilder]:
        """Those that a draft can be made for: all but the last token of a sequence are known, and there is room.

        more: tokens of drafts that room is needed for; None for as many as are wanted.
        """
        keys = [chain.state.key for chain in chains]
        return [chain for chain in chains if chain.count > 0 and self._room(chain.state, chain.count, more, keys)]

    def _room(self, state: DraftContext, count: int, more: int | None, keys: list[int]) -> bool:
        heard = self._heard.get(state.key)
        if heard is None or heard.stop != len(state.token_ids) - 1 or not heard.count:
            return False
        for key in self._rooms.room(state.key, heard.count + (count if more is None else more), keys):
            self._heard.pop(key, None)
        return state.key in self._heard

    def heard(self, chain: ChainBuilder) -> CapturedHiddenStates:
        """What is known of a sequence."""
        return self._heard[chain.state.key]

    def part(self, chain: ChainBuilder, start: int, stop: int, shift: int = 0) -> ModelInput:
        """Tokens of what a head has of a sequence, counted from where that begins; ``shift`` places later."""
        ids = chain.ids[self._heard[chain.state.key].base + shift :]
        return ModelInput(chain.state.key, ids, start, stop, self._rooms.tables[chain.state.key], 1)

    def waiting(self, chains: Sequence[ChainBuilder], shift: int = 0) -> BatchLayout:
        """The tokens whose hidden states wait."""
        found = [(chain, self._heard[chain.state.key]) for chain in chains]
        parts = [self.part(chain, one.taken, one.count, shift) for chain, one in found]
        return BatchLayout(parts, self._rooms.block_size)


class DraftHead(Proposer):
    """What a proposer is that follows sequences. tokens: that are kept of at most, of all sequences together."""

    def __init__(self, target: Llama, tokens: int) -> None:
        self._target, self._followed = target, Followed(tokens // BLOCK, BLOCK)

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        self._followed.observe(readings)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._followed.forget(key)

    def _unit(self, x_TX: Floats, norm_X: Floats) -> Floats:
        return unit(x_TX, self._target.epsilon) * norm_X
