"""Drafts by the multi-token prediction (MTP) modules of a model (DeepSeek-V3, arXiv 2412.19437).

The first module predicts the next token from the target's hidden state of a token and the token after it, the second
one from the output of the first one, and so on. After that the last module continues from its own output, as in EAGLE.
"""

from __future__ import annotations

from typing import Any

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.mtp_module import MtpModules
from nucleate.speculative.neural.draft_head import DraftHead
from nucleate.speculative.neural.draft_sampling import ChainBuilder, sample_tokens

KV_CACHE_BYTES = 256 << 20


class Mtp(DraftHead):
    """See ``Proposer``. memory: size of the KV cache in bytes; sequences that do not fit have no drafts for a while."""

    def __init__(self, modules: MtpModules, memory: int = KV_CACHE_BYTES) -> None:
        self._modules, self.layers = modules, (modules.depth,)
        size = sum(pool.size for pool in modules.new_kv_caches(1))
        if memory < size:
            raise ModelError(f"{memory} bytes of KV cache cannot hold one block of {size} bytes")
        super().__init__(memory // size, modules.copy_states, modules.concatenate)
        self._pools = modules.new_kv_caches(memory // size)

    def _num_cached(self, max_tokens: int) -> int:
        return max(0, max_tokens - self._modules.count)

    def _draft(self, active: list[ChainBuilder]) -> None:
        x_RX = self._process_pending(active)
        last, depth = self._modules.count - 1, self._modules.count
        while True:
            rows = [row for row, chain in enumerate(active) if len(chain.tokens) < chain.max_tokens]
            if not rows:
                return
            active = [active[row] for row in rows]
            starts = [self._states(chain).count + depth - self._modules.count for chain in active]
            x_RX = self._run(active, last, x_RX[rows], [(start, start + 1) for start in starts])[1]
            self._sample(active, x_RX, depth)
            depth += 1

    def _process_pending(self, active: list[ChainBuilder]) -> Any:
        """Run each module on the pending tokens, and sample. Returns the last module's outputs at the ends [R, X].

        All modules run, even for drafts of fewer tokens, so that their KV caches stay equally long. The last entries of
        all but the first module were computed from draft tokens, and are computed again.
        """
        found = [self._states(chain) for chain in active]
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
        inputs = [self._model_input(chain, *span, depth + 1) for chain, span in zip(active, spans, strict=True)]
        bases = [self._states(chain).base for chain in active]
        return self._modules.run(depth, x_TX, inputs, bases, self._pools[depth])

    def _sample(self, active: list[ChainBuilder], x_RX: Any, depth: int) -> None:
        """Sample a token for each sequence, as input of the next module, even if the draft is complete."""
        sampled = sample_tokens(self._modules.logits(x_RX), [chain.context for chain in active], [depth] * len(active))
        for chain, one in zip(active, sampled, strict=True):
            chain.add(one)
            chain.ids.append(max(0, one.token))
            if one.token < 0:
                chain.max_tokens = len(chain.tokens)  # no token can follow
