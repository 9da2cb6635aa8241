"""Ray Serve: streams, disconnects, routing by prefix, dead replicas, draining, autoscaling. Needs the extra ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from ray_programs import Application, application, require_ray, wait_for

import nucleate as nc

pytestmark = pytest.mark.slow

ENGINE = {"max_num_seqs": 8}
LONG = {"max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def running() -> Iterator[Application]:
    require_ray()
    with application(min_replicas=2, engine=ENGINE) as made:
        yield made


def prompts_of_both(running: Application) -> dict[str, str]:
    """A prompt for each of the two replicas."""
    found: dict[str, str] = {}

    def complete() -> bool:
        for number in range(20):
            prompt = f"Story number {number} begins"
            found.setdefault(running.complete(prompt=prompt, max_tokens=1)[1], prompt)
        return len(found) == 2

    wait_for(complete)
    return found


def test_a_stream_has_the_text_of_the_library_event_by_event(running: Application, llm: nc.LLM) -> None:
    expected = llm.generate("Once upon a time", nc.SamplingParams(max_tokens=30, seed=3))[0]
    body = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 3}
    with running.open("/v1/completions", {**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = list(response.events())
    assert found.pop() == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in found) == expected.text
    assert len(found) > 10
    assert running.complete(**body)[0] == expected.text


def test_an_error_is_that_of_the_server(running: Application) -> None:
    with running.open("/v1/completions", {"prompt": 3}) as response:
        assert (response.status, b"prompt must be a string" in response.read()) == (400, True)
    with running.open("/missing") as response:
        assert response.status == 404


def test_requests_that_begin_alike_reach_one_replica(running: Application) -> None:
    user = {"role": "user", "content": "Who is Tom?"}
    turns = [user, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And Tim?"}]
    places = set()
    for messages in ([user], turns, [*turns, turns[1], turns[2]]):
        with running.open("/v1/chat/completions", {"messages": messages, "max_tokens": 2}) as response:
            assert response.status == 200
            response.read()
            places.add(response.replica)
    assert len(places) == 1
    assert len({running.complete(prompt=f"Story {number}", max_tokens=1)[1] for number in range(30)}) == 2


def test_a_disconnect_frees_the_engine(running: Application) -> None:
    with running.open("/v1/completions", {"prompt": "Once", "n": 8, **LONG}) as response:
        next(response.events())
        assert wait_for(lambda: running.load(str(response.replica))) == 1
    wait_for(lambda: running.load(str(response.replica)) == 0, 5)


def test_a_killed_replica_costs_its_streams_only(running: Application) -> None:
    (first, prompt), (second, other) = prompts_of_both(running).items()
    body = {"prompt": prompt, "seed": 5, "max_tokens": 200, "ignore_eos": True}
    whole, _ = running.complete(**body)
    with (
        ThreadPoolExecutor() as threads,
        running.open("/v1/completions", {"prompt": prompt, "n": 4, **LONG}) as lost,
        running.open("/v1/completions", {"prompt": other, "n": 4, **LONG}) as kept,
    ):
        assert (lost.replica, kept.replica) == (first, second)
        next(lost.events())
        waiting = threads.submit(lambda: running.complete(**body))
        wait_for(lambda: running.load(first) == 2)
        running.kill(first)
        *_, last = lost.events()
        assert last["error"]["code"] == "replica_lost"
        assert waiting.result(60) == (whole, second)  # generated again, as nothing had been sent
        *_, end = kept.events()
        assert end == "[DONE]"
    assert running.complete(**body)[0] == whole
    assert first not in prompts_of_both(running)  # it was replaced


@pytest.mark.exhaustive
def test_a_replica_that_is_removed_finishes_its_streams(running: Application) -> None:
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context(running.open("/v1/completions", {"prompt": prompt, "n": 8, **LONG}))
            for name, prompt in prompts_of_both(running).items()
        }
        for stream in streams.values():
            next(stream.events())
        running.deploy(min_replicas=1, engine=ENGINE)
        for name, stream in streams.items():
            *_, before, end = stream.events()
            assert (end, stream.replica) == ("[DONE]", name)
            assert before["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: len({running.complete(prompt=f"Story {n}", max_tokens=1)[1] for n in range(12)}) == 1)


def test_replicas_follow_the_requests_in_flight() -> None:
    require_ray()
    fast = {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "metrics_interval_s": 0.2, "look_back_period_s": 1.0}
    options = {"min_replicas": 1, "max_replicas": 2, "requests_per_replica": 2, "autoscaling": fast}
    with application(**options, engine=ENGINE) as made, ThreadPoolExecutor(8) as threads:

        def places(count: int) -> set[str]:
            tasks = [
                threads.submit(made.complete, prompt=f"Story {n}", max_tokens=400, ignore_eos=True)
                for n in range(count)
            ]
            return {task.result()[1] for task in tasks}

        assert len(places(1)) == 1
        wait_for(lambda: len(places(16)) == 2)
        wait_for(lambda: len({made.complete(prompt=f"Story {n}", max_tokens=1)[1] for n in range(12)}) == 1)
