"""Acceptance rates per sequence, and the draft length that pays at a given cost per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.speculative.draft import NO_DRAFT, ROOT, Draft

PRIOR_WEIGHT = 2.0
"""Weight of the acceptance rate of all sequences in that of one, in drafts."""

PRIOR_RATE = 0.5
"""The acceptance probability assumed without data."""


@dataclass
class AcceptanceCounts:
    """Acceptance counts by position in the draft (in a tree: depth), given that all tokens before were accepted."""

    decay: float  #: factor on the weight of older drafts, per draft
    verified: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of which the first ``accepted`` tokens were accepted."""
        for position in range(min(drafted, accepted + 1)):  # tokens after a rejected one were not verified
            if position == len(self.verified):
                self.verified.append(0.0)
                self.accepted.append(0.0)
            self.verified[position] = self.decay * self.verified[position] + 1.0
            self.accepted[position] = self.decay * self.accepted[position] + (position < accepted)

    def rate(self, position: int, prior: float, weight: float) -> float:
        """The acceptance probability at a position, with a prior that counts as ``weight`` drafts."""
        has_data = position < len(self.verified)
        verified, accepted = (self.verified[position], self.accepted[position]) if has_data else (0.0, 0.0)
        return (accepted + weight * prior) / (verified + weight)


class AcceptanceRates:
    """The acceptance rates of one sequence."""

    def __init__(self, shared: AcceptanceCounts) -> None:
        self.drafted = 0  # depth of the draft that is being verified
        self.retry_wait, self.retry_step = 0, 0  # steps to wait after an empty proposal, and the step to ask again
        self.shadow_draft, self.shadow_start = NO_DRAFT, 0  # a shadow draft, and its position in the output
        self._counts, self._shared_counts = AcceptanceCounts(0.9), shared

    def best_length(self, max_tokens: int, token_cost: float, fixed_cost: float = 0.0) -> tuple[int, float]:
        """The number of tokens to draft, and the expected number of accepted ones.

        token_cost: the cost of each draft token; fixed_cost: the cost of having a draft at all; both in tokens.
        """
        length, expected, rate, probability = 0, 0.0, PRIOR_RATE, 1.0  # of the last token, and of all tokens up to it
        while length < max_tokens:
            rate = self._counts.rate(length, self._shared_counts.rate(length, rate, PRIOR_WEIGHT), PRIOR_WEIGHT)
            probability *= rate
            if probability <= token_cost:
                break
            length, expected = length + 1, expected + probability
        return (length, expected) if expected > token_cost * length + fixed_cost else (0, 0.0)

    def record(self, drafted: int, accepted: int) -> None:
        """Record a draft of which the first ``accepted`` tokens were accepted, or would have been."""
        self._shared_counts.add(drafted, accepted)
        self._counts.add(drafted, accepted)

    def compare(self, token_ids: Sequence[int], num_prompt_tokens: int = 0) -> None:
        """Compare the shadow draft with the tokens of the sequence, if enough have been generated since."""
        if not self.shadow_draft:
            return
        start = num_prompt_tokens + self.shadow_start
        num_matched = num_matching_tokens(self.shadow_draft, token_ids, start)
        if start + num_matched < len(token_ids) or num_matched == self.shadow_draft.depth:
            self.record(self.shadow_draft.depth, num_matched)
            self.shadow_draft = NO_DRAFT


def num_matching_tokens(draft: Draft, token_ids: Sequence[int], start: int) -> int:
    """The number of tokens of a sequence, from ``start`` on, that a draft predicted."""
    children = draft.children()
    node, num_matched = ROOT, 0
    while start + num_matched < len(token_ids):
        token = token_ids[start + num_matched]
        node = next((child for child in children.get(node, ()) if draft.tokens[child] == token), ROOT)
        if node == ROOT:
            break
        num_matched += 1
    return num_matched
