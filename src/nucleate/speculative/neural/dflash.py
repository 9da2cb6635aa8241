"""A draft head that predicts a block of tokens at once: DFlash (Chen, Liang, Liu, arXiv 2602.06036).

The block is the last token followed by mask tokens. Its positions attend to each other and to the target's hidden
states of all earlier tokens, and are predicted independently.
"""

from __future__ import annotations

import numpy as np

from nucleate.models.cpu_operations import attend_sequence, one_thread, store
from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.paged_cache import BatchLayout
from nucleate.models.runner import BLOCK
from nucleate.speculative.neural.draft_head import (
    MAX_CACHED_TOKENS,
    DraftHead,
    DraftLayer,
    Weights,
    fuse_hidden_states,
    rms_normalize,
)
from nucleate.speculative.neural.draft_sampling import ChainBuilder, add_blocks


class DFlash(DraftHead):
    """See ``Proposer``; it drafts at most four tokens. tokens: KV cache size, for all sequences together."""

    layers: tuple[int, ...] = (2, 4, 6)

    def __init__(self, weights: Weights, target: Llama, tokens: int = MAX_CACHED_TOKENS) -> None:
        super().__init__(tokens // BLOCK)
        self._target = target
        self._fuse, self._mask_tokens = weights.matrix("fuse"), weights["empty"]
        self._limit = len(self._mask_tokens)
        self._context_norm, self._norm = weights["context_norm.weight"], weights["norm.weight"]
        count = range(weights.count("norms."))
        self._norms = [weights[f"norms.{i}.weight"] for i in count]
        self._layers = [DraftLayer(weights, f"layers.{i}.", target, tokens // BLOCK) for i in count]

    def _num_cached(self, max_tokens: int) -> int:
        return 1 + len(self._mask_tokens)

    def _draft(self, active: list[ChainBuilder]) -> None:
        for chain in active:
            chain.ids += [0] * len(self._mask_tokens)
        with one_thread():
            self._process_pending(active)
            self._draft_block(active)

    def _process_pending(self, active: list[ChainBuilder]) -> None:
        """Write the KV cache entries of the pending hidden states."""
        target, found = self._target, [self._states(chain) for chain in active]
        pending = [(chain, one) for chain, one in zip(active, found, strict=True) if one.num_processed < one.count]
        if not pending:
            return
        layout = self._pending_layout([chain for chain, _ in pending])
        hidden_TF = np.concatenate([one.states(one.num_processed) for _, one in pending])
        fused_TX = fuse_hidden_states(hidden_TF, target.hidden_size, target.epsilon, self._fuse)
        context_TX = rms_normalize(fused_TX, target.epsilon) * self._context_norm
        rotary = target.rotation(layout.positions_T)
        for layer in self._layers:
            store(layer.pool, layout, *layer.key_value(context_TX, rotary))
        for _, one in pending:
            one.mark_processed()

    def _draft_block(self, active: list[ChainBuilder]) -> None:
        target, block_size = self._target, len(self._mask_tokens)
        starts = [self._states(chain).num_processed for chain in active]
        pairs = zip(active, starts, strict=True)
        inputs = [self._model_input(chain, start, start + 1 + block_size) for chain, start in pairs]
        layout = BatchLayout(inputs, BLOCK)
        rotary = target.rotation(layout.positions_T)
        first_RX = rms_normalize(target.embedding[layout.ids_T[:: 1 + block_size]], target.epsilon)
        x_TX = np.concatenate([np.concatenate([first_X[None], self._mask_tokens]) for first_X in first_RX])
        for layer, norm_X in zip(self._layers, self._norms, strict=True):
            normal_TX = rms_normalize(x_TX, target.epsilon) * norm_X
            x_TX = layer.output(x_TX, self._attend(layer, normal_TX, rotary, layout))
        x_RMX = x_TX.reshape(len(active), 1 + block_size, -1)[:, 1 : 1 + max(chain.max_tokens for chain in active)]
        depth = x_RMX.shape[1]
        normal_NX = rms_normalize(x_RMX.reshape(-1, x_RMX.shape[2]), target.epsilon) * self._norm
        add_blocks(active, product(normal_NX, target.unembedding), depth)

    def _attend(
        self, layer: DraftLayer, normal_TX: Floats, rotary: tuple[Floats, Floats], layout: BatchLayout
    ) -> Floats:
        """Attention [T, heads, head size] over the whole block and all earlier tokens."""
        query_THD = layer.query(normal_TX, rotary)
        store(layer.pool, layout, *layer.key_value(normal_TX, rotary))
        out_THD = np.empty_like(query_THD)
        for first, start, stop, table in layout.inputs.tolist():
            blocks = layout.blocks[table : table + -(-stop // layout.block_size)]
            tokens = slice(first, first + stop - start)
            out_THD[tokens] = attend_sequence(query_THD[tokens], layer.pool, blocks, stop, layer.rule.scaling)
        return out_THD
