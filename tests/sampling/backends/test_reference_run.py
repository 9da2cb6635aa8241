"""A step of the reference against the naive one: token, logprobs, the new states of the stages, and the mask."""

from __future__ import annotations

import math
from collections import Counter

import naive_sampler as naive
import numpy as np
import pytest
import tiers
from pipeline_cases import KEYED, OTHERS, case

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.stages import (
    STAGES,
    AdaptiveP,
    BadWords,
    Dry,
    DynamicTemperature,
    Greedy,
    Gumbel,
    Logprobs,
    Mirostat,
    NoRepeatNgram,
    Repetition,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    Xtc,
)

LOG_P = 1e-12


def past(history):
    return naive.Past(list(history.prompt), list(history.output), history.mask)


def same(actual, expected):
    """Compare a TokenLogprob and a naive (id, logprob, rank)."""
    assert actual[::2] == expected[::2]
    assert actual.logprob == pytest.approx(expected[1], rel=LOG_P, abs=LOG_P)


@pytest.mark.slow
def test_token_logprobs_and_states_equal_the_naive_ones():
    fired, tokens = Counter(), 0
    count = tiers.count(1000, 3000)
    for seed in range(10000, 10000 + count):
        logits, stages, history, at = case(seed)
        key = getattr(stages[-1], "seed", 0)
        try:
            naively = naive.step(logits, stages, key, at, past(history))
        except naive.BadRowError:
            with pytest.raises(reference.RowError):
                reference.run(logits, stages, key, at, history)
            continue
        result = reference.run(logits, stages, key, at, history)
        assert result.token == naively.token, (seed, stages)
        tokens += 1
        assert (result.logprobs is None) == (naively.logprobs is None)
        if naively.logprobs is not None:
            chosen, top, requested = naively.logprobs
            same(result.logprobs.chosen, chosen)
            for actual, expected in ((result.logprobs.top, top), (result.logprobs.requested, requested)):
                assert len(actual) == len(expected)
                for pair in zip(actual, expected, strict=True):
                    same(*pair)
            fired["report"] += 1
        for old, new, state in zip(stages, result.stages, naively.states, strict=True):
            if state is None:
                assert new is old
                continue
            attribute = "mean" if old.name == "adaptive_p" else "mu"
            assert getattr(new, attribute) == pytest.approx(state, rel=1e-6, abs=1e-12), (seed, stages)
            assert all(getattr(new, a) == getattr(old, a) for a in old.parameters if a != attribute)
            fired[attribute] += getattr(new, attribute) != getattr(old, attribute)
    assert tokens > count * 2 / 3
    assert min(fired[kind] for kind in ("report", "mu", "mean")) > count / 43, fired


@pytest.mark.slow
def test_every_stage_has_an_effect_in_the_random_cases():
    fired = Counter()
    for seed in range(3000):
        logits, stages, history, _ = case(seed)
        try:
            *found, _ = naive.rows(logits, stages, past(history)._replace(u=0.1))
        except naive.BadRowError:
            continue
        for stage, before, after in zip(stages, found, found[1:], strict=False):
            fired[stage.name] += before.order != after.order or before.x != after.x
    assert {name: fired[name] for name in OTHERS if fired[name] < 15} == {"logprobs": 0}


