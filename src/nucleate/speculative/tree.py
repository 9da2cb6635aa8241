"""Tree drafts: built best-first from probabilities, pruned and truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from nucleate.speculative.draft import ROOT, Draft


class Candidate(NamedTuple):
    """A candidate token with its probability, estimated by a draft method."""

    token: int
    probability: float
    state: Any = None  #: of the draft method, after this token


def best_first(candidates: Callable[[Any, int], Iterable[Candidate]], state: Any, max_tokens: int) -> list[Node]:
    """The ``max_tokens`` most likely nodes of a tree; parents come before children.

    candidates(state, depth): the candidates after a node of that depth, most likely first; ``state`` and depth 0 are
    those of the root. The probability of a node is the product of the probabilities on its path.
    """
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, Any, int]] = []
    counter = 0  # breaks ties: the first one found wins

    def expand(state: Any, depth: int, index: int, probability: float) -> None:
        nonlocal counter
        for candidate in candidates(state, depth):
            path_probability = probability * candidate.probability
            heappush(heap, (-path_probability, counter, candidate.token, index, candidate.state, depth + 1))
            counter += 1

    expand(state, 0, ROOT, 1.0)
    while heap and len(nodes) < max_tokens:
        probability, _, token, parent, state, depth = heappop(heap)
        nodes.append(Node(token, parent, -probability))
        if len(nodes) < max_tokens:
            expand(state, depth, len(nodes) - 1, -probability)
    return nodes


class Node(NamedTuple):
    """A node of a tree."""

    token: int
    parent: int
    probability: float


def tree_draft(tokens: Iterable[int], parents: Iterable[int]) -> Draft:
    """A draft of these nodes, without distributions; ``parents`` is None if it is a chain."""
    draft = Draft(tuple(tokens), tuple(parents))
    return Draft(draft.tokens) if draft.is_chain else draft


def select_nodes(draft: Draft, indices: Sequence[int]) -> Draft:
    """The sub-draft of some nodes, in order, whose parents are among them; ``parents`` is None if it is a chain."""
    if len(indices) == len(draft):
        return Draft(draft.tokens, None, draft.distributions) if draft.parents is not None and draft.is_chain else draft
    new_index = {ROOT: ROOT} | {index: new for new, index in enumerate(indices)}
    parent_indices = draft.parent_indices()
    parents: tuple[int, ...] | None = tuple(new_index[parent_indices[index]] for index in indices)
    if parents == tuple(range(ROOT, len(indices) + ROOT)):
        parents = None
    distributions = None if draft.distributions is None else tuple(draft.distributions[index] for index in indices)
    return Draft(tuple(draft.tokens[index] for index in indices), parents, distributions)


def truncate(draft: Draft, tree_width: int, depth: int, max_tokens: int) -> Draft:
    """Limit a draft to ``tree_width`` children per node, to a depth, and to ``max_tokens``; the first ones stay.

    A width of 1 keeps the first branch.
    """
    if draft.is_chain:
        draft = draft.prefix(min(depth, max_tokens))
        return draft if draft.parents is None else Draft(draft.tokens, None, draft.distributions)
    num_children: dict[int, int] = {}
    depth_of = {ROOT: 0}
    indices: list[int] = []
    for index, parent in enumerate(draft.parent_indices()):
        num_children[parent] = num_children.get(parent, 0) + 1
        if len(indices) < max_tokens and num_children[parent] <= tree_width and depth_of.get(parent, depth) < depth:
            depth_of[index] = depth_of[parent] + 1
            indices.append(index)
    return select_nodes(draft, indices)
