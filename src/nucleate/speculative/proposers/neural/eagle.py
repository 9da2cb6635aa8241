"""EAGLE-3 drafts: a head that continues the target's hidden states (Li et al., arXiv 2503.01840).

From what the target made of a token and the token after it, one layer guesses what follows; where the target has not
been yet, the layer's own output stands for its hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.matmul import compiled_matmul as product
from nucleate.models.matmul import one_thread
from nucleate.models.paged.attention import attend_compiled, store
from nucleate.models.paged.batch_layout import BatchLayout
from nucleate.models.runner import BLOCK
from nucleate.speculative.draft import ROOT, Draft, DraftContext
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder, drafts_of
from nucleate.speculative.proposers.neural.draft_sampling import draw, draw_some
from nucleate.speculative.proposers.neural.head_state import DraftHead
from nucleate.speculative.proposers.neural.layer import TOKENS, DraftLayer, fused, rotation
from nucleate.speculative.proposers.neural.tree_builder import TreeBuilder
from nucleate.speculative.proposers.neural.weights import Weights


class Eagle(DraftHead):
    """See ``Proposer``. tree_width: the most tokens that follow the same one; with 1, drafts are chains.

    tokens: that keys and values are kept of at most, of all sequences together.
    """

    layers: tuple[int, ...] = (2, 4, 6)

    def __init__(self, weights: Weights, target: Llama, tree_width: int = 1, tokens: int = TOKENS) -> None:
        super().__init__(target, tokens)
        self.tree_width = tree_width
        self._fuse = weights.matrix("fuse")
        self._token_norm, self._hidden_norm = weights["token_norm.weight"], weights["hidden_norm.weight"]
        self._norm, self._layer = weights["norm.weight"], DraftLayer(weights, "layer.", target, tokens // BLOCK)

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. None for a sequence whose last tokens' hidden states are not known."""
        chains = [ChainBuilder(state, count) for state, count in zip(states, counts, strict=True)]
        going = self._followed.ready(chains)
        with one_thread():
            if self.tree_width > 1:
                trees = self._trees(going) if going else {}
                return [trees.get(chain.state.key, Draft()) for chain in chains]
            if going:
                self._draft(going)
        return drafts_of(chains)

    def _trees(self, going: list[ChainBuilder]) -> dict[int, Draft]:
        """By sequence, see ``TreeBuilder``: in each round the head goes on from some tokens of each tree."""
        for chain in going:
            chain.ids = [*chain.state.token_ids]
        growing = [TreeBuilder(chain, self.tree_width) for chain in going]
        round_, x_RX = [(growth, ROOT) for growth in growing], self._take_in(going)
        while round_:
            logits_RV = product(self._unit(x_RX, self._norm), self._target.unembedding)
            found = draw_some(logits_RV, [growth.asked(place) for growth, place in round_])
            for (growth, place), siblings, x_X in zip(round_, found, x_RX, strict=True):
                growth.take(place, siblings, x_X)
            round_ = [(growth, place) for growth in growing for place in growth.next()]
            if round_:
                x_RX = self._look(round_)
        return {growth.chain.state.key: growth.draft() for growth in growing}

    def _look(self, round_: list[tuple[TreeBuilder, int]]) -> Floats:
        """Its output after some tokens of trees. Those of a tree stand together: they are the last it has looked at."""
        parts = []
        for growth, group in groupby(round_, lambda one: one[0]):
            places, chain = [place for _, place in group], growth.chain
            chain.ids += [chain.tokens[place] for place in places]
            stop = self._followed.heard(chain).taken + len(growth.looked)
            part = self._followed.part(chain, stop - len(places), stop, 1)
            parts.append(part._replace(num_logits=len(places), parents=growth.lines()))
        packing = BatchLayout(parts, BLOCK)
        x_RX = np.stack([growth.outputs[growth.parents[place]] for growth, place in round_])
        return self._mixed(self._both(packing, x_RX), x_RX, packing)

    def _draft(self, going: list[ChainBuilder]) -> None:
        for chain in going:
            chain.ids = [*chain.state.token_ids]
        x_RX = self._take_in(going)
        place = 0
        while True:
            logits_RV = product(self._unit(x_RX, self._norm), self._target.unembedding)
            drawn = draw(logits_RV, [chain.state for chain in going], [place] * len(going))
            stays = np.array([chain.add(one) for chain, one in zip(going, drawn, strict=True)])
            going = [chain for chain, stay in zip(going, stays, strict=True) if stay]
            if not going:
                return
            for chain in going:
                chain.ids.append(chain.tokens[-1])
            x_RX = self._step(going, x_RX[stays], place)
            place += 1

    def _take_in(self, going: list[ChainBuilder]) -> Floats:
        """Keep what the head makes of the hidden states that wait; its output after the last token of each sequence."""
        followed, target = self._followed, self._target
        found = [followed.heard(chain) for chain in going]
        for one in found:
            one.taken = min(one.taken, one.count - 1)  # the last one once more, if none waits
        context_TX = fused(
            np.concatenate([one.states(one.taken) for one in found]), target.hidden_size, target.epsilon, self._fuse
        )
        packing = followed.waiting(going, shift=1)
        both_TY = self._both(packing, context_TX)
        store(self._layer.pool, packing, *self._layer.keys(both_TY, rotation(packing.positions_T, target)))
        for one in found:
            one.take()
        last = BatchLayout(
            [followed.part(chain, one.taken - 1, one.taken, 1) for chain, one in zip(going, found, strict=True)], BLOCK
        )
        return self._mixed(both_TY[packing.logits_indices], context_TX[packing.logits_indices], last)

    def _step(self, going: list[ChainBuilder], x_RX: Floats, place: int) -> Floats:
        """Its output after a drafted token."""
        taken = [self._followed.heard(chain).taken + place for chain in going]
        packing = BatchLayout(
            [self._followed.part(chain, at, at + 1, 1) for chain, at in zip(going, taken, strict=True)], BLOCK
        )
        return self._mixed(self._both(packing, x_RX), x_RX, packing)

    def _both(self, packing: BatchLayout, x_TX: Floats) -> Floats:
        """Tokens beside hidden states, [T, 2 * width]."""
        tokens_TX = self._unit(self._target.embedding[packing.ids_T], self._token_norm)
        return np.concatenate([tokens_TX, self._unit(x_TX, self._hidden_norm)], axis=1)

    def _mixed(self, both_TY: Floats, x_TX: Floats, packing: BatchLayout) -> Floats:
        turn, layer = rotation(packing.positions_T, self._target), self._layer
        new = layer.queries(both_TY, turn), *layer.keys(both_TY, turn)
        heads_THD = attend_compiled(*new, layer.pool, packing, layer.rule)
        return layer.rest(x_TX, heads_THD)
