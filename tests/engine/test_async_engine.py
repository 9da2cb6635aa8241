"""The engine on its thread: callers come, wait, leave, sleep; none of them harms another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from toy_requests import alone, answers, is_empty, random_request, rule, runner, toy

import nucleate as nc
from nucleate.engine.async_engine import AsyncEngine, EngineStoppedError
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import EngineOutput

LONG = Request([1, 2, 3], nc.SamplingParams(max_tokens=200, ignore_eos=True, seed=1))
SHORT = Request([4, 5], nc.SamplingParams(max_tokens=5, ignore_eos=True, seed=2))


def slow_rule(seen: tuple[int, ...]) -> object:
    time.sleep(0.001)
    return rule(seen)


def with_engine(llm: nc.LLM, use: Callable[[AsyncEngine, Engine], Awaitable[None]], **options: object) -> Engine:
    """Run something with an engine, and wait until nothing of its requests is left in it."""
    blocks, room, of = options.pop("blocks", 200), options.pop("room", 64), options.pop("rule", rule)
    engine = Engine(runner("paged", toy(of=of), blocks), llm.tokenizer, backend="reference", **options)

    async def main() -> None:
        async with AsyncEngine(engine, max_pending=room) as running:
            await asyncio.wait_for(use(running, engine), 60)
            for _ in range(2000):
                if is_empty(engine):
                    break
                await asyncio.sleep(0.001)

    asyncio.run(main())
    return engine


async def take(running: AsyncEngine, request: Request) -> list[EngineOutput]:
    return [event async for event in running.run(request)]


def test_many_callers_each_get_their_own(llm: nc.LLM) -> None:
    rng = random.Random(5)
    requests = [random_request(rng) for _ in range(30)]

    async def use(running: AsyncEngine, engine: Engine) -> None:
        async def late(request: Request, seconds: float) -> list[EngineOutput]:
            await asyncio.sleep(seconds)
            return await take(running, request)

        results = await asyncio.gather(*(late(one, rng.random() / 10) for one in requests))
        for request, events in zip(requests, results, strict=True):
            assert answers(events, request.params.n) == alone(toy(), llm.tokenizer, request)
            assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]

    assert is_empty(with_engine(llm, use, max_num_seqs=4))


def test_a_cancelled_caller_ends_its_request_and_no_other(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        task, other = asyncio.create_task(take(running, LONG)), asyncio.create_task(take(running, SHORT))
        while engine.stats.sampled_tokens < 10:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await other) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


def test_a_caller_cancelled_before_it_is_admitted(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        for _ in range(20):
            task = asyncio.create_task(take(running, LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(await take(running, SHORT)) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


def test_leaving_the_iteration_ends_the_request(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        async with aclosing(running.run(LONG)) as events:
            async for _ in events:
                break

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 50


def test_a_caller_that_takes_nothing_is_paused_and_loses_nothing(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        events = running.run(LONG)
        taken = [await anext(events)]
        for _ in range(3):  # the others go on, however long it sleeps
            assert len(await take(running, SHORT)) == 5
        await asyncio.sleep(0.1)
        drawn = engine.stats.sampled_tokens
        assert drawn < 15 + 8 + 20
        await asyncio.sleep(0.05)
        assert engine.stats.sampled_tokens == drawn
        taken += [event async for event in events]
        assert answers(taken, 1) == alone(toy(), llm.tokenizer, LONG)

    assert is_empty(with_engine(llm, use, room=8))


def test_a_paused_request_gives_its_place_to_others(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        sleeping = [running.run(LONG) for _ in range(3)]
        taken = [[await anext(events)] for events in sleeping]
        await asyncio.sleep(0.1)
        assert len(await take(running, SHORT)) == 5  # there is one place only, and few blocks
        for own, events in zip(taken, sleeping, strict=True):
            own += [event async for event in events]
            assert answers(own, 1) == alone(toy(), llm.tokenizer, LONG)

    engine = with_engine(llm, use, room=4, max_num_seqs=1, max_num_batched_tokens=8, blocks=60)
    assert is_empty(engine)
    assert engine.stats.num_preemptions >= 2


def test_a_refused_request_is_an_error_of_its_caller(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        task = asyncio.create_task(take(running, SHORT))
        with pytest.raises(nc.ParameterError, match="the prompt is empty"):
            await take(running, Request([]))
        with pytest.raises(nc.ParameterError, match="already"):
            await asyncio.gather(*(take(running, Request([1, 2], LONG.params, id="a")) for _ in range(2)))
        assert len(await task) == 5

    assert is_empty(with_engine(llm, use))


def test_abort_by_id_brings_the_last_event(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        running.abort("nobody")
        events = []
        async for event in running.run(Request(LONG.prompt_ids, LONG.params.replace(n=2), id="mine")):
            events.append(event)
            if len(events) == 3:
                running.abort("mine")
        assert [event.chunk.finish_reason for event in events if event.chunk.finish_reason] == ["abort"] * 2
        assert events[-1].finished

    assert is_empty(with_engine(llm, use, rule=slow_rule))


def test_closing_tells_those_who_wait(llm: nc.LLM) -> None:
    async def main() -> None:
        engine = Engine(runner("paged", toy(of=slow_rule), 200), llm.tokenizer, backend="reference")
        running = AsyncEngine(engine)
        async with running:
            tasks = [asyncio.create_task(take(running, LONG)) for _ in range(3)]
            while engine.stats.sampled_tokens < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(take(running, SHORT)))
            await asyncio.sleep(0)
        for task in tasks:
            with pytest.raises(EngineStoppedError, match="closed"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(EngineStoppedError, match="closed"):
            await take(running, SHORT)
        assert not running._thread.is_alive()

    asyncio.run(main())


def test_a_failure_of_the_engine_itself_is_told_to_everyone(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Engine(runner("paged", toy(), 200), llm.tokenizer, backend="reference")
        async with AsyncEngine(engine) as running:
            events = running.run(LONG)
            await anext(events)
            monkeypatch.setattr(engine, "step", lambda: 1 / 0)
            with pytest.raises(EngineStoppedError, match="ZeroDivisionError") as caught:
                await asyncio.wait_for(take_all(events), 10)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            with pytest.raises(EngineStoppedError):
                await take(running, SHORT)

    async def take_all(events: object) -> None:
        async for _ in events:
            pass

    asyncio.run(main())


async def take_together(running: AsyncEngine, requests: list[Request]) -> list[list[EngineOutput]]:
    taken: list[list[EngineOutput]] = [[] for _ in requests]
    async with aclosing(running.run_all(requests)) as batches:
        async for batch in batches:
            assert batch
            for place, event in batch:
                taken[place].append(event)
    return taken


def test_several_requests_of_one_caller(llm: nc.LLM) -> None:
    rng = random.Random(8)
    groups = [[random_request(rng) for _ in range(rng.randint(0, 5))] for _ in range(8)]

    async def use(running: AsyncEngine, engine: Engine) -> None:
        together = await asyncio.gather(*(take_together(running, group) for group in groups))
        for group, results in zip(groups, together, strict=True):
            for request, events in zip(group, results, strict=True):
                assert answers(events, request.params.n) == alone(toy(), llm.tokenizer, request)
                assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]

    assert is_empty(with_engine(llm, use, max_num_seqs=5))


def test_of_several_requests_all_are_admitted_or_none(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        for wrong in (0, 1, 2):
            requests = [LONG, LONG, LONG]
            requests[wrong] = Request([])
            with pytest.raises(nc.ParameterError, match="the prompt is empty"):
                await take_together(running, requests)
        assert engine.stats.sampled_tokens == 0
        assert len((await take_together(running, [SHORT, SHORT]))[1]) == 5

    assert is_empty(with_engine(llm, use))


def test_leaving_several_requests_ends_those_that_have_not_ended(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        async with aclosing(running.run_all([SHORT, LONG, LONG])) as batches:
            async for batch in batches:
                if any(event.finished for _, event in batch):
                    break

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


async def slowly(batches: object) -> None:
    async for _ in batches:
        await asyncio.sleep(0.005)


def test_a_beat_is_heard_while_nothing_comes(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        late = [LONG, SHORT]
        first = asyncio.create_task(take(running, LONG))
        batches = [
            batch async for batch in running.run_all(late, heartbeat_seconds=0.001)
        ]  # there is one place, and it is taken
        assert sum(not batch for batch in batches) >= 5
        assert sum(len(batch) for batch in batches) == 205
        assert len(await first) == 200
        assert not [batch async for batch in running.run_all([SHORT], heartbeat_seconds=60.0) if not batch]
        with pytest.raises(nc.ParameterError):
            await slowly(running.run_all([Request([])], heartbeat_seconds=0.0001))

    assert is_empty(with_engine(llm, use, max_num_seqs=1, rule=slow_rule))


def test_a_caller_of_several_requests_that_takes_nothing_is_paused(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        async with aclosing(running.run_all([LONG, LONG])) as batches:
            await anext(batches)
            await asyncio.sleep(0.2)
            drawn = engine.stats.sampled_tokens
            assert drawn < 2 * 8 + 20
            assert len(await take(running, SHORT)) == 5
            rest = [len(batch) async for batch in batches]
            assert sum(rest) > 360

    assert is_empty(with_engine(llm, use, room=8))


def test_all_requests_can_be_ended_at_once(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        tasks = [asyncio.create_task(take_together(running, [LONG, LONG])) for _ in range(3)]
        while engine.stats.sampled_tokens < 12:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        running.abort_all()
        for task in tasks:
            for events in await task:
                assert events[-1].chunk.finish_reason == "abort"

    assert is_empty(with_engine(llm, use, rule=slow_rule))


def test_requests_that_the_engine_has_not_taken_yet_are_ended_too(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        first = asyncio.create_task(take_together(running, [LONG]))
        while engine.stats.sampled_tokens < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(take_together(running, [LONG, LONG])) for _ in range(3)]
        await asyncio.sleep(0)  # they have asked, and the loop cannot have heard of it that they were taken
        running.abort_all()
        later = asyncio.create_task(take(running, SHORT))
        for task in (first, *others):
            for events in await task:
                assert events[-1].chunk.finish_reason == "abort"
        assert len(await later) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 300


def test_a_request_prepared_elsewhere(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        prepared = await asyncio.to_thread(running.prepare, SHORT)
        assert answers([event async for event in running.run(prepared)], 1) == alone(toy(), llm.tokenizer, SHORT)
        with pytest.raises(nc.ParameterError, match="the prompt is empty"):
            running.prepare(Request([]))

    assert is_empty(with_engine(llm, use))
