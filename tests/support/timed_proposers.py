"""Proposers for simulated engines: the correct token at position i is i, and a draft takes time on its own clock."""

from __future__ import annotations

import random

from nucleate.speculative import adaptive_proposer
from nucleate.speculative.draft import Draft

WRONG = -7  # a token that never comes


class Eager:
    """Drafts as many tokens as allowed and records its calls. chance: that a token is correct, if all before it are."""

    layers = ()

    def __init__(self, chance=lambda: 1.0):
        self.requested, self.accepted_counts, self.forgotten = [], [], []
        self.chance, self.rng = chance, random.Random(3)

    def propose(self, states, counts):
        self.requested += counts
        return [self.draft(len(state.token_ids), count) for state, count in zip(states, counts, strict=True)]

    def draft(self, start, count):
        return Draft(tuple(i if self.rng.random() < self.chance() else WRONG for i in range(start, start + count)))

    def accepted(self, key, count):
        self.accepted_counts.append((key, count))

    def forget(self, key, output_ids=()):
        self.forgotten.append((key, tuple(output_ids)))


class Slow(Eager):
    """A call takes a number of seconds of its clock, which is that of ``AdaptiveProposer``."""

    def __init__(self, monkeypatch, seconds, chance=lambda: 0.0):
        super().__init__(chance)
        self.seconds, self.clock = seconds, 0.0
        monkeypatch.setattr(adaptive_proposer, "perf_counter", lambda: self.clock)

    def propose(self, states, counts):
        self.clock += self.seconds
        return super().propose(states, counts)


def append_tokens(ids, count):
    """Append the correct tokens."""
    ids += range(len(ids), len(ids) + count)
