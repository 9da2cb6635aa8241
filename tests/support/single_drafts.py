"""Drafts for one sequence at a time, for tests."""

from __future__ import annotations

from nucleate.speculative.draft import Draft, Proposer, State


def draft_of(proposer: Proposer, state: State, count: int) -> Draft:
    """What is proposed to one sequence alone."""
    [draft] = proposer.propose([state], [count])
    return draft
