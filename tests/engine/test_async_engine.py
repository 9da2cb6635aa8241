"""``AsyncEngine``: concurrent callers, cancellation, back-pressure and errors."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from toy_requests import chunks_by_index, is_empty, random_request, reference_chunks, rule, runner, toy

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
    """Run ``use`` with an engine, and wait until the engine is empty."""
    blocks, max_pending, of = options.pop("blocks", 200), options.pop("max_pending", 64), options.pop("rule", rule)
    engine = Engine(runner("paged", toy(of=of), blocks), llm.tokenizer, backend="reference", **options)

    async def main() -> None:
        async with AsyncEngine(engine, max_pending=max_pending) as running:
            await asyncio.wait_for(use(running, engine), 60)
            for _ in range(2000):
                if is_empty(engine):
                    break
                await asyncio.sleep(0.001)

    asyncio.run(main())
    return engine


async def collect(running: AsyncEngine, request: Request) -> list[EngineOutput]:
    return [event async for event in running.generate(request)]


def test_cancelling_a_caller_aborts_only_its_request(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        task, other = asyncio.create_task(collect(running, LONG)), asyncio.create_task(collect(running, SHORT))
        while engine.stats.sampled_tokens < 10:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await other) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


def test_cancelling_before_admission(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        for _ in range(20):
            task = asyncio.create_task(collect(running, LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(await collect(running, SHORT)) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


@pytest.mark.slow
def test_slow_consumers_are_paused_and_lose_nothing(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        events = running.generate(LONG)
        received = [await anext(events)]
        for _ in range(3):  # other requests continue
            assert len(await collect(running, SHORT)) == 5
        await asyncio.sleep(0.1)
        num_sampled = engine.stats.sampled_tokens
        assert num_sampled < 15 + 8 + 20
        await asyncio.sleep(0.05)
        assert engine.stats.sampled_tokens == num_sampled
        received += [event async for event in events]
        assert chunks_by_index(received, 1) == reference_chunks(toy(), llm.tokenizer, LONG)

    assert is_empty(with_engine(llm, use, max_pending=8))


@pytest.mark.slow
def test_paused_requests_are_preempted_for_others(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        sleeping = [running.generate(LONG) for _ in range(3)]
        received = [[await anext(events)] for events in sleeping]
        await asyncio.sleep(0.1)
        assert len(await collect(running, SHORT)) == 5  # only one sequence slot, and few blocks
        for own, events in zip(received, sleeping, strict=True):
            own += [event async for event in events]
            assert chunks_by_index(own, 1) == reference_chunks(toy(), llm.tokenizer, LONG)

    engine = with_engine(llm, use, max_pending=4, max_num_seqs=1, max_num_batched_tokens=8, blocks=60)
    assert is_empty(engine)
    assert engine.stats.num_preemptions >= 2


def test_abort_by_id_ends_the_stream(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        running.abort("nobody")
        events = []
        async for event in running.generate(Request(LONG.prompt_ids, LONG.params.replace(n=2), id="mine")):
            events.append(event)
            if len(events) == 3:
                running.abort("mine")
        assert [event.chunk.finish_reason for event in events if event.chunk.finish_reason] == ["abort"] * 2
        assert events[-1].finished

    assert is_empty(with_engine(llm, use, rule=slow_rule))


def test_closing_raises_in_waiting_callers(llm: nc.LLM) -> None:
    async def main() -> None:
        engine = Engine(runner("paged", toy(of=slow_rule), 200), llm.tokenizer, backend="reference")
        running = AsyncEngine(engine)
        async with running:
            tasks = [asyncio.create_task(collect(running, LONG)) for _ in range(3)]
            while engine.stats.sampled_tokens < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(collect(running, SHORT)))
            await asyncio.sleep(0)
        for task in tasks:
            with pytest.raises(EngineStoppedError, match="closed"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(EngineStoppedError, match="closed"):
            await collect(running, SHORT)
        assert not running._thread.is_alive()

    asyncio.run(main())


def test_an_engine_failure_raises_in_all_callers(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Engine(runner("paged", toy(), 200), llm.tokenizer, backend="reference")
        async with AsyncEngine(engine) as running:
            events = running.generate(LONG)
            await anext(events)
            monkeypatch.setattr(engine, "step", lambda: 1 / 0)
            with pytest.raises(EngineStoppedError, match="ZeroDivisionError") as caught:
                await asyncio.wait_for(take_all(events), 10)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            with pytest.raises(EngineStoppedError):
                await collect(running, SHORT)

    async def take_all(events: object) -> None:
        async for _ in events:
            pass

    asyncio.run(main())


async def collect_together(running: AsyncEngine, requests: list[Request]) -> list[list[EngineOutput]]:
    received: list[list[EngineOutput]] = [[] for _ in requests]
    async with aclosing(running.generate_all(requests)) as batches:
        async for batch in batches:
            assert batch
            for index, event in batch:
                received[index].append(event)
    return received


@pytest.mark.slow
def test_generate_all_returns_the_events_of_each_request(llm: nc.LLM) -> None:
    rng = random.Random(8)
    groups = [[random_request(rng) for _ in range(rng.randint(0, 5))] for _ in range(8)]

    async def use(running: AsyncEngine, engine: Engine) -> None:
        async def late(group: list[Request], seconds: float) -> list[list[EngineOutput]]:
            await asyncio.sleep(seconds)
            return await collect_together(running, group)

        together = await asyncio.gather(*(late(group, rng.random() / 10) for group in groups))
        for group, results in zip(groups, together, strict=True):
            for request, events in zip(group, results, strict=True):
                assert chunks_by_index(events, request.params.n) == reference_chunks(toy(), llm.tokenizer, request)
                assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]

    assert is_empty(with_engine(llm, use, max_num_seqs=5))


def test_generate_all_admits_all_requests_or_none(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        for wrong in (0, 1, 2):
            requests = [LONG, LONG, LONG]
            requests[wrong] = Request([])
            with pytest.raises(nc.ParameterError, match="the prompt is empty"):
                await collect_together(running, requests)
        assert engine.stats.sampled_tokens == 0
        task = asyncio.create_task(collect_together(running, [SHORT, SHORT]))
        with pytest.raises(nc.ParameterError, match="already"):
            await asyncio.gather(*(collect(running, Request([1, 2], LONG.params, id="a")) for _ in range(2)))
        assert len((await task)[1]) == 5

    assert is_empty(with_engine(llm, use))


def test_closing_generate_all_aborts_unfinished_requests(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        async with aclosing(running.generate_all([SHORT, LONG, LONG])) as batches:
            async for batch in batches:
                if any(event.finished for _, event in batch):
                    break

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 100


async def consume_slowly(batches: object) -> None:
    async for _ in batches:
        await asyncio.sleep(0.005)


@pytest.mark.slow
def test_heartbeats_while_there_are_no_events(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        late = [LONG, SHORT]
        first = asyncio.create_task(collect(running, LONG))
        batches = [batch async for batch in running.generate_all(late, heartbeat_seconds=0.001)]
        assert sum(not batch for batch in batches) >= 5
        assert sum(len(batch) for batch in batches) == 205
        assert len(await first) == 200
        assert not [batch async for batch in running.generate_all([SHORT], heartbeat_seconds=60.0) if not batch]
        with pytest.raises(nc.ParameterError):
            await consume_slowly(running.generate_all([Request([])], heartbeat_seconds=0.0001))

    assert is_empty(with_engine(llm, use, max_num_seqs=1, rule=slow_rule))


def test_abort_all_includes_requests_not_yet_admitted(llm: nc.LLM) -> None:
    async def use(running: AsyncEngine, engine: Engine) -> None:
        first = asyncio.create_task(collect_together(running, [LONG]))
        while engine.stats.sampled_tokens < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(collect_together(running, [LONG, LONG])) for _ in range(3)]
        await asyncio.sleep(0)  # submitted, but not yet admitted
        running.abort_all()
        later = asyncio.create_task(collect(running, SHORT))
        for task in (first, *others):
            for events in await task:
                assert events[-1].chunk.finish_reason == "abort"
        assert len(await later) == 5

    engine = with_engine(llm, use, rule=slow_rule)
    assert is_empty(engine)
    assert engine.stats.sampled_tokens < 300


def test_generate_takes_text_token_ids_and_requests(llm: nc.LLM) -> None:
    params, text = nc.SamplingParams(max_tokens=6, seed=4), "Once upon a time"

    async def use() -> list[list[EngineOutput]]:
        async with AsyncEngine(llm.new_engine()) as running:
            prepared = await asyncio.to_thread(running.prepare, Request(llm.encode(text), params))
            search = running.prepare(nc.BeamRequest(llm.encode(text), nc.BeamParams(num_beams=2, max_tokens=6)))
            calls = (
                running.generate(text, params, "mine"),
                running.generate(llm.encode(text), params, priority=1),
                running.generate(prepared),
                running.generate(text, (nc.stages.Gumbel(4),), "with stages"),
                running.generate(search),
                running.generate(""),
            )
            found = [[output async for output in call] for call in calls[:3]]
            async with aclosing(calls[3]) as outputs:
                found.append([await anext(outputs)])
            found.append([output async for output in calls[4]])
            async with aclosing(calls[5]) as outputs:
                found.append([await anext(outputs)])
            for request in (Request([1]), running.prepare(Request([1])), nc.BeamRequest([1])):
                for more in ({"sampling_params": params}, {"request_id": "a"}, {"priority": 1}):
                    with pytest.raises(nc.ParameterError, match="a Request has its own sampling parameters, id and"):
                        await anext(running.generate(request, **more))
            for wrong in (5, [1.5], {"prompt": "a"}, None):
                with pytest.raises(nc.ParameterError, match="a prompt is a string or a list of token ids"):
                    await anext(running.generate(wrong, params))
            with pytest.raises(
                nc.ParameterError, match=r"params must be a SamplingParams or a tuple of stages, got \{\}"
            ):
                await anext(running.generate(text, {}))
            with pytest.raises(nc.ParameterError, match="'sampling_param'; did you mean sampling_params"):
                running.generate(text, sampling_param=params)
        return found

    first, ids, request, staged, beams, empty = asyncio.run(use())
    expected = nc.LLM(generation_config="none").generate(text, params)[0]
    for outputs in (first, ids, request):
        assert "".join(output.chunk.text for output in outputs) == expected.text
        assert tuple(token for output in outputs for token in output.chunk.token_ids) == expected.token_ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in first} == {"mine"}
    assert staged[0].chunk.seed == 4
    assert staged[0].request_id == "with stages"
    assert beams[0].chunk.text == llm.beam_search(text, num_beams=2, max_tokens=6)[0].text
    assert empty[0].chunk.token_ids
