"""EAGLE-3 drafts: a head that continues the target's hidden states (Li et al., arXiv 2503.01840).

One layer predicts the next token from the target's hidden state of a token and the embedding of the token after it. For
draft tokens, the layer's own output replaces the target's hidden state.

Tree drafts are built as by EAGLE-2 (Li et al., arXiv 2406.16858): the most likely nodes are expanded and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, groupby

import numpy as np

from nucleate.models.cpu_operations import attend_compiled, one_thread, store
from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.paged_cache import BatchLayout
from nucleate.models.runner import BLOCK
from nucleate.speculative.draft import ROOT, Draft, select_nodes
from nucleate.speculative.neural.draft_head import (
    MAX_CACHED_TOKENS,
    DraftHead,
    DraftLayer,
    Weights,
    fuse_hidden_states,
    rms_normalize,
)
from nucleate.speculative.neural.draft_sampling import (
    MIN_TEMPERATURE,
    ChainBuilder,
    SampledToken,
    SiblingRequest,
    sample_siblings,
    sample_tokens,
)

MAX_DEPTH = 8
"""Maximum depth of a tree."""


@dataclass(eq=False)
class TreeBuilder:
    """The tree of one sequence.

    If tokens are sampled, nodes are expanded one at a time until the tree is full, and all of them stay: dropping a
    sampled token because of its value would bias the output distribution. Otherwise more nodes are made than are kept.
    """

    chain: ChainBuilder
    tree_width: int
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)  #: of the whole path
    depths: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)  #: expanded nodes, in order; at most ``max_tokens``
    outputs: dict[int, Floats] = field(default_factory=dict)  #: of the draft head, for the expanded nodes and ROOT
    _new_nodes: list[int] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled, with their distributions."""
        return self.chain.context.temperature >= MIN_TEMPERATURE and not self.chain.context.shared_noise

    def request(self, node: int) -> SiblingRequest:
        depth, count, size = self._depth(node), self.chain.max_tokens, len(self.chain.tokens)
        most = min(self.tree_width, count - size) if self.is_sampled else self.tree_width
        return SiblingRequest(self.chain.context, depth, size, most)

    def add_children(self, node: int, siblings: list[SampledToken], output: Floats) -> None:
        self.outputs[node] = output
        before = 1.0 if node == ROOT else self.probabilities[node]
        for sibling in siblings:
            self._new_nodes.append(len(self.parents))
            self.chain.tokens.append(sibling.token)
            self.chain.distributions.append(sibling.distribution)
            self.parents.append(node)
            self.probabilities.append(before * sibling.probability)
            self.depths.append(self._depth(node))

    def next_nodes(self) -> list[int]:
        """The nodes to expand next, marked as expanded; none if the tree is complete."""
        count, size = self.chain.max_tokens, len(self.parents)
        if self.is_sampled:
            left = set(range(size)).difference(self.expanded) if size < count else set()
            best = sorted((node for node in left if self.depths[node] < MAX_DEPTH - 1), key=self._sort_key)[:1]
        else:  # a child of the least likely kept node would not be kept
            kept = set(sorted(range(size), key=self._sort_key)[: count - 1])
            best = [node for node in self._new_nodes if node in kept and self.depths[node] < MAX_DEPTH - 1]
            best = sorted(sorted(best, key=self._sort_key)[: min(self.tree_width, count - len(self.expanded))])
        self._new_nodes = []
        self.expanded += best
        return best

    def parent_rows(self) -> list[int]:
        """For each expanded node, the row of its parent among the expanded ones, or ROOT."""
        rows = {node: row for row, node in enumerate(self.expanded)}
        return [rows.get(self.parents[node], ROOT) for node in self.expanded]

    def build(self) -> Draft:
        distributions = tuple(self.chain.distributions) if self.is_sampled and self.chain.distributions else None
        draft = Draft(tuple(self.chain.tokens), tuple(self.parents), distributions)
        best = sorted(range(len(draft)), key=self._sort_key)[: max(0, self.chain.max_tokens)]
        return select_nodes(draft, sorted(best))

    def _depth(self, node: int) -> int:
        """The depth of the children of a node."""
        return 0 if node == ROOT else self.depths[node] + 1

    def _sort_key(self, node: int) -> tuple[float, int]:
        return -self.probabilities[node], node