def test_a_pipeline_makes_one_random_decision_from_stream_2():
    """The random decision of XTC is u(seed, step, xtc, 0), and reading it changes nothing else in the step."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    outcomes = Counter()
    for step in range(400):
        u = naive.uniform(9, step, 2, 0)
        token = reference.draw(logits, (Xtc(0.4, 0.1), Greedy()), 9, step)
        assert token == (2 if u < 0.4 else 0)
        outcomes[token] += 1
    assert 120 < outcomes[2] < 200


@pytest.mark.parametrize("order", list(nc.PRESETS))
def test_states_follow_a_run_of_many_tokens(order):
    """Mirostat and adaptive-p over 60 steps, each from the state of the step before."""
    rng = np.random.default_rng(3)
    stateful = {"mirostat_tau": 2.0, "mirostat_eta": 0.3} if order in ("canonical", "llama.cpp") else {}
    values = {**stateful, "adaptive_p_target": 0.3} if stateful else {"top_k": 5}
    stages = nc.SamplingParams(order=order, temperature=1.3, seed=5, logprobs=2, **values).build_pipeline()
    naively, output = stages, []
    for at in range(60):
        logits = rng.normal(size=50).astype(np.float32) * 2
        expected_step = naive.step(logits, naively, 5, at, naive.Past([], output))
        result = reference.run(logits, stages, 5, at, History([], output))
        assert result.token == expected_step.token
        changes = {"mirostat": "mu", "adaptive_p": "mean"}
        for new, state in zip(result.stages, expected_step.states, strict=True):
            assert state is None or getattr(new, changes[new.name]) == pytest.approx(state, rel=1e-9)
        assert [stage.name for stage in result.stages] == [stage.name for stage in stages]
        stages = naively = result.stages
        output = [*output, result.token]
    assert ("mirostat" in [stage.name for stage in stages]) == bool(stateful)


def test_mirostat_measures_the_surprise_among_the_surviving_tokens():
    logits = np.log2(np.array([0.5, 0.25, 0.125, 0.125])) * math.log(2)
    moved = reference.run(logits, (Mirostat(0.5, 0.25), Greedy()), 0, 0).stages[0]
    assert moved == Mirostat(0.5, 0.25, 1.0 - 0.25 * (0.0 - 0.5))  # only the token of bit 1 survives: zero surprise
    moved = reference.run(logits, (Mirostat(1.25, 0.25), Greedy()), 0, 0).stages[0]
    assert moved.mu == pytest.approx(2.5 - 0.25 * (math.log2(1.5) - 1.25))


def test_adaptive_p_uses_the_probability_before_it():
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    stage = AdaptiveP(0.3, 0.5)
    result = reference.run(logits, (stage, Greedy()), 0, 0)
    assert (result.token, result.stages[0].mean) == (1, pytest.approx(0.5 * 0.3 + 0.5 * 0.3))
    result = reference.run(logits, (TopK(2), AdaptiveP(0.3, 0.5, 0.0), Greedy()), 0, 0)
    assert (result.token, result.stages[1].mean) == (0, pytest.approx(0.5 * 0.0 + 0.5 * 0.6 / 0.9))


def surviving_ids(p, *stages, **history_fields):
    logits = np.log(np.array(p, np.float64))
    return sorted(reference.survivors(logits, (*stages, Gumbel(0)), History(**history_fields), 0.0).ids_N.tolist())


def test_threshold_values_of_truncations():
    """Round numbers are at the thresholds; the tolerance of 1e-6 decides (decision 3)."""
    assert surviving_ids([0.25] * 4, Typical(0.5)) == [0, 1]
    assert surviving_ids([0.5, 0.5], TopH(0.5)) == [0]
    assert surviving_ids([0.25] * 4, TopH(0.75)) == [0, 1, 2]
    assert surviving_ids([0.4, 0.3, 0.2, 0.1], Xtc(1.0, 0.2)) == [2, 3]
    assert surviving_ids([0.4, 0.3, 0.2, 0.1], Xtc(1.0, 0.2, (0,))) == [0, 2, 3]
    assert surviving_ids([0.4, 0.3, 0.2, 0.1], Xtc(1.0, 0.0)) == [3]
    assert surviving_ids([0.4, 0.3, 0.2, 0.1], Xtc(1.0, 0.45)) == [0, 1, 2, 3]
    assert surviving_ids([0.4, 0.3, 0.3], TopK(2, with_ties=True)) == [0, 1, 2]
    assert surviving_ids([0.4, 0.3, 0.3], TopK(1, with_ties=True)) == [0]
    assert surviving_ids([0.5, 0.2, 0.2, 0.1], TopK(2), TopP(0.7, of_full_mass=True)) == [0, 1]
    assert surviving_ids([0.5, 0.2, 0.2, 0.1], TopK(2), TopP(0.7)) == [0]
    assert surviving_ids([0.5, 0.2, 0.2, 0.1], TopK(2), TopP(0.99, of_full_mass=True)) == [0, 1]
    # a scale restarts the total mass at the surviving tokens
    assert surviving_ids([0.5, 0.2, 0.2, 0.1], TopK(2), Temperature(0.9999999), TopP(0.7, of_full_mass=True)) == [0]


def penalised(stage, prompt, output):
    """The reduction of each score by the stage, by token."""
    x = np.linspace(0, -1, 8)
    survivors = reference.survivors(x, (stage, Gumbel(0)), History(prompt, output))
    after = dict(zip(survivors.ids_N.tolist(), survivors.x_N.tolist(), strict=True))
    reductions = {token: float(np.float32(x[token])) - after.get(token, -math.inf) for token in range(8)}
    return {token: pytest.approx(by, rel=1e-6) for token, by in reductions.items() if by}


def test_histories_computed_by_hand():
    repeat = [1, 2, 3, 1, 2]
    assert penalised(Dry(1.0, 2.0, 2), repeat, []) == penalised(Dry(1.0, 2.0, 2), repeat[:3], repeat[3:]) == {3: 1.0}
    assert penalised(Dry(0.5, 2.0, 1), repeat, []) == {3: 1.0}
    assert penalised(Dry(1.0, 2.0, 3), repeat, []) == {}
    assert penalised(Dry(1.0, 2.0, 2, ((3,),)), repeat, []) == {}  # 3 would complete a breaker
    assert penalised(Dry(1.0, 2.0, 2, ((2, 3),)), repeat, []) == {}
    assert penalised(Dry(1.0, 2.0, 2, ((5, 3),)), repeat, []) == {3: 1.0}
    assert penalised(Dry(1.0, 2.0, 1, ((1,),)), repeat, []) == {3: 1.0}  # one token back, then a breaker ends
    assert penalised(Dry(1.0, 2.0, 1, ((2,),)), repeat, []) == {}
    assert penalised(Dry(1.0, 2.0, 2, None, 4), repeat, []) == {}  # the window has 2 3 1 2
    assert penalised(Dry(1.0, 2.0, 1, None, 4), repeat, []) == {3: 1.0}
    # a breaker ends at its last token, also if it starts before the window
    assert penalised(Dry(1.0, 2.0, 1, ((6, 4, 4, 4),), 2), [6, 4, 4], []) == {}
    assert penalised(Dry(1.0, 2.0, 1, ((6, 4, 4),), 3), [6, 4, 4, 4], []) == {4: 1.0}
    assert penalised(Dry(1.0, 2.0, 1), [4] * 6, []) == {4: 16.0}  # five tokens occurred before, one position earlier
    longest = penalised(Dry(1.0, 2.0, 1), [1, 2, 5, 2, 6, 1, 2], [])
    assert longest == {5: 2.0, 6: 1.0}
    assert penalised(NoRepeatNgram(1), [3], [5]) == {3: math.inf, 5: math.inf}
    assert penalised(NoRepeatNgram(3), repeat, []) == {3: math.inf}
    assert penalised(NoRepeatNgram(4), repeat, []) == {}
    bad = BadWords(((1, 2), (2,), (7, 7, 7)))
    assert penalised(bad, [1], []) == {2: math.inf}
    assert penalised(BadWords(((1, 2),)), [1], []) == {}  # the prompt does not count
    assert penalised(BadWords(((1, 2),)), [], [1]) == {2: math.inf}
    assert penalised(bad, [7], [7, 7]) == {2: math.inf, 7: math.inf}
    assert penalised(Repetition(2.0, 2), [1], [2, 3]) == penalised(Repetition(2.0), [], [2, 3])
    assert penalised(Repetition(2.0, 0), [1], [2, 3]) == {}


@pytest.mark.parametrize("multiplier", [1e-9, 1.0, 1e30, 1.7e308])
def test_the_penalty_of_dry_stays_finite(multiplier):
    for base in (1.0 + 1e-9, 1.75, 1e30, 1.7e308):
        [by] = penalised(Dry(multiplier, base, 1), [4] * 500, []).values()
        assert by.expected <= math.exp(87) * (1 + 1e-9)
        assert by.expected >= min(multiplier, math.exp(87)) * (1 - 1e-9)


def test_dynamic_temperature_at_its_limits():
    sure, unsure = np.array([0, -1e4, -1e4]), np.zeros(3)
    for low, high, exponent in ((0.5, 2.0, 1.0), (0.5, 2.0, 4.0)):
        stage = DynamicTemperature(low, high, exponent)
        assert reference.survivors(sure, (stage,)).x_N.tolist() == pytest.approx([0, -1e4 / low, -1e4 / low])
        near = reference.survivors(unsure + np.array([0, 0, 1e-7]), (stage,)).x_N
        assert near[1] == pytest.approx(-1e-7 / high, rel=1e-2)
    assert reference.survivors(unsure, (DynamicTemperature(0.0, 0.0),)).ids_N.tolist() == [0]


def test_logprobs_of_huge_equal_scores_are_uniform():
    """Scores so large that adding a logarithm has no effect."""
    tap = reference.run(np.full(4, 1e30), (Logprobs(2, (3,)), Greedy()), 0, 0).logprobs
    assert tap.chosen == (0, pytest.approx(-math.log(4)), 1)
    assert [tuple(one) for one in tap.top] == [(i, pytest.approx(-math.log(4)), i + 1) for i in range(2)]
    assert tap.requested == ((3, pytest.approx(-math.log(4)), 4),)


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in KEYED and STAGES[name]().neutral])
def test_a_neutral_stage_has_no_effect(name):
    logits = np.array([3, 1, 2, 2], np.float32)
    result = reference.run(logits, (STAGES[name](), Gumbel(4)), 4, 1, History([1, 1, 1], [1, 1]))
    assert result == reference.run(logits, (Gumbel(4),), 4, 1)._replace(stages=result.stages)
    assert result.stages[0] == STAGES[name]()
