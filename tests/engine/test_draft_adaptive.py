"""How many tokens are drafted, in a world whose clock is a formula: near the best, and never much worse than none."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from drafting import draft_of
from hypothesis import given
from hypothesis import strategies as st

from nucleate.engine.draft.adaptive import LONGEST_PAUSE, TRIALS, AdaptiveProposer, Chances, Costs, Kept
from nucleate.engine.draft.draft import Draft, State

MOST = 8


class Eager:
    """A proposer that always drafts as many as it may, and remembers what it was told."""

    def __init__(self):
        self.asked, self.told, self.forgotten = [], [], []

    layers = ()

    def propose(self, states, counts):
        self.asked += counts
        return [Draft((0,) * count) for count in counts]

    def accepted(self, key, count):
        self.told.append((key, count))

    def forget(self, key, output_ids=()):
        self.forgotten.append((key, tuple(output_ids)))


def rate(chance, slope, fixed=None, sequences=1, steps=400, drafting=0.0):
    """Tokens per second, and how many were drafted in each step; a step takes 1 + slope per token, or a little else."""
    rng, proposer, keys = random.Random(3), AdaptiveProposer(Eager()), range(sequences)
    written, seconds, drafted = 0, 0.0, []
    for step in range(steps):
        counts = [fixed if fixed is not None else len(draft_of(proposer, State(key, []), MOST)) for key in keys]
        more = 0
        for key, count in zip(keys, counts, strict=True):
            kept = next((i for i in range(count) if rng.random() >= chance(step)), count)
            if count:
                proposer.accepted(key, kept)
            more += kept + 1
        read = sum(counts) + sequences
        took = (1 + slope * read) * rng.uniform(0.95, 1.05) + drafting * sum(counts)
        proposer.stepped(read, more, took)
        written, seconds = written + more, seconds + took
        drafted.append(sum(counts))
    return written / seconds, drafted


@functools.cache
def fixed_rates(chance, slope, sequences, drafting):
    return [rate(lambda step: chance, slope, k, sequences, drafting=drafting)[0] for k in range(MOST + 1)]


@pytest.mark.parametrize("sequences", [1, 6])
@pytest.mark.parametrize("slope", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("drafting", [0.0, 0.1])
def test_near_the_best_and_never_much_worse_than_none(sequences, slope, drafting):
    for chance in (0.0, 0.3, 0.6, 0.8, 0.95, 1.0):
        fixed = fixed_rates(chance, slope, sequences, drafting)
        found, drafted = rate(lambda step, chance=chance: chance, slope, None, sequences, drafting=drafting)
        assert found >= 0.96 * fixed[0]
        assert found >= 0.88 * max(fixed)
        if chance == 0:
            assert sum(drafted) * slope < 0.03 * len(drafted) * sequences
            assert sum(drafted[300:]) > 0  # it is tried again


def test_it_finds_out_when_drafts_begin_to_pay_and_when_they_stop():
    _, drafted = rate(lambda step: float(200 <= step < 400), 0.05, steps=600)
    assert sum(drafted[100:200]) < 30
    assert np.mean(drafted[300:400]) > 6
    assert sum(drafted[450:600]) < 40
    assert next(step for step in range(200, 400) if drafted[step] >= 4) < 260


def test_others_are_worth_learning_from():
    """Whoever comes later begins where the ones before it ended."""
    for chance, check in ((1.0, lambda count: count >= 6), (0.0, lambda count: count <= 1)):
        proposer = AdaptiveProposer(Eager())
        for key in range(6):
            for _ in range(20):
                count = len(draft_of(proposer, State(key, []), MOST))
                proposer.accepted(key, int(count * chance))
                proposer.stepped(1 + count, 1 + int(count * chance), 1 + 0.1 * (1 + count))
            proposer.forget(key)
        assert check(len(draft_of(proposer, State(99, []), MOST)))
        assert list(proposer._chances) == [99]


def test_it_passes_on_what_it_is_told():
    inner = Eager()
    proposer = AdaptiveProposer(inner)
    proposer.accepted(1, 3)  # of a sequence that never was
    assert len(draft_of(proposer, State(1, [1]), 0)) == 0
    proposer.accepted(1, 0)
    assert inner.asked == inner.told == []
    count = len(draft_of(proposer, State(1, [1]), MOST))
    assert 0 < count == inner.asked[0]
    proposer.accepted(1, 1)
    proposer.accepted(1, 1)  # of one draft once
    assert inner.told == [(1, 1)]
    proposer.forget(1, [7, 8])
    proposer.forget(2)
    assert inner.forgotten == [(1, (7, 8)), (2, ())]
    assert not proposer._chances


def test_a_proposer_with_nothing_to_say_is_asked_again():
    class Silent(Eager):
        def propose(self, states, counts):
            super().propose(states, counts)
            return [Draft()] * len(states)

    inner = Silent()
    proposer = AdaptiveProposer(inner)
    for _ in range(50):
        assert len(draft_of(proposer, State(0, []), 4)) == 0
        proposer.accepted(0, 0)
        proposer.stepped(1, 1, 1.0)
    assert len(inner.asked) == 50
    assert not inner.told


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.001, 9)), min_size=2, max_size=30))
def test_the_line_through_the_steps(steps):
    costs = Costs()
    for read, seconds in steps:
        costs.stepped(read, 2 * read, seconds)
    weight = costs.decay ** np.arange(len(steps))[::-1]
    read, seconds = np.array(steps).T
    mean_read, mean_seconds = (np.average(each, weights=weight) for each in (read, seconds))
    spread = np.average((read - mean_read) ** 2, weights=weight)
    together = np.average((read - mean_read) * (seconds - mean_seconds), weights=weight)
    assert np.allclose([costs.read, costs.written, costs.seconds], [mean_read, 2 * mean_read, mean_seconds])
    assert np.allclose([costs.spread, costs.together], [spread, together], atol=1e-9)
    assert costs.price >= 0


def test_the_price_of_a_token():
    costs = Costs()
    assert costs.price == 0.3
    for read in (1, 5, 9, 1, 5, 9) * 20:
        costs.stepped(read, 3, 1.0 + 0.1 * read)
    assert costs.price == pytest.approx(0.1 * 3 / 1.5, rel=0.03)  # 3 tokens in 1.5 seconds, one more takes 0.1
    same = Costs()
    for _ in range(20):
        same.stepped(5, 5, 2.0)
    assert same.price == pytest.approx(2.0 / 25 * 5 / 2.0)  # a guess
    down = Costs()
    for read in (1, 5, 9) * 20:
        down.stepped(read, 1, 10.0 - read)
    assert down.price == 0.0


def test_what_was_kept():
    kept = Kept(decay=1.0)
    for count in (0, 1, 2, 3, 3):
        kept.add(3, count)
    assert (kept.tried, kept.kept) == ([5, 4, 3], [4, 3, 2])
    kept.add(0, 0)
    kept.add(1, 1)
    assert (kept.tried, kept.kept) == ([6, 4, 3], [5, 3, 2])
    assert kept.rate(0, 0.5, 2.0) == 6 / 8
    assert kept.rate(9, 0.4, 2.0) == pytest.approx(0.4)


def test_the_pause_is_as_long_as_a_trial_was_dear():
    def pauses(price):
        chances, drafted = Chances(Kept()), []
        for _ in range(1000):
            chances.drafted = chances.length(4, price)
            drafted.append(chances.drafted)
            if chances.drafted:
                chances.told(0, price)
        assert sum(drafted[-2 * LONGEST_PAUSE - 4 :]) > 1
        return np.diff(np.flatnonzero(drafted))[-4:]

    assert set(pauses(0.1)) <= {10, 11}
    assert set(pauses(0.5)) <= {50, 51}
    assert set(pauses(30.0)) <= {LONGEST_PAUSE, LONGEST_PAUSE + 1}
    assert 0 < TRIALS < 0.05


def test_after_a_trial_that_went_well_comes_another():
    chances = Chances(Kept())
    for kept in (0,) * 40:
        chances.drafted = 1
        chances.told(kept, 0.5)
    waited = 0
    while not (count := chances.length(4, 0.5)):
        waited += 1
    assert waited >= LONGEST_PAUSE - 2
    for _ in range(3):
        chances.drafted = count
        chances.told(1, 0.5)
        count = chances.length(4, 0.5)
        assert count >= 1
