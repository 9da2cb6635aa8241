"""Drafts for one sequence at a time, for tests."""

from __future__ import annotations

from nucleate.speculative.draft import Draft, DraftContext, Proposer


def draft_of(proposer: Proposer, state: DraftContext, count: int) -> Draft:
    """The draft for a single sequence."""
    [draft] = proposer.propose([state], [count])
    return draft
