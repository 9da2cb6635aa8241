"""Heads that guess the tokens after the next one from the target's last hidden state: Medusa (arXiv 2401.10774).

Each is some residual blocks before the target's own unembedding. None knows which token was drawn meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.matmul import compiled_matmul as product
from nucleate.models.matmul import one_thread
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder, drafts_of
from nucleate.speculative.proposers.neural.draft_sampling import DraftQuery, SampledDrafts, draw, draw_some
from nucleate.speculative.proposers.neural.weights import Weights
from nucleate.speculative.tree import Node, Offer, best_first, keep

CHANCES = (
    (0.525, 0.149, 0.068, 0.053, 0.025, 0.021, 0.014, 0.012),
    (0.410, 0.109, 0.056, 0.044, 0.034, 0.029, 0.021, 0.019),
    (0.304, 0.103, 0.059, 0.046, 0.035, 0.033, 0.023, 0.020),
    (0.221, 0.088, 0.070, 0.050, 0.046, 0.030, 0.028, 0.024),
)
"""How often the best token of each head, its second and so on were right, on 12 texts of 100 tokens at temperature 0.

A tree is made of the likeliest of their combinations, the same for all texts: its form says nothing of what was drawn.
"""

MOST = 64
"""Tokens of a tree."""


class Medusa(Proposer):
    """See ``Proposer``; it drafts as many tokens one after the other at most as there are heads.

    tree_width: the most that follow the same token. Heads do not know what was drawn before: in all branches they guess
    the same.
    """

    layers: tuple[int, ...] = (6,)

    def __init__(self, weights: Weights, target: Llama, tree_width: int = 1) -> None:
        self._target, self.tree_width = target, tree_width
        self._heads = [
            [weights.matrix(f"heads.{head}.{block}") for block in range(weights.count(f"heads.{head}."))]
            for head in range(weights.count("heads."))
        ]
        self._last: dict[int, tuple[int, Floats]] = {}  # the place of the last token that was read, and its state

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. None for a sequence of which the target has not read all but the last token."""
        most = len(self._heads) if self.tree_width == 1 else MOST
        chains = [ChainBuilder(state, min(count, most)) for state, count in zip(states, counts, strict=True)]
        going = [
            chain
            for chain in chains
            if chain.count > 0 and self._last.get(chain.state.key, (-1,))[0] == len(chain.state.token_ids) - 2
        ]
        if not going:
            return [Draft()] * len(chains)
        with one_thread():
            if self.tree_width > 1:
                trees = self._trees(going)
                return [trees.get(chain.state.key, Draft()) for chain in chains]
            self._draft(going)
        return drafts_of(chains)

    def _trees(self, going: list[ChainBuilder]) -> dict[int, Draft]:
        """By sequence: at each place some guesses, as they would be after any of those before, put together."""
        forms = [form(chain.count, self.tree_width, len(self._heads)) for chain in going]
        deep = max(depth for _, depths in forms for depth in depths) + 1
        asked = [
            DraftQuery(chain.state, depth, depth * self.tree_width, self.tree_width)
            for chain in going
            for depth in range(deep)
        ]
        found = draw_some(self._logits(going, deep), asked)
        return {
            chain.state.key: put_together(*made, found[row * deep : (row + 1) * deep])
            for row, (chain, made) in enumerate(zip(going, forms, strict=True))
        }

    def _draft(self, going: list[ChainBuilder]) -> None:
        count = max(chain.count for chain in going)
        logits_NV = self._logits(going, count)
        drawn = draw(logits_NV, [chain.state for chain in going for _ in range(count)], [*range(count)] * len(going))
        for row, chain in enumerate(going):
            for one in drawn[row * count : (row + 1) * count]:
                if not chain.add(one):
                    break

    def _logits(self, going: list[ChainBuilder], count: int) -> Floats:
        """Those of the first heads, [R * count, V]."""
        target = self._target
        x_RX = target.normalise(np.stack([self._last[chain.state.key][1] for chain in going]), target.norm)
        guesses = []
        for head in self._heads[:count]:
            y_RX = x_RX
            for block in head:
                z_RX = product(y_RX, block)
                with np.errstate(over="ignore"):  # exp(-z) = inf is right
                    y_RX = y_RX + z_RX / (1 + np.exp(-z_RX))
            guesses.append(y_RX)
        return product(np.stack(guesses, axis=1).reshape(len(going) * count, -1), target.unembedding)

    def read(self, readings: Sequence[TargetOutput]) -> None:
        """See ``Proposer.read``. Only the last token counts."""
        for read in readings:
            if len(read.features_TF):
                self._last[read.key] = read.start + len(read.features_TF) - 1, read.features_TF[-1].copy()

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._last.pop(key, None)


@functools.cache
def form(count: int, tree_width: int, heads: int) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The likeliest combinations of guesses, which are the tokens of these nodes, and their depths."""

    def offers(state: None, depth: int) -> list[Offer]:
        chances = CHANCES[depth][:tree_width] if depth < min(heads, len(CHANCES)) else ()
        return [Offer(guess, chance) for guess, chance in enumerate(chances)]

    nodes = tuple(best_first(offers, None, count))
    draft = Draft(tuple(node.token for node in nodes), tuple(node.parent for node in nodes))
    return nodes, tuple(draft.depths())


def put_together(nodes: Sequence[Node], depths: Sequence[int], found: Sequence[Sequence[SampledDrafts]]) -> Draft:
    """A draft of this form. Where there are fewer guesses than it has, those that are not there are left out.

    Branches have the same draws at a depth. Verification comes to one of them at most, so that a draw decides once.
    """
    kept = {ROOT: True}
    for place, (node, depth) in enumerate(zip(nodes, depths, strict=True)):
        kept[place] = kept[node.parent] and node.token < len(found[depth])
    places = [place for place in range(len(nodes)) if kept[place]]
    named = [
        found[depths[place]][nodes[place].token] if kept[place] else SampledDrafts(0, None, 0.0)
        for place in range(len(nodes))
    ]
    sampled = any(one.distribution is not None for one in named)
    distributions = tuple(one.distribution for one in named) if sampled else None
    return keep(Draft(tuple(one.token for one in named), tuple(node.parent for node in nodes), distributions), places)