class Eagle(DraftHead):
    """See ``Proposer``. tree_width: maximum number of children of a node; with 1, drafts are chains.

    tokens: KV cache size, for all sequences together.
    """

    layers: tuple[int, ...] = (2, 4, 6)
    names: tuple[str, ...] = ("fuse", "token_norm", "hidden_norm", "norm")  #: of weights

    def __init__(self, weights: Weights, target: Llama, tree_width: int = 1, tokens: int = MAX_CACHED_TOKENS) -> None:
        super().__init__(tokens // BLOCK)
        self._target, self.tree_width = target, tree_width
        self._fuse = weights.matrix(self.names[0])
        self._norms = [weights[f"{name}.weight"] for name in self.names[1:]]
        self._layer = DraftLayer(weights, "layer.", target, tokens // BLOCK)

    def _draft(self, active: list[ChainBuilder]) -> None:
        with one_thread():
            (self._draft_trees if self.tree_width > 1 else self._draft_chains)(active)

    def _draft_trees(self, active: list[ChainBuilder]) -> None:
        """Draft trees: in each round the head expands some nodes of each tree (see ``TreeBuilder``)."""
        trees = [TreeBuilder(chain, self.tree_width) for chain in active]
        frontier, x_RX = [(tree, ROOT) for tree in trees], self._process_pending(active)
        while frontier:
            logits_RV = self._logits(x_RX)
            found = sample_siblings(logits_RV, [tree.request(node) for tree, node in frontier])
            for (tree, node), siblings, x_X in zip(frontier, found, x_RX, strict=True):
                tree.add_children(node, siblings, x_X)
            frontier = [(tree, node) for tree in trees for node in tree.next_nodes()]
            if frontier:
                x_RX = self._expand(frontier)
        for tree in trees:
            tree.chain.tree = tree.build()

    def _expand(self, frontier: list[tuple[TreeBuilder, int]]) -> Floats:
        """The output of the layer for new nodes. Nodes of one tree are adjacent: its last expanded ones."""
        inputs = []
        for tree, group in groupby(frontier, lambda one: one[0]):
            nodes, chain = [node for _, node in group], tree.chain
            chain.ids += [chain.tokens[node] for node in nodes]
            stop = self._states(chain).num_processed + len(tree.expanded)
            model_input = self._model_input(chain, stop - len(nodes), stop, 1)
            inputs.append(model_input._replace(num_logits=len(nodes), parents=tree.parent_rows()))
        layout = BatchLayout(inputs, BLOCK)
        x_RX = np.stack([tree.outputs[tree.parents[node]] for tree, node in frontier])
        return self._run_layer(self._layer_input(layout, x_RX), x_RX, layout)

    def _draft_chains(self, active: list[ChainBuilder]) -> None:
        x_RX = self._process_pending(active)
        for depth in count():
            contexts = [chain.context for chain in active]
            sampled = sample_tokens(self._logits(x_RX), contexts, [depth] * len(active))
            unfinished = np.array([chain.add(one) for chain, one in zip(active, sampled, strict=True)])
            active = [chain for chain, keep in zip(active, unfinished, strict=True) if keep]
            if not active:
                return
            for chain in active:
                chain.ids.append(chain.tokens[-1])
            x_RX = self._step(active, x_RX[unfinished], depth)

    def _process_pending(self, active: list[ChainBuilder]) -> Floats:
        """Process the pending hidden states. Returns the output [R, X] after the last token of each sequence."""
        target = self._target
        found = [self._states(chain) for chain in active]
        for one in found:
            one.num_processed = min(one.num_processed, one.count - 1)  # the last one again, if none is pending
        hidden_TF = np.concatenate([one.states(one.num_processed) for one in found])
        context_TX = self._fused(hidden_TF)
        layout = self._pending_layout(active, shift=1)
        input_TY = self._layer_input(layout, context_TX)
        store(self._layer.pool, layout, *self._layer.key_value(input_TY, target.rotation(layout.positions_T)))
        for one in found:
            one.mark_processed()
        stops = [one.num_processed for one in found]
        last = [self._model_input(chain, stop - 1, stop, 1) for chain, stop in zip(active, stops, strict=True)]
        ends_R = layout.logits_indices
        return self._run_layer(input_TY[ends_R], context_TX[ends_R], BatchLayout(last, BLOCK))

    def _fused(self, hidden_TF: Floats) -> Floats:
        """The hidden states of the target's layers as one: [T, width]."""
        return fuse_hidden_states(hidden_TF, self._target.hidden_size, self._target.epsilon, self._fuse)

    def _residual(self, input_TY: Floats, x_TX: Floats) -> Floats:
        """What the layer adds its output to: [T, width]. input_TY, x_TX: see ``_layer_input``."""
        return x_TX

    def _step(self, active: list[ChainBuilder], x_RX: Floats, depth: int) -> Floats:
        """The output of the layer for the last draft token of each chain."""
        starts = [self._states(chain).num_processed + depth for chain in active]
        inputs = [self._model_input(chain, at, at + 1, 1) for chain, at in zip(active, starts, strict=True)]
        layout = BatchLayout(inputs, BLOCK)
        return self._run_layer(self._layer_input(layout, x_RX), x_RX, layout)

    def _logits(self, x_RX: Floats) -> Floats:
        return product(rms_normalize(x_RX, self._target.epsilon) * self._norms[2], self._target.unembedding)

    def _layer_input(self, layout: BatchLayout, x_TX: Floats) -> Floats:
        """The input of the layer: normalized token embeddings, and hidden states x_TX likewise: [T, 2 * width]."""
        tokens_TX, epsilon = self._target.embedding[layout.ids_T], self._target.epsilon
        parts = [
            rms_normalize(y_TX, epsilon) * norm for y_TX, norm in zip((tokens_TX, x_TX), self._norms, strict=False)
        ]
        return np.concatenate(parts, axis=1)

    def _run_layer(self, input_TY: Floats, x_TX: Floats, layout: BatchLayout) -> Floats:
        rotary, layer = self._target.rotation(layout.positions_T), self._layer
        new = layer.query(input_TY, rotary), *layer.key_value(input_TY, rotary)
        heads_THD = attend_compiled(*new, layer.pool, layout, layer.rule)
        return layer.output(self._residual(input_TY, x_TX), heads_THD)
