"""Tree drafts: built best-first from probabilities, pruned and truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from nucleate.speculative.draft import ROOT, Draft


class Offer(NamedTuple):
    """A candidate token with its probability, as a draft method sees it."""

    token: int
    probability: float
    state: Any = None  #: of the draft method, after this token


def best_first(offers: Callable[[Any, int], Iterable[Offer]], state: Any, count: int, least: float = 0.0) -> list[Node]:
    """The ``count`` most likely nodes of a tree, each at least as likely as ``least``; parents come before children.

    offers(state, depth): the candidates after a node of that depth, most likely first; ``state`` and depth 0 are those
    of the root. The probability of a node is the product of those on its path.
    """
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, Any, int]] = []
    number = 0  # ties: the first one found

    def expand(state: Any, depth: int, place: int, probability: float) -> None:
        nonlocal number
        for offer in offers(state, depth):
            if (own := probability * offer.probability) >= least:
                heappush(heap, (-own, number, offer.token, place, offer.state, depth + 1))
                number += 1

    expand(state, 0, ROOT, 1.0)
    while heap and len(nodes) < count:
        probability, _, token, parent, state, depth = heappop(heap)
        nodes.append(Node(token, parent, -probability))
        if len(nodes) < count:
            expand(state, depth, len(nodes) - 1, -probability)
    return nodes


class Node(NamedTuple):
    """A node of a tree."""

    token: int
    parent: int
    probability: float


def draft_of(nodes: Sequence[Node]) -> Draft:
    """The draft of some nodes, without distributions."""
    draft = Draft(tuple(node.token for node in nodes), tuple(node.parent for node in nodes))
    return Draft(draft.tokens) if draft.chain else draft


def keep(draft: Draft, places: Sequence[int]) -> Draft:
    """Some tokens of a draft, in order, whose parents are among them; parents are None if the result is a chain."""
    if len(places) == len(draft):
        return Draft(draft.tokens, None, draft.distributions) if draft.parents is not None and draft.chain else draft
    now = {ROOT: ROOT} | {place: at for at, place in enumerate(places)}
    before = draft.before()
    parents: tuple[int, ...] | None = tuple(now[before[place]] for place in places)
    if parents == tuple(range(ROOT, len(places) + ROOT)):
        parents = None
    distributions = None if draft.distributions is None else tuple(draft.distributions[place] for place in places)
    return Draft(tuple(draft.tokens[place] for place in places), parents, distributions)


def truncate(draft: Draft, tree_width: int, depth: int, count: int) -> Draft:
    """Limit a draft to ``tree_width`` siblings per token, to a depth, and to ``count`` tokens; the first ones stay.

    A width of 1 keeps the first branch.
    """
    if draft.chain:
        draft = draft.prefix(min(depth, count))
        return draft if draft.parents is None else Draft(draft.tokens, None, draft.distributions)
    siblings: dict[int, int] = {}
    deep = {ROOT: 0}
    kept: list[int] = []
    for place, parent in enumerate(draft.before()):
        siblings[parent] = siblings.get(parent, 0) + 1
        if len(kept) < count and siblings[parent] <= tree_width and deep.get(parent, depth) < depth:
            deep[place] = deep[parent] + 1
            kept.append(place)
    return keep(draft, kept)
