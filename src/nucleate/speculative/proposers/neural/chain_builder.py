"""A draft while it is made: tokens one after the other, until there are enough. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nucleate.speculative.draft import Draft, DraftContext
from nucleate.speculative.draft_distribution import Law
from nucleate.speculative.proposers.neural.draft_sampling import SampledDrafts


@dataclass
class ChainBuilder:
    """The draft of one sequence."""

    state: DraftContext
    count: int  #: tokens that are wanted at most
    tokens: list[int] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  #: the sequence and its draft, if that is of use

    def add(self, drawn: SampledDrafts) -> bool:
        """Take a token; whether another one is wanted after it."""
        if drawn.token < 0 or len(self.tokens) >= self.count:
            return False
        self.tokens.append(drawn.token)
        self.laws.append(drawn.law)
        return len(self.tokens) < self.count


def drafts_of(chains: Iterable[ChainBuilder]) -> list[Draft]:
    """What became of them."""
    return [
        Draft(tuple(chain.tokens), None, None if all(law is None for law in chain.laws) else tuple(chain.laws))
        for chain in chains
    ]
