"""How often drafted tokens are kept, and how many to draft at a price. Knows neither times nor proposers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.speculative.draft import NO_DRAFT, ROOT, Draft

DOUBT = 2.0
"""How many drafts of its own what others were told counts for, of a sequence."""

PRIOR = 0.5
"""The chance of a drafted token of which nothing is known."""


@dataclass
class AcceptedCounts:
    """How often a drafted token was kept after those before it were, by its place in the draft; in a tree, by depth."""

    decay: float  #: what is left of the weight of a draft after another one
    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, drafted: int, kept: int) -> None:
        """Of a draft of so many tokens the first ones were kept."""
        for place in range(min(drafted, kept + 1)):  # nothing is known of what comes after one that was not
            if place == len(self.tried):
                self.tried.append(0.0)
                self.kept.append(0.0)
            self.tried[place] = self.decay * self.tried[place] + 1.0
            self.kept[place] = self.decay * self.kept[place] + (place < kept)

    def rate(self, place: int, prior: float, weight: float) -> float:
        """The chance at a place, where ``weight`` tries are as if they had gone as the prior says."""
        tried, kept = (0.0, 0.0) if place >= len(self.tried) else (self.tried[place], self.kept[place])
        return (kept + weight * prior) / (tried + weight)


class AcceptanceRates:
    """What is known of the drafts of one sequence."""

    def __init__(self, everyone: AcceptedCounts) -> None:
        self.drafted = 0  # tokens, of the longest branch of the draft that is being verified
        self.silent = False  # whether there was no draft last time
        self.quiet, self.start = NO_DRAFT, 0  # a draft that nobody reads, and where it begins
        self._own, self._all = AcceptedCounts(0.9), everyone

    def length(self, most: int, price: float, fixed: float = 0.0) -> tuple[int, float]:
        """How many tokens to draft, and how many of them are kept on average.

        Each has its price, and there is one for having a draft at all.
        """
        count, gain, rate, chance = 0, 0.0, PRIOR, 1.0  # of the last token, and of all up to it
        while count < most:
            rate = self._own.rate(count, self._all.rate(count, rate, DOUBT), DOUBT)
            chance *= rate
            if chance <= price:
                break
            count, gain = count + 1, gain + chance
        return (count, gain) if gain > price * count + fixed else (0, 0.0)

    def told(self, drafted: int, kept: int) -> None:
        """Of a draft of so many tokens the first ones were kept, or would have been."""
        self._all.add(drafted, kept)
        self._own.add(drafted, kept)

    def compare(self, token_ids: Sequence[int]) -> None:
        """See what has become of the quiet draft, if enough tokens have come since."""
        if not self.quiet:
            return
        kept = followed(self.quiet, token_ids, self.start)
        if self.start + kept < len(token_ids) or kept == self.quiet.depth:
            self.told(self.quiet.depth, kept)
            self.quiet = NO_DRAFT


def followed(draft: Draft, token_ids: Sequence[int], start: int) -> int:
    """How many of some tokens, from a place on, a draft has said."""
    followers = draft.children()
    place, kept = ROOT, 0
    while start + kept < len(token_ids):
        token = token_ids[start + kept]
        place = next((each for each in followers.get(place, ()) if draft.tokens[each] == token), ROOT)
        if place == ROOT:
            break
        kept += 1
    return kept
