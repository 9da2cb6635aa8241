"""Drafts by the multi-token prediction (MTP) modules of a model (DeepSeek-V3, arXiv 2412.19437).

The first module predicts the next token from the target's hidden state of a token and the token after it, the second
one from the output of the first one, and so on. After that the last module continues from its own output, as in EAGLE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.models.transformers.mtp_module import MtpModules
from nucleate.speculative.draft import Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.neural.draft_head import CapturedHiddenStates, KVSlots
from nucleate.speculative.neural.draft_sampling import ChainBuilder, build_drafts, sample_tokens

KV_CACHE_BYTES = 256 << 20
"""Default size of the KV cache, in bytes."""


class Mtp(Proposer):
    """See ``Proposer``. memory: size of the KV cache in bytes; sequences that do not fit have no drafts for a while."""

    def __init__(self, modules: MtpModules, memory: int = KV_CACHE_BYTES) -> None:
        self._modules, self.layers = modules, (modules.depth,)
        size = sum(pool.size for pool in modules.new_kv_caches(1))
        if memory < size:
            raise ModelError(f"{memory} bytes of KV cache cannot hold one block of {size} bytes")
        self._pools, self._kv_slots = modules.new_kv_caches(memory // size), KVSlots(memory // size, BLOCK)
        self._captured: dict[int, CapturedHiddenStates] = {}

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. The draft is empty without hidden states of the last tokens."""
        chains = [ChainBuilder(context, count) for context, count in zip(contexts, max_tokens, strict=True)]
        keys = [context.key for context in contexts]
        active = [chain for chain in chains if chain.max_tokens > 0 and self._prepare(chain, keys)]
        if active:
            self._propose_chains(active)
        return build_drafts(chains)

    def _prepare(self, chain: ChainBuilder, keys: list[int]) -> bool:
        """Prepare a sequence. Returns whether all but its last token have hidden states, and the KV cache has space."""
        context, captured = chain.context, self._captured.get(chain.context.key)
        if captured is None or not captured.count or captured.stop != len(context.token_ids) - 1:
            return False
        num_draft_tokens = max(0, chain.max_tokens - self._modules.count)
        for key in self._kv_slots.allocate(context.key, captured.count + num_draft_tokens, keys):
            self._captured.pop(key, None)
        chain.ids = [*context.token_ids]
        return context.key in self._captured

    def _propose_chains(self, active: list[ChainBuilder]) -> None:
        x_RX = self._process_pending(active)
        last, depth = self._modules.count - 1, self._modules.count
        while True:
            rows = [row for row, chain in enumerate(active) if len(chain.tokens) < chain.max_tokens]
            if not rows:
                return
            active = [active[row] for row in rows]
            starts = [self._captured[chain.context.key].count + depth - self._modules.count for chain in active]
            x_RX = self._run(active, last, x_RX[rows], [(start, start + 1) for start in starts])[1]
            self._sample(active, x_RX, depth)
            depth += 1

    def _process_pending(self, active: list[ChainBuilder]) -> Any:
        """Run each module on the pending tokens, and sample. Returns the last module's outputs at the ends [R, X].

        All modules run, even for drafts of fewer tokens, so that their KV caches stay equally long. The last entries of
        all but the first module were computed from draft tokens, and are computed again.
        """
        found = [self._captured[chain.context.key] for chain in active]
        overlap = self._modules.count - 1
        spans = [(max(0, min(one.num_processed - overlap, one.count - 1)), one.count) for one in found]
        hidden_states = [one.states(start) for one, (start, _) in zip(found, spans, strict=True)]
        x_TX = x_RX = self._modules.hidden(self._modules.concatenate(hidden_states))
        for depth in range(self._modules.count):
            x_TX, x_RX = self._run(active, depth, x_TX, spans)
            self._sample(active, x_RX, depth)
        for one in found:
            one.mark_processed(max(1, overlap))
        return x_RX

    def _run(self, active: list[ChainBuilder], depth: int, x_TX: Any, spans: list[tuple[int, int]]) -> tuple[Any, Any]:
        """Run a module on a span of each sequence: all outputs, and the last ones (see ``MtpModules.run``)."""
        keys = [chain.context.key for chain in active]
        starts = [self._captured[key].base for key in keys]
        inputs = [
            ModelInput(key, chain.ids[base + depth + 1 :], *span, self._kv_slots.tables[key], 1)
            for chain, key, base, span in zip(active, keys, starts, spans, strict=True)
        ]
        return self._modules.run(depth, x_TX, inputs, starts, self._pools[depth])

    def _sample(self, active: list[ChainBuilder], x_RX: Any, depth: int) -> None:
        """Sample a token for each sequence, as input of the next module, even if the draft is complete."""
        sampled = sample_tokens(self._modules.logits(x_RX), [chain.context for chain in active], [depth] * len(active))
        for chain, one in zip(active, sampled, strict=True):
            chain.add(one)
            chain.ids.append(max(0, one.token))
            if one.token < 0:
                chain.max_tokens = len(chain.tokens)  # no token can follow

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        for output in outputs:
            new = CapturedHiddenStates(self._modules.copy_states, self._modules.concatenate)
            self._captured.setdefault(output.key, new).add(output)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._captured.pop(key, None)
        self._kv_slots.free_sequence(key)
