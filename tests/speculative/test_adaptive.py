"""Adaptive speculation length with simulated step times: near the optimum, never much slower than without drafts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_proposers import draft_of
from timed_proposers import Eager, Slow, append_tokens

from nucleate.speculative import adaptive_proposer
from nucleate.speculative.adaptive_measurements import (
    BASELINE_INTERVAL,
    BASELINE_STEPS,
    DECAY,
    FIXED_COST_TOKENS,
    MAX_CREDIT_STEPS,
    MAX_DEBT_STEPS,
    SHADOW_TIME_SHARE,
    WARMUP_STEPS,
    AcceptanceCounts,
    AcceptanceRates,
    StepCosts,
    num_matching_tokens,
)
from nucleate.speculative.adaptive_proposer import (
    MAX_REST_STEPS,
    MAX_SHADOW_TOKENS,
    AdaptiveProposer,
)
from nucleate.speculative.draft import ROOT, Draft, DraftContext

MOST = 8


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_new_sequences_start_with_shared_acceptance_rates(chance):
    """A new sequence starts with the acceptance rates of the earlier ones."""
    proposer = AdaptiveProposer(Eager(lambda: chance))
    for key in range(6):
        state = DraftContext(key, [0])
        for _ in range(20):
            one_step(proposer, state, cost=0.1)
        proposer.forget(key)
    count = len(draft_of(proposer, DraftContext(99, [0]), MOST))
    assert count >= 6 if chance else count <= 1
    assert list(proposer._rates) == [99]


def test_calls_are_forwarded_to_the_proposer():
    inner = Eager()
    proposer = AdaptiveProposer(inner)
    proposer.accepted(1, 3)  # an unknown sequence
    steps(proposer, 0.1)
    assert len(draft_of(proposer, DraftContext(1, [1]), 0)) == 0
    proposer.accepted(1, 0)
    assert inner.requested == inner.accepted_counts == []
    proposer._shadow_budget.seconds = 0.0
    shadow = draft_of(proposer, DraftContext(2, [1]), MOST)  # the first draft shows what the draft method costs
    assert (len(shadow), inner.accepted_counts.pop()) == (0, (2, 0))
    count = len(draft_of(proposer, DraftContext(1, [1]), MOST))
    assert 0 < count <= inner.requested[1]
    proposer.accepted(1, 1)
    proposer.accepted(1, 1)  # each draft counts once
    assert inner.accepted_counts == [(1, 1)]
    proposer.forget(1, [7, 8])
    proposer.forget(2)
    assert inner.forgotten == [(1, (7, 8)), (2, ())]
    assert not proposer._rates


def one_step(proposer, state, most=MOST, cost=0.0, having=0.0):
    """A step of a single sequence: its draft, which is verified. A step takes 1 + cost per token + having a draft."""
    draft = draft_of(proposer, state, most) if proposer.active() else Draft()
    accepted = num_matching_tokens(draft, range(1 << 30), len(state.token_ids))
    if draft:
        proposer.accepted(state.key, accepted)
    append_tokens(state.token_ids, accepted + 1)
    proposer.end_step(1, 1 + len(draft), 1.0 + cost * len(draft) + having * bool(draft))
    return len(draft)


def steps(proposer, token_cost):
    """Record steps in which each token costs ``token_cost`` of a step."""
    for drafted in (1, 9) * 20:
        proposer.costs.record(1, 1, 1.0)
        proposer.costs.record(1, 1 + drafted, 1.0 + token_cost * drafted)
    proposer.costs.record(1, 1, 1.0)
    assert proposer.costs.token_cost(1) == pytest.approx(token_cost, rel=0.1)


def run_without_drafts(proposer, states, count):
    """Run steps of one second without verified drafts."""
    for _ in range(count):
        if proposer.active():
            assert not any(proposer.propose(states, [MOST] * len(states)))
        for state in states:
            append_tokens(state.token_ids, 1)
        proposer.end_step(len(states), len(states), 1.0)


@pytest.mark.parametrize("empty", [False, True])
def test_shadow_drafts_take_a_small_share_of_the_time(monkeypatch, empty):
    """Also for a proposer as slow as a step, for the first drafts of sequences, and for proposals without a draft."""
    proposer = AdaptiveProposer(inner := Slow(monkeypatch, 1.0))
    if empty:
        inner.draft = lambda start, count: Draft()
    steps(proposer, 0.1 if empty else 1.0)
    for key in range(100):
        run_without_drafts(proposer, [DraftContext(key, [0])], 5)
    run_without_drafts(proposer, [DraftContext(key, [0]) for key in range(1, 5)], 1000)
    assert 1500 * 0.8 * SHADOW_TIME_SHARE < inner.clock < 1500 * 1.2 * SHADOW_TIME_SHARE + 2


class Observing(Slow):
    """Takes as long to process hidden states."""

    layers = (1,)
    reads = 0

    def observe(self, readings):
        self.reads += 1
        self.clock += self.seconds


@pytest.mark.slow
@pytest.mark.parametrize("pays", [False, True])
def test_hidden_states_are_passed_before_shadow_drafts(monkeypatch, pays):
    """All of them if drafts pay; otherwise drafting and processing take a small share of the time."""
    proposer = AdaptiveProposer(inner := Observing(monkeypatch, 0.05, lambda: float(pays)))
    steps(proposer, 0.1 if pays else 1.0)
    ids, calls = [0], []
    for _ in range(4000):
        draft = draft_of(proposer, DraftContext(0, ids), 4) if proposer.active() else Draft()
        if not proposer.is_idle():
            proposer.observe([])
        calls.append((inner.reads, len(inner.requested)))
        accepted = num_matching_tokens(draft, range(1 << 20), len(ids))
        proposer.accepted(0, accepted)
        append_tokens(ids, accepted + 1)
        proposer.end_step(1, 1 + len(draft), 1.0 + 0.1 * len(draft))
    reads = [after - before for (before, _), (after, _) in pairwise(calls)]
    drafting_steps = [index for index, ((_, before), (_, after)) in enumerate(pairwise(calls)) if after > before]
    if pays:
        assert sum(reads) > 0.99 * len(reads)
        return
    assert 4000 * 0.8 * SHADOW_TIME_SHARE < inner.clock < 4000 * 1.2 * SHADOW_TIME_SHARE + 2
    assert len(drafting_steps) > 2
    for index in drafting_steps[1:]:
        assert (
            sum(reads[index - WARMUP_STEPS // 4 : index]) == WARMUP_STEPS // 4
        )  # processing takes time, so the step ends later


def test_unused_shadow_time_is_capped(monkeypatch):
    proposer = AdaptiveProposer(inner := Slow(monkeypatch, 2 * SHADOW_TIME_SHARE))
    for _ in range(1000):
        proposer.end_step(1, 1, 1.0)
    steps(proposer, 1.0)
    run_without_drafts(proposer, [DraftContext(0, [0])], 200)
    assert inner.clock < (200 + MAX_CREDIT_STEPS + 4) * SHADOW_TIME_SHARE


def test_drafts_grow_by_doubling():
    """The cost of more tokens than in any earlier step is unknown."""
    proposer, ids, drafted = AdaptiveProposer(Eager()), [0], []
    proposer.end_step(1, 1, 1.0)
    draft_of(proposer, DraftContext(1, [0]), MOST)
    for _ in range(8):
        drafted.append(len(draft_of(proposer, DraftContext(0, ids), MOST)))
        proposer.accepted(0, drafted[-1])
        append_tokens(ids, drafted[-1] + 1)
    assert drafted[:4] == [1, 2, 4, 8]


def test_overspent_shadow_time_is_capped(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(adaptive_proposer, "perf_counter", lambda: clock[0])
    proposer, state = AdaptiveProposer(Eager(lambda: 0.0)), DraftContext(0, [0])
    steps(proposer, 1.0)
    proposer.propose([state], [MOST])
    append_tokens(state.token_ids, 1)

    def late():
        clock[0] += 1e9
        return 0.0

    proposer._proposer.chance = late
    proposer.propose([state], [MOST])
    waited = 0
    while not proposer.active():
        proposer.end_step(1, 1, 1.0)
        waited += 1
    assert MAX_DEBT_STEPS - 2 <= waited <= MAX_DEBT_STEPS + 2


def test_sampled_shadow_drafts_are_verified():
    """Tokens sampled without a draft do not show whether a sampled draft would be accepted."""

    class Sampled(Eager):
        def draft(self, start, count):
            tokens = super().draft(start, count).tokens
            return Draft(tokens, None, tuple(np.ones(2) for _ in tokens))

    inner = Sampled(lambda: 0.0)
    proposer, drafted = AdaptiveProposer(inner), []
    steps(proposer, 1.0)
    for _ in range(400):
        draft = draft_of(proposer, DraftContext(0, [0]), MOST) if proposer.active() else Draft()
        proposer.accepted(0, 0)
        drafted.append(len(draft))
        proposer.end_step(1, 1 + len(draft), 1.0 + len(draft))
    assert set(drafted) == {0, 1}
    assert 0.5 * SHADOW_TIME_SHARE < sum(drafted) / len(drafted) < 3 * SHADOW_TIME_SHARE + 0.01


def test_empty_proposals_are_retried():
    class Empty(Eager):
        def draft(self, start, count):
            return Draft()

    inner = Empty()
    proposer = AdaptiveProposer(inner)
    for _ in range(50):
        assert len(draft_of(proposer, DraftContext(0, []), 4)) == 0
        proposer.accepted(0, 0)
        proposer.end_step(1, 1, 1.0)
    assert len(inner.requested) == 50
    assert not inner.accepted_counts


TREE = Draft((1, 2, 3, 4, 2), (ROOT, ROOT, 0, 1, 2))


@pytest.mark.parametrize(
    ("ids", "accepted"), [([], 0), ([3], 0), ([1], 1), ([2, 4], 2), ([2, 3], 1), ([1, 3, 2], 3), ([1, 3, 2, 9], 3)]
)
def test_shadow_draft_comparison(ids, accepted):
    assert num_matching_tokens(TREE, [7, 7, *ids], 2) == accepted
    chances = AcceptanceRates(everyone := AcceptanceCounts(0.9))
    chances.shadow_draft, chances.shadow_start = TREE, 2
    chances.compare([7, 7, *ids])
    decided = accepted == TREE.depth or accepted < len(ids)
    assert bool(chances.shadow_draft) is not decided
    assert everyone.verified == ([1.0] * min(3, accepted + 1) if decided else [])
    assert sum(everyone.accepted) == (accepted if decided else 0)


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.001, 9)), min_size=2, max_size=30))
def test_cost_line_fit(added):
    """The fit includes a step with drafts of no tokens."""
    costs = StepCosts({1: 1e9}, first_step_seen=True)
    for drafted, seconds in added:
        costs.record(1, 1 + drafted, (1 + seconds) * 1e9)
    weight = DECAY ** np.arange(len(added) + 1)[::-1]
    x, y = np.array([(0, 0.0), *((drafted / (1 + FIXED_COST_TOKENS), seconds) for drafted, seconds in added)]).T
    means = [np.average(each, weights=weight) for each in (x, y, x * x, x * y)]
    assert np.allclose([costs.x, costs.y, costs.xx, costs.xy], means)


def test_token_and_fixed_cost():
    costs = StepCosts()
    assert (costs.token_cost(1), costs.fixed_cost) == (1 / (1 + FIXED_COST_TOKENS), 0.0)  # an initial estimate
    for drafted in (1, 4, 8) * 60:
        costs.record(3, 3, 1.5)
        costs.record(3, 3 + drafted, 2.0 + 0.1 * drafted)
    assert costs.token_cost(3) == pytest.approx(0.1 * 3 / 1.5, rel=0.1)  # 3 tokens in 1.5 seconds, one more takes 0.1
    assert costs.fixed_cost == pytest.approx(0.5 / 1.5, rel=0.1)
    for _ in range(4000):
        costs.record(3, 3, 1.5)
    assert costs.fixed_cost < 0.1 * 0.5 / 1.5  # could be an outlier
    down = StepCosts()
    for drafted in (1, 5, 9) * 20:
        down.record(1, 1, 10.0)
        down.record(1, 1 + drafted, 20.0 - drafted)
    assert down.token_cost(1) == 0.0


def test_new_batch_sizes_get_a_baseline_step():
    costs = StepCosts()
    costs.record(3, 5, 1.0)
    assert costs.steps_since_baseline == BASELINE_INTERVAL
    costs.record(3, 3, 1.0)
    assert (costs.steps_since_baseline, costs.fixed_cost) == (0, 0.0)


def test_outlier_steps_are_capped():
    costs = StepCosts({1: 1.0})
    assert costs.capped_seconds(1, 3, 1000.0) == 6.0
    assert costs.capped_seconds(1, 3, 5.0) == 5.0
    assert costs.capped_seconds(2, 3, 1000.0) == 1000.0


@pytest.mark.parametrize("plain", [3, 30])
@pytest.mark.parametrize("compiling", [0.0, 9.0, 1000.0])
def test_first_step_with_drafts_is_ignored(plain, compiling):
    """A few steps without drafts, then one with the first draft, which compiles or loads kernels."""
    proposer, state, drafted = AdaptiveProposer(Eager()), DraftContext(0, [0]), []
    for _ in range(plain):
        proposer.end_step(1, 1, 1.0)
    for _ in range(20):
        drafted.append(one_step(proposer, state, cost=0.02, having=0.0 if any(drafted) else compiling))
    assert sum(drafted[-10:]) > 6 * MOST


@given(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 2))
def test_best_length_maximizes_the_gain(rates, token_cost, fixed):
    counts = AcceptanceCounts(decay=1.0)
    counts.verified = [1e9] * len(rates)
    counts.accepted = [1e9 * rate for rate in rates]
    gains = [0.0] + [sum(np.cumprod(rates[:k])) - token_cost * k - fixed for k in range(1, len(rates) + 1)]
    count, gain = AcceptanceRates(counts).best_length(len(rates), token_cost, fixed)
    assert gain == pytest.approx(sum(np.cumprod(rates[:count])), abs=1e-6)
    assert gains[count] == pytest.approx(max(gains), abs=1e-6)


def test_acceptance_counts():
    counts = AcceptanceCounts(decay=1.0)
    for count in (0, 1, 2, 3, 3):
        counts.add(3, count)
    assert (counts.verified, counts.accepted) == ([5, 4, 3], [4, 3, 2])
    counts.add(0, 0)
    counts.add(1, 1)
    assert (counts.verified, counts.accepted) == ([6, 4, 3], [5, 3, 2])
    assert counts.rate(0, 0.5, 2.0) == 6 / 8
    assert counts.rate(9, 0.4, 2.0) == pytest.approx(0.4)


@pytest.mark.parametrize("pays", [False, True])
def test_new_sequences_get_drafts_if_drafts_paid(pays):
    """Also without time left for shadow drafts; hidden states are passed from the first token on."""
    inner = Eager(lambda: float(pays))
    inner.layers = (1,)
    proposer, state = AdaptiveProposer(inner), DraftContext(0, [0])
    steps(proposer, 0.1 if pays else 1.0)
    for _ in range(40):
        one_step(proposer, state, 4, cost=0.1)
    proposer.forget(0)
    assert not proposer.propose([], [])  # nothing is running
    proposer._shadow_budget.seconds = -1.0
    assert not proposer.active()
    assert proposer.is_idle()
    assert proposer.is_idle(new_sequence=True) is not pays
    proposer.sequence_started()
    assert proposer.active() is pays
    assert bool(draft_of(proposer, DraftContext(1, [0]), 4)) is pays
    assert proposer.active() is pays
    assert proposer.is_idle() is not pays


@pytest.mark.parametrize("read", [0, 1])
def test_failed_steps_are_ignored(read):
    inner = Eager()
    inner.layers = (1,)
    proposer = AdaptiveProposer(inner)
    proposer.end_step(2, read, 1.0)
    assert proposer.costs == StepCosts()
    proposer.is_idle(new_sequence=True)
    proposer.end_step(1, 1, 1.0)
    draft_of(proposer, DraftContext(1, [0]), 4)
    assert draft_of(proposer, DraftContext(0, [0]), 4)


def test_a_delayed_step_does_not_count_as_the_time_without_drafts():
    costs = StepCosts()
    costs.record(1, 1, 10.0)  # delayed by other processes
    for _ in range(2):
        costs.record(1, 1, 1.0)
    assert costs.baseline[1] == 1.0
    for seconds in (1.0, 9.0, 1.0, 8.0, 1.0):
        costs.record(1, 1, seconds)
    assert costs.baseline[1] == 1.0
    for _ in range(BASELINE_STEPS // 2 + 1):  # the machine is slower from now on
        costs.record(1, 1, 3.0)
    assert costs.baseline[1] == 3.0


def test_a_slow_draft_method_is_not_verified_before_it_is_measured(monkeypatch):
    """A shadow draft comes first. It takes three steps, so that even four accepted tokens gain little."""
    proposer, state = AdaptiveProposer(inner := Slow(monkeypatch, 4.0, lambda: 1.0)), DraftContext(0, [0])
    assert not any(one_step(proposer, state, 4) for _ in range(2000))
    assert len(inner.requested) > 1


def test_rest_lasts_until_the_next_shadow_draft(monkeypatch):
    """The number of steps is the same as with a call in each step; the pause of lost drafts passes too."""
    proposer = AdaptiveProposer(inner := Slow(monkeypatch, 0.2))
    steps(proposer, 1.0)
    proposer._loss_limit.pause = 1000
    state, calls, rests = DraftContext(0, [0]), [], []
    step = 0
    while step < 400:
        if proposer.active():
            assert not any(proposer.propose([state], [MOST]))
            calls.append(step)
        proposer.end_step(1, 1, 1.0, rests[-1] if rests else 0)
        append_tokens(state.token_ids, 1)
        rests.append(proposer.rest)
        append_tokens(state.token_ids, rests[-1])
        step += 1 + rests[-1]
    assert max(rests) <= MAX_REST_STEPS
    assert len(rests) < 30
    assert all(38 <= after - before <= 43 for before, after in pairwise(calls[1:]))  # 0.2 / SHADOW_TIME_SHARE
    assert proposer._loss_limit.pause == pytest.approx(1000 - step, abs=MAX_REST_STEPS + 1)
    assert len(inner.requested) == len(calls)


def test_no_rest_while_drafts_pay_or_a_sequence_is_asked_again():
    proposer = AdaptiveProposer(Eager())
    assert proposer.rest == 0  # nothing is known
    steps(proposer, 0.1)
    proposer.end_step(1, 1, 1.0)
    draft_of(proposer, DraftContext(1, [0]), MOST)
    draft_of(proposer, DraftContext(0, [0]), MOST)
    proposer._shadow_budget.seconds = -1.0
    proposer.end_step(1, 9, 1.8)
    assert proposer.rest == 0
    proposer._num_drafted, proposer._retry_step = 0, proposer._num_steps + 5
    assert proposer.rest == 5


def test_sequences_without_a_proposal_are_asked_less_and_less_often(monkeypatch):
    """And the time that this takes counts as lost."""

    class Rare(Slow):
        def draft(self, start, count):
            return super().draft(start, count) if self.proposes else Draft()

    inner = Rare(monkeypatch, 0.02, lambda: 1.0)
    inner.proposes = True
    proposer, state, asked = AdaptiveProposer(inner), DraftContext(0, [0]), []
    steps(proposer, 0.05)
    for step in range(300):
        inner.proposes = step < 40
        draft = Draft()
        if proposer.active():
            before = len(inner.requested)
            draft = draft_of(proposer, state, 4)
            asked += [step] * (len(inner.requested) - before)
        proposer.accepted(0, len(draft))
        append_tokens(state.token_ids, 1 + len(draft))
        proposer.end_step(1, 1 + len(draft), 1.0 + 0.05 * len(draft))
        proposer._shadow_budget.seconds = -1.0 if step else 0.0  # one shadow draft
        if step == 39:
            loss = proposer._loss_limit.loss
    late = [step for step in asked if step >= 40]
    gaps = [after - before for before, after in pairwise(late)]
    assert gaps[:5] == [2, 4, 8, 16, 32]
    assert set(gaps[5:]) == {32}
    assert proposer._loss_limit.loss > loss


def test_the_last_shadow_draft_of_a_sequence_counts():
    proposer = AdaptiveProposer(Eager())
    steps(proposer, 1.0)
    ids = [7, 8, 9]  # a prompt of two tokens
    draft_of(proposer, DraftContext(5, ids, 2), MOST)
    assert not proposer._shared_counts.verified
    append_tokens(ids, 6)
    proposer.forget(5, ids[2:])
    assert proposer._shared_counts.accepted == [1.0] * MAX_SHADOW_TOKENS


def test_baseline_of_the_nearest_number_of_sequences():
    costs = StepCosts()
    assert costs.nearest_baseline(3) is None
    for sequences, seconds in ((1, 1.0), (4, 2.0), (9, 3.0)):
        costs.record(sequences, sequences, seconds)
    assert [costs.nearest_baseline(count) for count in (1, 2, 3, 4, 6, 7, 64)] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0]


def test_drafts_with_another_number_of_sequences():
    """Their steps without drafts are not measured yet; the next step measures one."""
    proposer = AdaptiveProposer(Eager())
    steps(proposer, 0.05)
    proposer.end_step(1, 1, 1.0)
    states = [DraftContext(key, [0]) for key in range(3)]
    draft_of(proposer, states[0], MOST)
    assert any(proposer.propose(states, [MOST] * 3))
    proposer.end_step(3, 9, 1.3)
    assert not proposer.active() or not any(proposer.propose(states, [MOST] * 3))


class ThreeSiblings(Eager):
    """Three siblings at each of four depths; the second one is correct up to a depth."""

    def draft(self, start, count):
        parents = [-1 if depth == 0 else 3 * depth - 2 for depth in range(4) for _ in range(3)]
        return Draft(tuple(range(12))[:count], tuple(parents)[:count])


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_adaptive_trees_are_truncated(right):
    """All tokens are requested, and each depth costs three."""
    proposer = AdaptiveProposer(made := ThreeSiblings(), trees=True)
    depths = []
    for _ in range(60):
        [draft] = proposer.propose([DraftContext(7, [1, 2, 3])], [12])
        depths.append(draft.depth)
        assert len(draft) == 3 * draft.depth
        proposer.accepted(7, min(right, draft.depth))
        proposer.end_step(1, 1 + len(draft), 1.0 + 0.05 * len(draft))
    assert proposer._tokens_per_depth == pytest.approx(3.0, abs=0.1) or not right
    assert max(made.requested) == 12
    assert max(depths[-20:]) == right or (right == 0 and max(depths[-20:]) <= 1)
