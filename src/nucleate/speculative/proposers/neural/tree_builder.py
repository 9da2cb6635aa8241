"""Builds draft trees as EAGLE-2 (Li et al., arXiv 2406.16858): expands the most likely nodes, keeps the most likely."""

from __future__ import annotations

from dataclasses import dataclass, field

from nucleate.models.numpy_llama import Floats
from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder
from nucleate.speculative.proposers.neural.draft_sampling import MIN_TEMPERATURE, SampledToken, SiblingRequest
from nucleate.speculative.tree import select_nodes

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
    outputs: dict[int, Floats] = field(
        default_factory=dict
    )  #: outputs of the draft head for the expanded nodes and ROOT
    _new_nodes: list[int] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled, with their distributions."""
        return self.chain.context.temperature >= MIN_TEMPERATURE and not self.chain.context.shared_noise

    def request(self, node: int) -> SiblingRequest:
        """The request for the children of a node."""
        depth, count, size = self._depth(node), self.chain.max_tokens, len(self.chain.tokens)
        return SiblingRequest(
            self.chain.context, depth, size, min(self.tree_width, count - size) if self.is_sampled else self.tree_width
        )

    def add_children(self, node: int, siblings: list[SampledToken], output: Floats) -> None:
        """Add the children of a node."""
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
        """The finished draft."""
        distributions = tuple(self.chain.distributions) if self.is_sampled and self.chain.distributions else None
        draft = Draft(tuple(self.chain.tokens), tuple(self.parents), distributions)
        best = sorted(range(len(draft)), key=self._sort_key)[: max(0, self.chain.max_tokens)]
        return select_nodes(draft, sorted(best))

    def _depth(self, node: int) -> int:
        """The depth of the children of a node."""
        return 0 if node == ROOT else self.depths[node] + 1

    def _sort_key(self, node: int) -> tuple[float, int]:
        return -self.probabilities[node], node
