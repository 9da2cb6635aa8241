"""Drafts by a small Llama with the target's vocabulary, token by token.

The method is that of Leviathan, Kalman, Matias (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.models.llama.batched_llama import BatchedLlama, compiled
from nucleate.models.llama.numpy_llama import Llama
from nucleate.models.runner import ModelInput
from nucleate.speculative.draft import Draft, DraftContext, Proposer
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder, drafts_of
from nucleate.speculative.proposers.neural.draft_sampling import draw
from nucleate.speculative.proposers.neural.kv_slots import KVSlots
from nucleate.speculative.proposers.neural.weights import Weights

MEMORY = 64 << 20
"""Bytes of KV cache."""
SCALE = 8.0
"""Of the embeddings, as in training."""


@dataclass
class Reader:
    """What the small model has read of a sequence."""

    sure: int = 0  #: tokens of the sequence as of the last draft
    guessed: list[int] = field(default_factory=list)  #: drafted ones after these

    def common(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens have been read; at least the last one has not."""
        if len(token_ids) <= self.sure:
            return 0 if len(token_ids) < self.sure else len(token_ids) - 1
        read = self.sure
        for token in self.guessed:
            if read >= len(token_ids) or token_ids[read] != token:
                break
            read += 1
        return min(read, len(token_ids) - 1)


class DraftModel(Proposer):
    """See ``Proposer``. memory: bytes of KV cache; sequences that do not fit get no drafts for a while."""

    def __init__(self, model: Llama, memory: int = MEMORY) -> None:
        self.runner = BatchedLlama(model, memory)
        self.runner.kernels = compiled()  # the target is read by them too, as soon as it reads a draft
        self._rooms = KVSlots(self.runner.blocks, self.runner.block_size)
        self._readers: dict[int, Reader] = {}

    @classmethod
    def of(cls, weights: Weights, target: Llama) -> DraftModel:
        """The one of these weights."""
        embed, unembed = weights["embed.weight"], weights["unembed.weight"]
        layers, (inner, width) = weights.count("model.layers."), weights["model.layers.0.mlp.gate_proj.weight"].shape
        config = {
            "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": target.head_size,
            "num_attention_heads": weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // target.head_size,
            "num_key_value_heads": weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // target.head_size,
            "rms_norm_eps": float(target.epsilon), "vocab_size": target.vocab_size,
            "max_position_embeddings": target.context_length, "tie_word_embeddings": False,
        }  # fmt: skip
        tensors = weights.beginning("model.") | {
            "model.embed_tokens.weight": target.embedding @ embed.T * SCALE,
            "lm_head.weight": target.embedding @ unembed,
        }
        return cls(Llama.of(config, tensors))

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        chains = [ChainBuilder(state, count) for state, count in zip(states, counts, strict=True)]
        going = [chain for chain in chains if self._begin(chain, states)]
        for chain in going:
            chain.ids = [*chain.state.token_ids]
        starts = [self._readers[chain.state.key].common(chain.ids) for chain in going]
        place = 0
        while going:
            parts = [self._part(chain, start) for chain, start in zip(going, starts, strict=True)]
            drawn = draw(self.runner.forward(parts), [chain.state for chain in going], [place] * len(going))
            going = [chain for chain, one in zip(going, drawn, strict=True) if chain.add(one)]
            starts = [len(chain.ids) for chain in going]
            for chain in going:
                chain.ids.append(chain.tokens[-1])
            place += 1
        for chain in chains:
            if chain.ids:
                reader = self._readers[chain.state.key]
                reader.sure, reader.guessed = len(chain.state.token_ids), chain.tokens[:-1]
        return drafts_of(chains)

    def _part(self, chain: ChainBuilder, start: int) -> ModelInput:
        """All of a sequence and its draft from a place on is read."""
        key = chain.state.key
        return ModelInput(key, chain.ids, start, len(chain.ids), self._rooms.tables[key], 1)

    def _begin(self, chain: ChainBuilder, states: Sequence[DraftContext]) -> bool:
        """Whether there is something to draft, and room for it."""
        state = chain.state
        length = len(state.token_ids)
        chain.count = min(chain.count, self.runner.context_length - length + 1)
        if chain.count < 1 or not length:
            return False
        for key in self._rooms.room(state.key, length + chain.count - 1, [other.key for other in states]):
            self._readers.pop(key, None)
            if key == state.key:
                return False
        self._readers.setdefault(state.key, Reader())
        return True

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._rooms.leave(key)
        self._readers.pop(key, None)
