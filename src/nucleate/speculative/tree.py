"""Drafts with several branches: how they are made from chances, and made smaller. Knows neither models nor engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from nucleate.speculative.draft import ROOT, Draft


class Offer(NamedTuple):
    """A token that may follow, as who drafts sees it."""

    token: int
    chance: float  #: that it does
    state: Any = None  #: of who drafts, after it


def best_first(offers: Callable[[Any, int], Iterable[Offer]], state: Any, count: int, least: float = 0.0) -> list[Node]:
    """The ``count`` likeliest nodes of a tree, none of which is less likely than ``least``: parents before children.

    offers(state, depth): what may follow a node of that depth, its likeliest first; the state and depth 0 are of the
    root. The chance of a node is the product of the chances on its path.
    """
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, Any, int]] = []
    number = 0  # of equal chances the first found is taken

    def look(state: Any, depth: int, place: int, chance: float) -> None:
        nonlocal number
        for offer in offers(state, depth):
            if (own := chance * offer.chance) >= least:
                heappush(heap, (-own, number, offer.token, place, offer.state, depth + 1))
                number += 1

    look(state, 0, ROOT, 1.0)
    while heap and len(nodes) < count:
        chance, _, token, parent, state, depth = heappop(heap)
        nodes.append(Node(token, parent, -chance))
        if len(nodes) < count:
            look(state, depth, len(nodes) - 1, -chance)
    return nodes


class Node(NamedTuple):
    """A token of a tree."""

    token: int
    parent: int
    chance: float


def draft_of(nodes: Sequence[Node]) -> Draft:
    """A draft without laws."""
    draft = Draft(tuple(node.token for node in nodes), tuple(node.parent for node in nodes))
    return Draft(draft.tokens) if draft.chain else draft


def keep(draft: Draft, places: Sequence[int]) -> Draft:
    """Some tokens of a draft, in order, each with the one it follows among them; a chain where they are one."""
    if len(places) == len(draft):
        return Draft(draft.tokens, None, draft.laws) if draft.parents is not None and draft.chain else draft
    now = {ROOT: ROOT} | {place: at for at, place in enumerate(places)}
    before = draft.before()
    parents: tuple[int, ...] | None = tuple(now[before[place]] for place in places)
    if parents == tuple(range(ROOT, len(places) + ROOT)):
        parents = None
    laws = None if draft.laws is None else tuple(draft.laws[place] for place in places)
    return Draft(tuple(draft.tokens[place] for place in places), parents, laws)


def truncate(draft: Draft, tree_width: int, depth: int, count: int) -> Draft:
    """As many first siblings of each token, as deep, and as many first tokens of these; whatever the tokens are.

    One branch: the first of each siblings.
    """
    if draft.chain:
        draft = draft.prefix(min(depth, count))
        return draft if draft.parents is None else Draft(draft.tokens, None, draft.laws)
    siblings: dict[int, int] = {}
    deep = {ROOT: 0}
    kept: list[int] = []
    for place, parent in enumerate(draft.before()):
        siblings[parent] = siblings.get(parent, 0) + 1
        if len(kept) < count and siblings[parent] <= tree_width and deep.get(parent, depth) < depth:
            deep[place] = deep[parent] + 1
            kept.append(place)
    return keep(draft, kept)
