"""Builds a chain draft token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nucleate.speculative.draft import Distribution, Draft, DraftContext
from nucleate.speculative.neural.draft_sampling import SampledToken


@dataclass
class ChainBuilder:
    """The draft of one sequence."""

    context: DraftContext
    max_tokens: int  #: maximum length
    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  #: the sequence and its draft, if the draft method uses them

    def add(self, sampled: SampledToken) -> bool:
        """Append a token. Returns whether the draft needs another one."""
        if sampled.token < 0 or len(self.tokens) >= self.max_tokens:
            return False
        self.tokens.append(sampled.token)
        self.distributions.append(sampled.distribution)
        return len(self.tokens) < self.max_tokens


def build_drafts(chains: Iterable[ChainBuilder]) -> list[Draft]:
    """The finished drafts."""
    return [
        Draft(
            tuple(chain.tokens),
            None,
            tuple(chain.distributions) if any(each is not None for each in chain.distributions) else None,
        )
        for chain in chains
    ]
