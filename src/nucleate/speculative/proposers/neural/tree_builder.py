"""Builds a draft tree: which tokens to expand next, and which stay.

The method is that of EAGLE-2 (Li et al., arXiv 2406.16858): go on from the likeliest, keep the likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nucleate.models.llama.numpy_llama import Floats
from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder
from nucleate.speculative.proposers.neural.draft_sampling import COLDEST, DraftQuery, SampledDrafts
from nucleate.speculative.tree import select_nodes

DEEPEST = 8
"""Maximum depth."""


@dataclass(eq=False)
class TreeBuilder:
    """The tree of one sequence.

    Sampled tokens stay, as leaving out a token for what it is would change the distribution of the output: they are
    expanded one at a time, until there are enough. Otherwise more tokens are expanded than stay in the end.
    """

    chain: ChainBuilder
    tree_width: int
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  #: of the whole way
    depths: list[int] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)  #: the tokens that were gone on from, in order; at most ``count``
    outputs: dict[int, Floats] = field(default_factory=dict)  #: of who drafts, after these and ROOT
    _fresh: list[int] = field(default_factory=list)

    @property
    def drawn(self) -> bool:
        """Whether tokens are sampled, with their distributions."""
        return self.chain.state.temperature >= COLDEST and not self.chain.state.shared_noise

    def asked(self, place: int) -> DraftQuery:
        """What is wanted after a token."""
        depth, count, made = self._depth(place), self.chain.count, len(self.chain.tokens)
        return DraftQuery(
            self.chain.state, depth, made, min(self.tree_width, count - made) if self.drawn else self.tree_width
        )

    def take(self, place: int, siblings: list[SampledDrafts], output: Floats) -> None:
        """What may follow a token."""
        self.outputs[place] = output
        before = 1.0 if place == ROOT else self.chances[place]
        for sibling in siblings:
            self._fresh.append(len(self.parents))
            self.chain.tokens.append(sibling.token)
            self.chain.distributions.append(sibling.distribution)
            self.parents.append(place)
            self.chances.append(before * sibling.chance)
            self.depths.append(self._depth(place))

    def next(self) -> list[int]:
        """The tokens to go on from; none if it is done. From now on these are ``looked`` at."""
        count, made = self.chain.count, len(self.parents)
        if self.drawn:
            left = set(range(made)).difference(self.looked) if made < count else set()
            best = sorted((place for place in left if self.depths[place] < DEEPEST - 1), key=self._order)[:1]
        else:  # what follows the last of those that stay is less likely than they are
            stay = set(sorted(range(made), key=self._order)[: count - 1])
            best = [place for place in self._fresh if place in stay and self.depths[place] < DEEPEST - 1]
            best = sorted(sorted(best, key=self._order)[: min(self.tree_width, count - len(self.looked))])
        self._fresh = []
        self.looked += best
        return best

    def lines(self) -> list[int]:
        """For each token that was looked at the one before it, by their places among these; ROOT: none."""
        at = {place: line for line, place in enumerate(self.looked)}
        return [at.get(self.parents[place], ROOT) for place in self.looked]

    def draft(self) -> Draft:
        """What became of it."""
        distributions = tuple(self.chain.distributions) if self.drawn and self.chain.distributions else None
        draft = Draft(tuple(self.chain.tokens), tuple(self.parents), distributions)
        return select_nodes(draft, sorted(sorted(range(len(draft)), key=self._order)[: max(0, self.chain.count)]))

    def _depth(self, place: int) -> int:
        """Of what follows a token."""
        return 0 if place == ROOT else self.depths[place] + 1

    def _order(self, place: int) -> tuple[float, int]:
        return -self.chances[place], place
