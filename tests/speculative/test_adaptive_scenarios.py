"""Adaptive speculation in random simulated engines: never much slower than without drafts, fast where drafts pay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from timed_proposers import Slow, append_tokens

from nucleate.speculative.adaptive_measurements import num_matching_tokens
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.draft import Draft, DraftContext

MOST, STEPS = 7, 2000


@dataclass
class Scenario:
    """An engine with a draft method. Times in units of a step without its tokens. The correct token at position i is i.

    A step takes 1 + slope per token, the draft method ``method``, and having drafts ``having``. All of it varies by
    ``noise``, and takes three times as long in a share ``delayed`` of the steps.
    """

    chance: float | Callable[[int], float]  #: that a draft token is accepted, if all before it are; by the step
    empty: float  #: share of empty proposals
    slope: float
    method: float
    having: float
    noise: float
    delayed: float
    sequences: int
    length: int  #: of a sequence
    drafting: float = 0.0  #: how much longer a step takes for a draft token than for another one

    @staticmethod
    def of(rng: random.Random) -> Scenario:
        return Scenario(
            chance=rng.choice([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
            empty=rng.choice([0.0, 0.0, 0.5, 0.9, 0.97]),
            slope=rng.choice([0.01, 0.05, 0.2, 0.5]),
            method=rng.choice([0.01, 0.05, 0.2, 1.0, 3.0]),
            having=rng.choice([0.0, 0.0, 0.3]),
            noise=rng.choice([0.0, 0.05, 0.3]),
            delayed=rng.choice([0.0, 0.0, 0.1]),
            sequences=rng.choice([1, 1, 2, 6]),
            length=rng.choice([60, 120, 1000]),
        )

    def best_speedup(self) -> float:
        """The speedup of the best fixed draft length."""
        plain, speedups = 1 + self.slope * self.sequences, [1.0]
        for length in range(1, MOST + 1):
            tokens = self.empty + (1 - self.empty) * sum(self.chance**i for i in range(length + 1))
            more = (1 - self.empty) * ((self.slope + self.drafting) * length * self.sequences + self.having)
            speedups.append(tokens * plain / (plain + more + self.method))
        return max(speedups)


class Method(Slow):
    """The draft method of a scenario."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, rng: random.Random) -> None:
        chance = scenario.chance
        super().__init__(monkeypatch, 0.0, lambda: chance(self.step) if callable(chance) else chance)
        self.empty, self.rng, self.step = scenario.empty, rng, 0

    def draft(self, start: int, count: int) -> Draft:
        return Draft() if self.rng.random() < self.empty else super().draft(start, count)


def simulate(
    scenario: Scenario, rng: random.Random, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS
) -> tuple[float, list[int]]:
    """The speedup of an engine with adaptive speculation, and the number of draft tokens of each step."""
    method, numbers = Method(monkeypatch, scenario, rng), []
    proposer = AdaptiveProposer(method)
    contexts = [DraftContext(key, [0], 1) for key in range(scenario.sequences)]
    next_key = count = scenario.sequences
    tokens = rest = rested = 0
    plain = 1 + scenario.slope * count
    for method.step in range(steps):
        noise = rng.uniform(1 - scenario.noise, 1 + scenario.noise)
        load = noise * (3 if rng.random() < scenario.delayed else 1)
        method.seconds = scenario.method * load
        begin, drafts = method.clock, [Draft()] * count
        if not rest and proposer.active():
            drafts = proposer.propose(contexts, [MOST] * count)
        for context, draft in zip(contexts, drafts, strict=True):
            start = len(context.token_ids)
            accepted = num_matching_tokens(draft, range(1 << 20), start)
            if draft:
                proposer.accepted(context.key, accepted)
            append_tokens(context.token_ids, accepted + 1)
            tokens += accepted + 1
        drafted = sum(map(len, drafts))
        numbers.append(drafted)
        method.clock += (
            plain + (scenario.slope + scenario.drafting) * drafted + scenario.having * (drafted > 0)
        ) * load
        if rest:
            rest, rested = rest - 1, rested + 1
        else:
            proposer.end_step(count, count + drafted, method.clock - begin, rested)
            rest, rested = proposer.rest, 0
        for index, context in enumerate(contexts):
            if len(context.token_ids) > scenario.length:
                proposer.forget(context.key, context.token_ids[1:])
                contexts[index], next_key, rest = DraftContext(next_key, [0], 1), next_key + 1, 0
                proposer.sequence_started()
    return tokens / count * plain * (1 + 2 * scenario.delayed) / method.clock, numbers


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_speedup_in_random_scenarios(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        scenario = Scenario.of(rng)
        (found, _), best = simulate(scenario, rng, monkeypatch), scenario.best_speedup()
        assert found > 0.96, (seed, scenario)
        assert found > 0.45 * best, (seed, scenario)
        if scenario.method <= 0.2 and scenario.empty == scenario.delayed == 0 and best > 1.5:
            assert found > 0.6 * best, (seed, scenario)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("sequences", [1, 6])
@pytest.mark.parametrize("slope", [0.02, 0.2, 0.5])
@pytest.mark.parametrize(("drafting", "having"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3)])
def test_speedup_is_near_the_optimum(
    sequences: int, slope: float, drafting: float, having: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chance in (0.0, 0.3, 0.6, 0.8, 0.95, 1.0):
        scenario = Scenario(chance, 0.0, slope, 0.0, having, 0.05, 0.0, sequences, 1 << 20, drafting)
        runs = [simulate(scenario, random.Random(seed), monkeypatch, 400) for seed in range(3)]
        assert min(found for found, _ in runs) >= 0.96
        assert np.mean([found for found, _ in runs]) >= 0.87 * scenario.best_speedup()
        if chance == 0:
            assert all(sum(drafted) * slope < 0.03 * len(drafted) * sequences for _, drafted in runs)


def test_adapts_when_acceptance_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(lambda step: float(200 <= step < 400), 0.0, 0.05, 0.0, 0.0, 0.05, 0.0, 1, 1 << 20)
    _, drafted = simulate(scenario, random.Random(3), monkeypatch, 600)
    assert sum(drafted[100:200]) < 30
    assert np.mean(drafted[300:400]) > 0.75 * MOST
    assert sum(drafted[450:600]) < 40
    assert next(step for step in range(200, 400) if drafted[step] >= 4) < 260
