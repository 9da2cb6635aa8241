"""A head that fills a block of tokens at once: DFlash (Chen, Liang, Liu, arXiv 2602.06036).

The last token and some empty places see each other, and what the target made of all tokens before them. Each place is
guessed without knowing what the others become.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.matmul import compiled_matmul as product
from nucleate.models.matmul import one_thread
from nucleate.models.paged.attention import attend_sequence, store
from nucleate.models.paged.batch_layout import BatchLayout
from nucleate.models.runner import BLOCK
from nucleate.speculative.draft import Draft, DraftContext
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder, drafts_of
from nucleate.speculative.proposers.neural.draft_sampling import draw
from nucleate.speculative.proposers.neural.head_state import DraftHead
from nucleate.speculative.proposers.neural.layer import TOKENS, DraftLayer, fused, rotation, unit
from nucleate.speculative.proposers.neural.weights import Weights


class DFlash(DraftHead):
    """See ``Proposer``; it drafts four tokens at most. tokens: that keys and values are kept of, of all sequences."""

    layers: tuple[int, ...] = (2, 4, 6)

    def __init__(self, weights: Weights, target: Llama, tokens: int = TOKENS) -> None:
        super().__init__(target, tokens)
        self._fuse, self._empty = weights.matrix("fuse"), weights["empty"]
        self._context_norm, self._norm = weights["context_norm.weight"], weights["norm.weight"]
        count = range(weights.count("norms."))
        self._norms = [weights[f"norms.{i}.weight"] for i in count]
        self._layers = [DraftLayer(weights, f"layers.{i}.", target, tokens // BLOCK) for i in count]

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. None for a sequence whose last tokens' hidden states are not known."""
        most = len(self._empty)
        chains = [ChainBuilder(state, min(count, most)) for state, count in zip(states, counts, strict=True)]
        going = self._followed.ready(chains, 1 + most)
        if going:
            for chain in going:
                chain.ids = [*chain.state.token_ids, *[0] * most]
            with one_thread():
                self._take_in(going)
                self._fill(going)
        return drafts_of(chains)

    def _take_in(self, going: list[ChainBuilder]) -> None:
        """Keep what the layers attend to of the hidden states that wait."""
        target, found = self._target, [self._followed.heard(chain) for chain in going]
        late = [(chain, one) for chain, one in zip(going, found, strict=True) if one.taken < one.count]
        if not late:
            return
        packing = self._followed.waiting([chain for chain, _ in late])
        hidden_TF = np.concatenate([one.states(one.taken) for _, one in late])
        context_TX = self._unit(fused(hidden_TF, target.hidden_size, target.epsilon, self._fuse), self._context_norm)
        turn = rotation(packing.positions_T, target)
        for layer in self._layers:
            store(layer.pool, packing, *layer.keys(context_TX, turn))
        for _, one in late:
            one.take()

    def _fill(self, going: list[ChainBuilder]) -> None:
        target, most = self._target, len(self._empty)
        taken = [self._followed.heard(chain).taken for chain in going]
        parts = [self._followed.part(chain, at, at + 1 + most) for chain, at in zip(going, taken, strict=True)]
        packing = BatchLayout(parts, BLOCK)
        turn = rotation(packing.positions_T, target)
        first_RX = unit(target.embedding[packing.ids_T[:: 1 + most]], target.epsilon)
        x_TX = np.concatenate([np.concatenate([first_X[None], self._empty]) for first_X in first_RX])
        for layer, norm_X in zip(self._layers, self._norms, strict=True):
            x_TX = layer.rest(x_TX, self._attend(layer, self._unit(x_TX, norm_X), turn, packing))
        x_RMX = x_TX.reshape(len(going), 1 + most, -1)[:, 1 : 1 + max(chain.count for chain in going)]
        width = x_RMX.shape[1]
        logits_RMV = product(self._unit(x_RMX.reshape(-1, x_RMX.shape[2]), self._norm), target.unembedding)
        states = [chain.state for chain in going for _ in range(width)]
        drawn = draw(logits_RMV, states, [*range(width)] * len(going))
        for row, chain in enumerate(going):
            for one in drawn[row * width : (row + 1) * width]:
                if not chain.add(one):
                    break

    def _attend(
        self, layer: DraftLayer, normal_TX: Floats, turn: tuple[Floats, Floats], packing: BatchLayout
    ) -> Floats:
        """[T, heads, size]: each of a block over all of it, and over what the target has read."""
        query_THD = layer.queries(normal_TX, turn)
        store(layer.pool, packing, *layer.keys(normal_TX, turn))
        out_THD = np.empty_like(query_THD)
        for first, start, stop, table in packing.inputs.tolist():
            blocks = packing.blocks[table : table + -(-stop // packing.block_size)]
            tokens = slice(first, first + stop - start)
            out_THD[tokens] = attend_sequence(query_THD[tokens], layer.pool, blocks, stop, layer.rule.scaling)
        return out_THD
