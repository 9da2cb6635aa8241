"""Where drafts do not pay, the steps of an engine are those without speculation, until a sequence starts."""

from __future__ import annotations

import pytest
import tiers
from toy_requests import run_tokens

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.engine.speculator import Speculator


class Watched(Engine):
    """Records which steps rest."""

    rests: list[bool]

    def step(self):
        speculator = self._speculator
        before = speculator._rested
        self.rests.append(speculator._rest > 0)
        outputs = super().step()
        if self.rests[-1]:
            assert speculator._rested == before + 1
            assert not self.runner.capture_enabled or not speculator.layers
        return outputs


def story(llm: nc.LLM, seed: int, tokens: int = 120) -> Request:
    params = nc.SamplingParams(temperature=1.5, seed=seed, max_tokens=tokens, ignore_eos=True)
    return Request(llm.encode("Once upon a time, Tom"), params)


@pytest.fixture
def watched(llm: nc.LLM, request: pytest.FixtureRequest) -> Watched:
    engine = llm.new_engine(speculative_config=request.param)
    engine.__class__, engine.rests = Watched, []
    return engine


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("watched", ["ngram", "eagle"], indirect=True)
def test_many_steps_rest_where_nothing_repeats(llm: nc.LLM, watched: Watched) -> None:
    plain, expected, found = llm.new_engine(), [], []
    for seed in range(tiers.count(2, 4)):
        for engine, tokens in ((plain, expected), (watched, found)):
            tokens += run_tokens(engine, [story(llm, seed)])[0]
    assert found == expected
    assert sum(watched.rests) > 0.3 * len(watched.rests)  # most of them, on an idle machine
    stats = watched.stats.speculative
    assert stats.num_verification_steps + stats.accepted_tokens == len(found)


@pytest.mark.parametrize("watched", ["ngram"], indirect=True)
def test_a_new_sequence_ends_the_rest(llm: nc.LLM, watched: Watched) -> None:
    watched.add(story(llm, 0, 400))
    for seed in range(1, 4):
        while not watched._speculator._rest:
            watched.step()
        watched.add(story(llm, seed, 400))
        watched.step()
        assert not watched.rests[-1]


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["ngram"], indirect=True)
def test_the_end_of_a_sequence_ends_the_rest_because_another_may_wait(llm: nc.LLM, watched: Watched) -> None:
    watched.max_num_seqs = watched._scheduler.max_num_seqs = 1
    for seed in range(6):
        watched.add(story(llm, seed, 60))
    prompts = []
    while len(watched):
        running = len(watched._scheduler.running)
        waiting = len(watched._scheduler.waiting)
        watched.step()
        if waiting and not running:
            prompts.append(watched.rests[-1])
    assert prompts == [False] * 6


@pytest.mark.parametrize("watched", ["ngram"], indirect=True)
def test_a_failed_forward_pass_while_resting(llm: nc.LLM, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.add(story(llm, 0, 400))
    while not watched._speculator._rest:
        watched.step()
    monkeypatch.setattr(Speculator, "withdraw", lambda *_: pytest.fail("there is no draft"))

    def fail(_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(watched.runner, "forward", fail)
    [output] = watched.step()
    assert (output.chunk.finish_reason, output.chunk.stop_reason) == ("error", "the model failed: broken")
    assert not len(watched)
