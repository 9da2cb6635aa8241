"""Medusa heads (arXiv 2401.10774): each predicts one of the tokens after the next one from the target's hidden state.

A head is a few residual blocks before the target's unembedding. Its prediction does not depend on the tokens between.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.cpu_operations import one_thread
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.speculative.draft import ROOT, Draft, TargetOutput
from nucleate.speculative.neural.draft_head import Weights, as_array
from nucleate.speculative.neural.draft_sampling import (
    ChainBuilder,
    SampledToken,
    SiblingRequest,
    TrainedProposer,
    add_blocks,
    sample_siblings,
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

Block = tuple[Floats, Floats | None]
"""A residual block: the matrix [in, out] and the bias [out] of its linear layer."""


class Medusa(TrainedProposer):
    """See ``Proposer``. The maximum depth of a draft is the number of heads.

    tree_width: maximum number of children of a node; all nodes of a depth have the same candidates as children.
    """

    layers: tuple[int, ...] = (6,)

    def __init__(self, weights: Weights, target: Llama, tree_width: int = 1) -> None:
        self._target, self.tree_width = target, tree_width
        self._heads = self._blocks(weights)
        self._limit = len(self._heads) if tree_width == 1 else MAX_TREE_TOKENS
        self._depth = min(len(self._heads), len(HEAD_ACCURACY))  # of trees
        self._last: dict[int, tuple[int, Floats]] = {}  # position and hidden state of the last token of each sequence

    def _blocks(self, weights: Any) -> list[list[Block]]:
        """The residual blocks of each head."""
        return [
            [(weights.matrix(f"heads.{head}.{block}"), None) for block in range(weights.count(f"heads.{head}."))]
            for head in range(weights.count("heads."))
        ]

    def _prepare(self, chain: ChainBuilder, keys: Sequence[int]) -> bool:
        """Whether the hidden state of the last but one token is known."""
        position, _ = self._last.get(chain.context.key, (None, None))
        return position == len(chain.context.token_ids) - 2

    def _draft(self, active: list[ChainBuilder]) -> None:
        with one_thread():
            if self.tree_width > 1:
                self._draft_trees(active)
            else:
                most = max(chain.max_tokens for chain in active)
                add_blocks(active, self._logits(active, most), most)

    def _draft_trees(self, active: list[ChainBuilder]) -> None:
        """Draft trees: combinations of the siblings sampled from each head."""
        structures = [tree_structure(chain.max_tokens, self.tree_width, self._depth) for chain in active]
        max_depth = max(depth for structure in structures for _, _, depth in structure) + 1
        requests = [
            SiblingRequest(chain.context, depth, depth * self.tree_width, self.tree_width)
            for chain in active
            for depth in range(max_depth)
        ]
        found = sample_siblings(self._logits(active, max_depth), requests)
        for row, (chain, structure) in enumerate(zip(active, structures, strict=True)):
            chain.tree = fill_tree(structure, found[row * max_depth : (row + 1) * max_depth])

    def _logits(self, active: list[ChainBuilder], count: int) -> Floats:
        """The logits of the first ``count`` heads, [R * count, V]."""
        x_RX = self._normalize(np.stack([self._last[chain.context.key][1] for chain in active]))
        outputs = []
        for head in self._heads[:count]:
            y_RX = x_RX
            for matrix, bias in head:
                z_RX = product(y_RX, matrix)
                if bias is not None:
                    z_RX = z_RX + bias
                with np.errstate(over="ignore"):  # exp(-z) = inf is right
                    y_RX = y_RX + z_RX / (1 + np.exp(-z_RX))
            outputs.append(y_RX)
        return self._unembed(np.stack(outputs, axis=1))

    def _normalize(self, x_RX: Floats) -> Floats:
        """Apply the target's final norm."""
        return self._target.normalise(x_RX, self._target.norm)

    def _unembed(self, x_RNX: Floats) -> Floats:
        """The logits [R * N, V] for the outputs of the first N heads."""
        return product(x_RNX.reshape(-1, x_RNX.shape[2]), self._target.unembedding)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``. Only the last hidden state is stored."""
        for output in outputs:
            states_TF = output.hidden_states_TF
            if len(states_TF):
                self._last[output.key] = output.start + len(states_TF) - 1, as_array(states_TF[-1])

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self._last.pop(key, None)


@functools.cache
def tree_structure(count: int, tree_width: int, heads: int) -> tuple[tuple[int, int, int], ...]:
    """The ``count`` most likely nodes, best first: rank among the candidates of a head, parent, and depth."""
    nodes: list[tuple[int, int, int]] = []
    heap: list[tuple[float, int, int, int, int]] = []
    number = itertools.count()  # breaks ties: the first one found wins

    def expand(parent: int, depth: int, probability: float) -> None:
        for rank, accuracy in enumerate(HEAD_ACCURACY[depth][:tree_width] if depth < heads else ()):
            heapq.heappush(heap, (-probability * accuracy, next(number), rank, parent, depth))

    expand(ROOT, 0, 1.0)
    while heap and len(nodes) < count:
        negated, _, rank, parent, depth = heapq.heappop(heap)
        nodes.append((rank, parent, depth))
        expand(len(nodes) - 1, depth + 1, -negated)
    return tuple(nodes)


def fill_tree(structure: Sequence[tuple[int, int, int]], found: Sequence[Sequence[SampledToken]]) -> Draft:
    """A draft of this structure. found: the sampled siblings of each depth; nodes beyond them are left out.

    All branches share the samples of a depth. This is exact, because verification reaches at most one branch per depth.
    """
    index_of = {ROOT: ROOT}
    tokens: list[SampledToken] = []
    parents: list[int] = []
    for index, (rank, parent, depth) in enumerate(structure):
        if parent in index_of and rank < len(found[depth]):
            index_of[index] = len(tokens)
            tokens.append(found[depth][rank])
            parents.append(index_of[parent])
    sampled = any(one.distribution is not None for one in tokens)
    distributions = tuple(one.distribution for one in tokens) if sampled else None
    return Draft(tuple(one.token for one in tokens), tuple(parents), distributions)
