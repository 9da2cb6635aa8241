"""The simulation of replicas: where queueing theory has closed forms, it equals them."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from replica_model import Costs, Request, simulate

STEP = Costs(base=1e-3, row=0.0, token=0.0)


def requests(rate: float, count: int, outputs: np.ndarray, seed: int) -> list[Request]:
    """Poisson arrivals without prompts."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return [Request(at, 0, 0, 0, out) for at, out in zip(arrivals.tolist(), outputs.tolist(), strict=True)]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("load", "replicas"), [(0.5, 1), (0.8, 1), (0.7, 3)])
def test_one_sequence_per_replica_is_m_d_1(load: float, replicas: int) -> None:
    """Fixed service time s: the mean wait is load * s / (2 * (1 - load))."""
    service, count = 0.1, 60_000
    outputs = np.full(count, 100)
    made = requests(load * replicas / service, count, outputs, 3)
    served = simulate(STEP, made, replicas, "random", max_seqs=1)
    wait = statistics.fmean(one.end - one.request.arrival - service for one in served)
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("load", [0.6, 0.8])
def test_several_sequences_of_random_lengths_are_m_m_c(load: float) -> None:
    """Geometric lengths are nearly exponential: the mean wait is Erlang's."""
    slots, mean, count = 4, 200, 40_000
    service = mean * STEP.base
    outputs = np.random.default_rng(5).geometric(1 / mean, count)
    served = simulate(STEP, requests(load * slots / service, count, outputs, 4), 1, "random", max_seqs=slots)
    offered = load * slots
    last = offered**slots / math.factorial(slots) / (1 - load)
    waits = last / (sum(offered**k / math.factorial(k) for k in range(slots)) + last)  # Erlang's C
    expected = waits * service / (slots * (1 - load))
    wait = statistics.fmean(one.first - one.request.arrival - 1.5 * STEP.base for one in served)  # to the next step
    assert wait == pytest.approx(expected, rel=0.15)  # the standard deviation over seeds is 5 %


def test_the_time_of_a_batch_is_the_sum_of_its_steps() -> None:
    costs = Costs(base=1.0, row=0.1, token=0.01)
    first, second = simulate(costs, [Request(0, 0, 0, 50, 3), Request(0.5, 1, 0, 30, 2)], 1, "random", budget=40)
    # prompt 40; prompt 10 and 30 of the other one do not fit in 40 with it: 10 + 30; then both decode; then one
    assert first.first == pytest.approx((1 + 0.4) + (1 + 0.4))
    assert second.first == pytest.approx(first.first)
    assert second.end == pytest.approx(first.first + 1.2)
    assert first.end == pytest.approx(second.end + 1.1)


def test_a_cached_prefix_is_not_read_again() -> None:
    made = [Request(float(n), 7, 100, 10, 1) for n in range(3)]
    served = simulate(Costs(0.1, 0.0, 1e-3), made, 1, "prefix")
    assert [one.hit for one in served] == [False, True, True]
    assert [one.first - one.request.arrival for one in served] == pytest.approx([0.21, 0.11, 0.11])
    assert not any(one.hit for one in simulate(Costs(0.1, 0.0, 1e-3), made, 1, "prefix", cache_tokens=99))


def test_routing_by_prefix_keeps_a_prefix_on_one_replica_until_it_is_full() -> None:
    spread = [Request(n * 0.5, n % 5, 100, 10, 4) for n in range(200)]
    costs = Costs(0.01, 0.0, 1e-4)
    assert sum(not one.hit for one in simulate(costs, spread, 4, "prefix")) == 5
    assert sum(not one.hit for one in simulate(costs, spread, 4, "round robin")) == 20
    burst = [Request(0.0, 0, 100, 10, 4) for _ in range(10)]
    assert sum(not one.hit for one in simulate(costs, burst, 4, "prefix", max_seqs=5)) == 2  # on two replicas
    assert max(one.end for one in simulate(costs, burst, 4, "prefix", max_seqs=5)) < max(
        one.end for one in simulate(costs, burst, 4, "prefix", max_seqs=5, tried=1)
    )


def test_a_dead_replica_loses_its_streams_and_nothing_else() -> None:
    made = [Request(n * 0.01, n, 0, 10, 100) for n in range(400)]
    served = simulate(Costs(0.01, 0.0, 1e-4), made, 4, "prefix", dies=(2.0, 1.0))
    lost = [one for one in served if one.lost]
    assert 10 < len(lost) < 100
    assert all(one.first <= 2.0 < one.request.arrival + 2 for one in lost)
    assert all(one.end >= one.first > one.request.arrival for one in served if not one.lost)
    assert not any(one.lost for one in simulate(Costs(0.01, 0.0, 1e-4), made, 4, "prefix"))
