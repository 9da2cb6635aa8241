"""A draft model: a small model with the target's vocabulary (arXiv 2211.17192 and 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from nucleate.models.batched_llama import BatchedLlama, compiled
from nucleate.models.numpy_llama import Llama
from nucleate.models.runner import ModelInput, Runner
from nucleate.speculative.neural.draft_head import KVSlots, Weights
from nucleate.speculative.neural.draft_sampling import ChainBuilder, TrainedProposer, sample_tokens

KV_CACHE_BYTES = 64 << 20

EMBEDDING_SCALE = 8.0
"""Factor on the embeddings, as in training."""


@dataclass
class CachedPrefix:
    """The tokens of a sequence in the KV cache of the draft model."""

    num_tokens: int = 0  #: length of the sequence at the last draft
    draft_tokens: list[int] = field(default_factory=list)  #: draft tokens after these

    def num_reusable(self, token_ids: Sequence[int]) -> int:
        """The number of tokens with valid KV cache entries, at most all but the last one."""
        if len(token_ids) <= self.num_tokens:
            return 0 if len(token_ids) < self.num_tokens else len(token_ids) - 1
        count = self.num_tokens
        for token in self.draft_tokens:
            if count >= len(token_ids) or token_ids[count] != token:
                break
            count += 1
        return min(count, len(token_ids) - 1)


class DraftModel(TrainedProposer):
    """See ``Proposer``. runner: of the draft model; sequences that do not fit in it have no drafts for a while."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._kv_slots = KVSlots(self.runner.blocks, self.runner.block_size)
        self._prefixes: dict[int, CachedPrefix] = {}

    @classmethod
    def of(cls, weights: Weights, target: Llama) -> DraftModel:
        """Build the draft model from its weights and the target's embeddings."""
        embed, unembed = weights["embed.weight"], weights["unembed.weight"]
        layers, (inner, width) = weights.count("model.layers."), weights["model.layers.0.mlp.gate_proj.weight"].shape
        config = {
            "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": target.head_size,
            "num_attention_heads": weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // target.head_size,
            "num_key_value_heads": weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // target.head_size,
            "rms_norm_eps": float(target.epsilon), "vocab_size": target.vocab_size,
            "max_position_embeddings": target.context_length, "tie_word_embeddings": False,
        }  # fmt: skip
        tensors = weights.with_prefix("model.") | {
            "model.embed_tokens.weight": target.embedding @ embed.T * EMBEDDING_SCALE,
            "lm_head.weight": target.embedding @ unembed,
        }
        return cls.of_llama(Llama.of(config, tensors))

    @classmethod
    def of_llama(cls, model: Llama, memory: int = KV_CACHE_BYTES) -> DraftModel:
        """A NumPy Llama as a draft model. memory: size of the KV cache in bytes."""
        runner = BatchedLlama(model, memory)
        runner.kernels = compiled()  # as for the target, which needs them to verify drafts
        return cls(runner)

    def _prepare(self, chain: ChainBuilder, keys: Sequence[int]) -> bool:
        """Whether the sequence is shorter than the context, and the KV cache has space."""
        key, length = chain.context.key, len(chain.context.token_ids)
        chain.max_tokens = min(chain.max_tokens, self.runner.context_length - length + 1)
        if chain.max_tokens < 1 or not length:
            return False
        evicted = self._kv_slots.allocate(key, length + chain.max_tokens - 1, keys)
        for one in evicted:
            self._prefixes.pop(one, None)
        return key not in evicted

    def _draft(self, active: list[ChainBuilder]) -> None:
        prefixes = [self._prefixes.setdefault(chain.context.key, CachedPrefix()) for chain in active]
        for chain in active:
            chain.ids = [*chain.context.token_ids]
        starts = [prefix.num_reusable(chain.ids) for chain, prefix in zip(active, prefixes, strict=True)]
        left = active
        for depth in count():
            inputs = [
                ModelInput(key := chain.context.key, chain.ids, start, len(chain.ids), self._kv_slots.tables[key], 1)
                for chain, start in zip(left, starts, strict=True)
            ]
            logits_RV = self.runner.forward(inputs)
            if hasattr(logits_RV, "cpu"):  # a tensor
                logits_RV = logits_RV.cpu().numpy()
            sampled = sample_tokens(logits_RV, [chain.context for chain in left], [depth] * len(left))
            left = [chain for chain, one in zip(left, sampled, strict=True) if chain.add(one)]
            if not left:
                break
            starts = [len(chain.ids) for chain in left]
            for chain in left:
                chain.ids.append(chain.tokens[-1])
        for chain, prefix in zip(active, prefixes, strict=True):
            prefix.num_tokens, prefix.draft_tokens = len(chain.context.token_ids), chain.tokens[:-1]

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self._kv_slots.free_sequence(key)
        self._prefixes.pop(key, None)
