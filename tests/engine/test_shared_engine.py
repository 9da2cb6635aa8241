"""``SharedEngine``: each caller gets its own events, whichever thread runs the steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_requests import chunks_by_index, is_empty, random_request, reference_chunks, rule, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.llm.shared_engine import SharedEngine
from nucleate.outputs import EngineOutput

PARAMS = nc.SamplingParams(max_tokens=30, ignore_eos=True, seed=3)


class EngineFactory:
    """Creates engines and records them."""

    def __init__(self, llm: nc.LLM, of: object = rule) -> None:
        self.llm, self.of, self.engines = llm, of, []

    def __call__(self) -> Engine:
        self.engines.append(Engine(runner("paged", toy(of=self.of), 200), self.llm.tokenizer, backend="reference"))
        return self.engines[-1]


@pytest.mark.slow
def test_threads_share_one_engine(llm: nc.LLM) -> None:
    rng = random.Random(2)
    calls = SharedEngine(factory := EngineFactory(llm))
    groups = [[random_request(rng, 10) for _ in range(3)] for _ in range(8)]
    barrier = threading.Barrier(len(groups))

    def run(requests: list[Request]) -> list[tuple[int, object]]:
        barrier.wait()
        return list(calls.run(requests))

    with ThreadPoolExecutor(len(groups)) as pool:
        for requests, found in zip(groups, pool.map(run, groups), strict=True):
            for index, request in enumerate(requests):
                own = [event for at, event in found if at == index]
                assert chunks_by_index(own, request.params.n) == reference_chunks(toy(), llm.tokenizer, request)
    [engine] = factory.engines
    assert is_empty(engine)


def test_closing_the_iterator_aborts_its_requests(llm: nc.LLM) -> None:
    calls = SharedEngine(factory := EngineFactory(llm))
    first, second = (calls.run([Request([1, 2], PARAMS), Request([3], PARAMS)]) for _ in range(2))
    next(first)
    next(second)
    [engine] = factory.engines
    assert len(engine) == 4
    first.close()
    assert len(engine) == 2
    assert sum(event.finished for _, event in second) == 2
    assert is_empty(engine)


def test_a_rejected_request_aborts_the_earlier_ones_of_its_call(llm: nc.LLM) -> None:
    calls = SharedEngine(factory := EngineFactory(llm))
    with pytest.raises(nc.ParameterError, match="the prompt is empty"):
        next(calls.run([Request([1], PARAMS), Request([])]))
    with pytest.raises(nc.ParameterError, match="the prompt is empty"):
        calls.prepare(Request([]))
    assert is_empty(factory.engines[0])


def test_an_interrupt_in_a_step_discards_only_the_engine(llm: nc.LLM) -> None:
    strikes = iter([False] * 5 + [True])

    def interrupted(seen: tuple[int, ...]) -> object:
        if next(strikes, False):
            raise KeyboardInterrupt
        return rule(seen)

    calls = SharedEngine(factory := EngineFactory(llm, interrupted))
    other, run = (calls.run([Request([1, 2], PARAMS)]) for _ in range(2))
    next(other)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    with pytest.raises(RuntimeError, match="another caller's step was interrupted"):
        list(other)
    again = [event for _, event in calls.run([Request([1, 2], PARAMS)])]
    assert chunks_by_index(again, 1) == reference_chunks(toy(), llm.tokenizer, Request([1, 2], PARAMS))
    assert len(factory.engines) == 2
    assert is_empty(factory.engines[1])


@pytest.mark.slow
def test_callers_of_a_discarded_engine_do_not_affect_the_next_one(llm: nc.LLM) -> None:
    """Both engines use the same request ids."""
    calls = SharedEngine(factory := EngineFactory(llm))
    later = []

    def requests() -> Iterator[Request]:
        yield Request([1, 2], PARAMS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory.engines[0], "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(calls.run([Request([3], PARAMS)]))
        later.append(calls.run([Request([4], PARAMS) for _ in range(4)]))
        later.append(next(later[0]))
        yield Request([5], PARAMS)

    def interrupted() -> list[EngineOutput]:
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="the engine has stopped"):
        list(calls.run(requests()))
    assert len(factory.engines[0]) == 2  # it is not used any more
    assert sum(event.finished for _, event in later[0]) == 4
