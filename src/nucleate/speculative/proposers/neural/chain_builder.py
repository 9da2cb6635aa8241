"""Builds a chain draft token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nucleate.speculative.draft import Draft, DraftContext
from nucleate.speculative.draft_distribution import Distribution
from nucleate.speculative.proposers.neural.draft_sampling import SampledDrafts


@dataclass
class ChainBuilder:
    """The draft of one sequence."""

    state: DraftContext
    count: int  #: tokens that are wanted at most
    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  #: the sequence and its draft, if that is of use

    def add(self, drawn: SampledDrafts) -> bool:
        """Take a token; whether another one is wanted after it."""
        if drawn.token < 0 or len(self.tokens) >= self.count:
            return False
        self.tokens.append(drawn.token)
        self.distributions.append(drawn.distribution)
        return len(self.tokens) < self.count


def drafts_of(chains: Iterable[ChainBuilder]) -> list[Draft]:
    """What became of them."""
    return [
        Draft(
            tuple(chain.tokens),
            None,
            tuple(chain.distributions) if any(each is not None for each in chain.distributions) else None,
        )
        for chain in chains
    ]
