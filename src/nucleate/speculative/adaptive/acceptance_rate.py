"""Acceptance rates per sequence, and the draft length that pays at a given cost per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.speculative.draft import NO_DRAFT, ROOT, Draft

DOUBT = 2.0
"""Weight of the acceptance rate of all sequences in that of one, in drafts."""

PRIOR = 0.5
"""The acceptance probability assumed without data."""


@dataclass
class AcceptedCounts:
    """Acceptance counts by position in the draft (in a tree: depth), given that all tokens before were accepted."""

    decay: float  #: factor on the weight of older drafts, per draft
    verified: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of which the first ``accepted`` tokens were accepted."""
        for place in range(min(drafted, accepted + 1)):  # tokens after a rejected one were not verified
            if place == len(self.verified):
                self.verified.append(0.0)
                self.accepted.append(0.0)
            self.verified[place] = self.decay * self.verified[place] + 1.0
            self.accepted[place] = self.decay * self.accepted[place] + (place < accepted)

    def rate(self, place: int, prior: float, weight: float) -> float:
        """The acceptance probability at a position, with a prior that counts as ``weight`` drafts."""
        known = place < len(self.verified)
        verified, accepted = (self.verified[place], self.accepted[place]) if known else (0.0, 0.0)
        return (accepted + weight * prior) / (verified + weight)


class AcceptanceRates:
    """The acceptance rates of one sequence."""

    def __init__(self, shared: AcceptedCounts) -> None:
        self.drafted = 0  # depth of the draft that is being verified
        self.silent = False  # whether the draft method had no proposal last time
        self.shadow, self.start = NO_DRAFT, 0  # a shadow draft, and its position in the sequence
        self._own, self._all = AcceptedCounts(0.9), shared

    def length(self, most: int, price: float, fixed: float = 0.0) -> tuple[int, float]:
        """The number of tokens to draft, and how many of them are accepted on average.

        price: the cost of each token; fixed: the cost of having a draft at all; both in tokens.
        """
        count, gain, rate, chance = 0, 0.0, PRIOR, 1.0  # of the last token, and of all tokens up to it
        while count < most:
            rate = self._own.rate(count, self._all.rate(count, rate, DOUBT), DOUBT)
            chance *= rate
            if chance <= price:
                break
            count, gain = count + 1, gain + chance
        return (count, gain) if gain > price * count + fixed else (0, 0.0)

    def record(self, drafted: int, accepted: int) -> None:
        """Record a draft of which the first ``accepted`` tokens were accepted, or would have been."""
        self._all.add(drafted, accepted)
        self._own.add(drafted, accepted)

    def compare(self, token_ids: Sequence[int]) -> None:
        """Compare the shadow draft with the tokens of the sequence, if enough have come since."""
        if not self.shadow:
            return
        kept = followed(self.shadow, token_ids, self.start)
        if self.start + kept < len(token_ids) or kept == self.shadow.depth:
            self.record(self.shadow.depth, kept)
            self.shadow = NO_DRAFT


def followed(draft: Draft, token_ids: Sequence[int], start: int) -> int:
    """How many tokens of a sequence, from a position on, a draft predicted."""
    followers = draft.children()
    place, kept = ROOT, 0
    while start + kept < len(token_ids):
        token = token_ids[start + kept]
        place = next((each for each in followers.get(place, ()) if draft.tokens[each] == token), ROOT)
        if place == ROOT:
            break
        kept += 1
    return kept
