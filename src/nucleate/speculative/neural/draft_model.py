"""A draft model: a small model with the target's vocabulary (arXiv 2211.17192 and 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nucleate.models.batched_llama import BatchedLlama, compiled
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.runner import ModelInput, Runner
from nucleate.speculative.draft import Draft, DraftContext, Proposer
from nucleate.speculative.neural.draft_head import KVSlots, Weights
from nucleate.speculative.neural.draft_sampling import ChainBuilder, build_drafts, sample_tokens

KV_CACHE_BYTES = 64 << 20
"""Default size of the KV cache, in bytes."""

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


class DraftModel(Proposer):
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

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        chains = [ChainBuilder(context, count) for context, count in zip(contexts, max_tokens, strict=True)]
        active = [chain for chain in chains if self._prepare(chain, contexts)]
        for chain in active:
            chain.ids = [*chain.context.token_ids]
        starts = [self._prefixes[chain.context.key].num_reusable(chain.ids) for chain in active]
        depth = 0
        while active:
            inputs = [self._model_input(chain, start) for chain, start in zip(active, starts, strict=True)]
            logits_RV = to_numpy(self.runner.forward(inputs))
            sampled = sample_tokens(logits_RV, [chain.context for chain in active], [depth] * len(active))
            active = [chain for chain, one in zip(active, sampled, strict=True) if chain.add(one)]
            starts = [len(chain.ids) for chain in active]
            for chain in active:
                chain.ids.append(chain.tokens[-1])
            depth += 1
        for chain in chains:
            if chain.ids:
                prefix = self._prefixes[chain.context.key]
                prefix.num_tokens, prefix.draft_tokens = len(chain.context.token_ids), chain.tokens[:-1]
        return build_drafts(chains)

    def _model_input(self, chain: ChainBuilder, start: int) -> ModelInput:
        """The model input for a sequence and its draft from ``start`` on."""
        key = chain.context.key
        return ModelInput(key, chain.ids, start, len(chain.ids), self._kv_slots.tables[key], 1)

    def _prepare(self, chain: ChainBuilder, contexts: Sequence[DraftContext]) -> bool:
        """Prepare a sequence. Returns whether it can have a draft, and the KV cache has space."""
        context = chain.context
        length = len(context.token_ids)
        chain.max_tokens = min(chain.max_tokens, self.runner.context_length - length + 1)
        if chain.max_tokens < 1 or not length:
            return False
        keys = [other.key for other in contexts]
        for key in self._kv_slots.allocate(context.key, length + chain.max_tokens - 1, keys):
            self._prefixes.pop(key, None)
            if key == context.key:
                return False
        self._prefixes.setdefault(context.key, CachedPrefix())
        return True

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._kv_slots.free_sequence(key)
        self._prefixes.pop(key, None)


def to_numpy(logits_RV: Any) -> Floats:
    """Logits as an array; those of a model on a GPU are a tensor."""
    return np.asarray(logits_RV.cpu() if hasattr(logits_RV, "cpu") else logits_RV, np.float32)
