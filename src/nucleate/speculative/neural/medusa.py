"""Medusa heads (arXiv 2401.10774): each predicts one of the tokens after the next one from the target's hidden state.

A head is a few residual blocks before the target's unembedding. Its prediction does not depend on the tokens between.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.cpu_operations import one_thread
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.speculative.draft import (
    ROOT,
    Candidate,
    Draft,
    DraftContext,
    Node,
    Proposer,
    TargetOutput,
    best_first,
    select_nodes,
)
from nucleate.speculative.neural.draft_head import Weights
from nucleate.speculative.neural.draft_sampling import (
    ChainBuilder,
    SampledToken,
    SiblingRequest,
    build_drafts,
    sample_siblings,
    sample_tokens,
)

HEAD_ACCURACY = (
    (0.525, 0.149, 0.068, 0.053, 0.025, 0.021, 0.014, 0.012),
    (0.410, 0.109, 0.056, 0.044, 0.034, 0.029, 0.021, 0.019),
    (0.304, 0.103, 0.059, 0.046, 0.035, 0.033, 0.023, 0.020),
    (0.221, 0.088, 0.070, 0.050, 0.046, 0.030, 0.028, 0.024),
)
"""Accuracy of the best token of each head, of its second best and so on: 12 texts of 100 tokens at temperature 0.

Trees consist of the most likely combinations. Their structure is fixed, so that it does not depend on sampled tokens.
"""

MAX_TREE_TOKENS = 64
"""Maximum number of tokens of a tree."""


class Medusa(Proposer):
    """See ``Proposer``. The maximum depth of a draft is the number of heads.

    tree_width: maximum number of children of a node; all nodes of a depth have the same candidates as children.
    """

    layers: tuple[int, ...] = (6,)

    def __init__(self, weights: Weights, target: Llama, tree_width: int = 1) -> None:
        self._target, self.tree_width = target, tree_width
        self._heads = [
            [weights.matrix(f"heads.{head}.{block}") for block in range(weights.count(f"heads.{head}."))]
            for head in range(weights.count("heads."))
        ]
        self._last: dict[int, tuple[int, Floats]] = {}  # position and hidden state of the last token of each sequence

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. The draft is empty without the hidden state of the last but one token."""
        limit = len(self._heads) if self.tree_width == 1 else MAX_TREE_TOKENS
        chains = [ChainBuilder(context, min(count, limit)) for context, count in zip(contexts, max_tokens, strict=True)]
        active = [
            chain
            for chain in chains
            if chain.max_tokens > 0 and self._last.get(chain.context.key, (-1,))[0] == len(chain.context.token_ids) - 2
        ]
        if not active:
            return [Draft()] * len(chains)
        with one_thread():
            if self.tree_width > 1:
                trees = self._propose_trees(active)
                return [trees.get(chain.context.key, Draft()) for chain in chains]
            self._propose_chains(active)
        return build_drafts(chains)

    def _propose_trees(self, active: list[ChainBuilder]) -> dict[int, Draft]:
        """Draft trees, by sequence: combinations of the siblings sampled from each head."""
        structures = [tree_structure(chain.max_tokens, self.tree_width, len(self._heads)) for chain in active]
        max_depth = max(depth for _, depths in structures for depth in depths) + 1
        requests = [
            SiblingRequest(chain.context, depth, depth * self.tree_width, self.tree_width)
            for chain in active
            for depth in range(max_depth)
        ]
        found = sample_siblings(self._logits(active, max_depth), requests)
        return {
            chain.context.key: fill_tree(*structure, found[row * max_depth : (row + 1) * max_depth])
            for row, (chain, structure) in enumerate(zip(active, structures, strict=True))
        }

    def _propose_chains(self, active: list[ChainBuilder]) -> None:
        count = max(chain.max_tokens for chain in active)
        logits_NV = self._logits(active, count)
        contexts = [chain.context for chain in active for _ in range(count)]
        sampled = sample_tokens(logits_NV, contexts, [*range(count)] * len(active))
        for row, chain in enumerate(active):
            for one in sampled[row * count : (row + 1) * count]:
                if not chain.add(one):
                    break

    def _logits(self, active: list[ChainBuilder], count: int) -> Floats:
        """The logits of the first ``count`` heads, [R * count, V]."""
        target = self._target
        x_RX = target.normalise(np.stack([self._last[chain.context.key][1] for chain in active]), target.norm)
        outputs = []
        for head in self._heads[:count]:
            y_RX = x_RX
            for block in head:
                z_RX = product(y_RX, block)
                with np.errstate(over="ignore"):  # exp(-z) = inf is right
                    y_RX = y_RX + z_RX / (1 + np.exp(-z_RX))
            outputs.append(y_RX)
        return product(np.stack(outputs, axis=1).reshape(len(active) * count, -1), target.unembedding)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``. Only the last hidden state is stored."""
        for output in outputs:
            states_TF = output.hidden_states_TF
            if len(states_TF):
                self._last[output.key] = output.start + len(states_TF) - 1, states_TF[-1].copy()

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._last.pop(key, None)


@functools.cache
def tree_structure(count: int, tree_width: int, heads: int) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The ``count`` most likely nodes, whose tokens are ranks among the candidates of a head, and their depths."""

    def candidates(state: None, depth: int) -> list[Candidate]:
        accuracies = HEAD_ACCURACY[depth][:tree_width] if depth < min(heads, len(HEAD_ACCURACY)) else ()
        return [Candidate(rank, accuracy) for rank, accuracy in enumerate(accuracies)]

    nodes = tuple(best_first(candidates, None, count))
    draft = Draft(tuple(node.token for node in nodes), tuple(node.parent for node in nodes))
    return nodes, tuple(draft.depths())


def fill_tree(nodes: Sequence[Node], depths: Sequence[int], found: Sequence[Sequence[SampledToken]]) -> Draft:
    """A draft of this structure. found: the sampled siblings of each depth; nodes beyond them are left out.

    All branches share the samples of a depth. This is exact, because verification reaches at most one branch per depth.
    """
    included = {ROOT: True}
    for index, (node, depth) in enumerate(zip(nodes, depths, strict=True)):
        included[index] = included[node.parent] and node.token < len(found[depth])
    indices = [index for index in range(len(nodes)) if included[index]]
    tokens = [
        found[depths[index]][nodes[index].token] if included[index] else SampledToken(0, None, 0.0)
        for index in range(len(nodes))
    ]
    sampled = any(one.distribution is not None for one in tokens)
    distributions = tuple(one.distribution for one in tokens) if sampled else None
    return select_nodes(
        Draft(tuple(one.token for one in tokens), tuple(node.parent for node in nodes), distributions), indices
    )
