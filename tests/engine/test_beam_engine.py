"""Beam searches in the engine equal the reference: in batches, with small KV caches, paused, with failures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from beam_searches import SIZE, expected_beams, found_beams, random_search, rule, toy
from toy_models import PagedToy
from toy_requests import KINDS, TABLE, chunks_by_index, drive, is_empty, reference_chunks, runner

import nucleate as nc
from nucleate.engine.beam_params import BeamParams, BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.runner import Fork, ModelInput
from nucleate.outputs import EngineOutput, Usage

OPTIONS = [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 5}, {"max_num_seqs": 1}, {"enable_prefix_caching": False}]
BAD = TABLE[0, :SIZE].copy()
BAD[5] = np.nan


class RecordingToy(PagedToy):
    """Keeps its forks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forks: list[Fork] = []

    def fork(self, given: Sequence[Fork]) -> None:
        self.forks += given
        super().fork(given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("blocks", [12, 500])
@pytest.mark.fast_cases(5)
def test_beams_equal_the_reference(llm: nc.LLM, kind: str, options: dict, blocks: int) -> None:
    rng = random.Random(f"{kind}{options}{blocks}")
    requests = [random_search(rng) for _ in range(8)]
    model = toy()
    engine = Engine(runner(kind, model, blocks), llm.tokenizer, **options, backend="reference")
    for request, events in zip(requests, drive(engine, requests), strict=True):
        assert found_beams(events) == expected_beams(model, request, llm.tokenizer.eos_token_ids)
        assert events[-1].usage.prompt_tokens == len(request.prompt_ids)
    assert is_empty(engine)
    if blocks == 12 and not options:
        assert engine.stats.num_preemptions  # the test must include preemption


def test_a_kv_cache_of_one_beam_is_enough(llm: nc.LLM) -> None:
    """Each beam is preempted and recomputed in every step."""
    model = toy(context_length=32)
    engine = Engine(PagedToy(model, 8, 4), llm.tokenizer, backend="reference", enable_prefix_caching=False)
    request = BeamRequest([1, 2, 3] * 3, BeamParams(num_beams=4, max_tokens=20, ignore_eos=True))
    other = BeamRequest([4, 5, 6] * 3, BeamParams(num_beams=3, max_tokens=15, ignore_eos=True))
    for one, events in zip((request, other), drive(engine, [request, other]), strict=True):
        assert found_beams(events) == expected_beams(model, one, ())
    assert engine.stats.num_preemptions > 40


@pytest.mark.parametrize("size", [1, 4, 16])
def test_beams_share_blocks_and_a_fork_copies_at_most_one(llm: nc.LLM, size: int) -> None:
    model = toy(context_length=512)
    inner = RecordingToy(model, 4096 // size, size)
    engine = Engine(inner, llm.tokenizer, backend="reference")
    num_beams, prompt, most = 5, [*range(1, 201)], 40
    request = BeamRequest(prompt, BeamParams(num_beams=num_beams, max_tokens=most, ignore_eos=True))
    number = engine.add(request)
    used = 0
    events: list[EngineOutput] = []
    while not events:
        events = engine.step()
        used = max(used, engine.stats.num_used_kv_blocks)
    assert events[0].request_id == number
    assert found_beams(events) == expected_beams(model, request, ())
    read = [(key, stop - start) for parts in inner.forwards for key, start, stop in parts]
    assert sum(count for _, count in read) <= len(prompt) + num_beams * most  # nothing is computed twice
    assert inner.forks
    assert all(fork.block is None for fork in inner.forks) == (size == 1)
    assert len({fork.child for fork in inner.forks}) == len(inner.forks)
    own = -(-(most + size) // size) + 1  # blocks per beam besides the prompt's
    assert used <= -(-len(prompt) // size) + num_beams * own
    assert is_empty(engine)


def test_models_may_reuse_their_logits_buffer(llm: nc.LLM) -> None:
    class Reusing(PagedToy):
        buffer = np.empty((64, SIZE), np.float32)

        def forward(self, parts: Sequence[ModelInput]) -> np.ndarray:
            logits_LV = super().forward(parts)
            self.buffer[:] = np.nan
            self.buffer[: len(logits_LV)] = logits_LV
            return self.buffer[: len(logits_LV)]

    model = toy()
    engine = Engine(Reusing(model, 12, 4), llm.tokenizer, max_num_seqs=2, backend="reference")
    request = BeamRequest([1, 2, 3], BeamParams(num_beams=5, max_tokens=12, ignore_eos=True))
    [events] = drive(engine, [request])
    assert found_beams(events) == expected_beams(model, request, ())


def test_a_single_child_of_a_beam_copies_nothing(llm: nc.LLM) -> None:
    rows = {0: 1, 1: 2, 2: 3}

    def chain(ids: tuple[int, ...]) -> np.ndarray:
        """After the first token, each beam has one possible continuation."""
        logits = np.full(SIZE, -np.inf, np.float32)
        if len(ids) == 1:
            logits[[10, 20, 30]] = [3.0, 2.0, 1.0]
        else:
            logits[ids[-1] + rows[len(ids) % 3]] = 0.0
        return logits

    model = toy(of=chain)
    engine = Engine(inner := RecordingToy(model, 64, 4), llm.tokenizer, backend="reference")
    request = BeamRequest([9], BeamParams(num_beams=3, max_tokens=30, ignore_eos=True))
    [events] = drive(engine, [request])
    assert found_beams(events) == expected_beams(model, request, ())
    assert len(inner.forks) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_search_ends_with_one_event(llm: nc.LLM, kind: str) -> None:
    engine = Engine(runner(kind, toy()), llm.tokenizer, backend="reference")
    request = BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=30, ignore_eos=True))
    for steps in (0, 1, 2, 7):
        number = engine.add(request)
        for _ in range(steps):
            assert engine.step() == []
        [event] = engine.abort(number)
        assert (event.chunk.finish_reason, event.chunk.token_ids, event.finished) == ("abort", (), True)
        assert event.usage == Usage(3, 0)
        assert engine.abort(number) == []
        engine.pause(number)
        assert is_empty(engine)


def test_paused_searches_are_not_computed(llm: nc.LLM) -> None:
    engine = Engine(runner("paged", toy()), llm.tokenizer, backend="reference")
    number = engine.add(BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.pause(number)
    before = engine.stats.computed_tokens
    for _ in range(3):
        assert engine.step() == []
    assert engine.stats.computed_tokens == before
    engine.pause(number, paused=False)
    engine.step()
    assert engine.stats.computed_tokens == before + 3


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_logits_end_only_their_search(llm: nc.LLM, kind: str) -> None:
    request = BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=9, ignore_eos=True))
    second = expected_beams(toy(), BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=2, ignore_eos=True)), ())[
        1
    ][0]

    def sometimes(ids: tuple[int, ...]) -> np.ndarray:
        return BAD if ids == (1, 2, 3, *second) else rule(ids)

    model = toy(of=sometimes)
    engine = Engine(runner(kind, model), llm.tokenizer, backend="reference")
    other = BeamRequest([4, 5], BeamParams(num_beams=2, max_tokens=9))
    sampled = Request([4, 5], nc.SamplingParams(seed=3, max_tokens=9))
    bad, good, sampled_events = drive(engine, [request, other, sampled])
    assert [(e.chunk.finish_reason, e.chunk.stop_reason, e.finished) for e in bad] == [
        ("error", "invalid logits: NaN at token 5", True)
    ]
    assert found_beams(good) == expected_beams(model, other, llm.tokenizer.eos_token_ids)
    assert chunks_by_index(sampled_events, 1) == reference_chunks(model, llm.tokenizer, sampled)
    assert is_empty(engine)


class Failing:
    """A runner that fails for sequences with a certain token, or on forks."""

    def __init__(self, inner: object, *, failing_token: int = -1, copies: bool = True) -> None:
        self.inner, self.failing_token, self.copies = inner, failing_token, copies

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(self, parts: Sequence[ModelInput]) -> object:
        if any(self.failing_token in part.token_ids[: part.stop] for part in parts):
            raise RuntimeError("out of memory\nin a kernel")
        return self.inner.forward(parts)

    def fork(self, forks: Sequence[Fork]) -> None:
        if forks and not self.copies:
            raise RuntimeError("out of memory\nwhile copying")
        self.inner.fork(forks)


@pytest.mark.parametrize("kind", KINDS)
def test_model_failures_for_a_beam_end_only_its_search(llm: nc.LLM, kind: str) -> None:
    model = toy()
    request = BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=9, ignore_eos=True))
    first = expected_beams(model, BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=1, ignore_eos=True)), ())
    for rank in range(3):
        engine = Engine(
            Failing(runner(kind, model), failing_token=first[rank][0][0]), llm.tokenizer, backend="reference"
        )
        other = BeamRequest([4, 5], BeamParams(num_beams=2, max_tokens=3))
        bad, good = drive(engine, [request, other])
        assert [(e.chunk.finish_reason, e.chunk.stop_reason, e.finished) for e in bad] == [
            ("error", "the model failed: out of memory in a kernel", True)
        ]
        assert found_beams(good) == expected_beams(model, other, llm.tokenizer.eos_token_ids)
        assert is_empty(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_forks_end_the_search(llm: nc.LLM, kind: str) -> None:
    engine = Engine(Failing(runner(kind, toy()), copies=False), llm.tokenizer, backend="reference")
    single = BeamRequest([1, 2, 3], BeamParams(num_beams=1, max_tokens=9, ignore_eos=True))
    bad, good = drive(engine, [BeamRequest([1, 2, 3], BeamParams(num_beams=3, max_tokens=9)), single])
    assert [(e.chunk.finish_reason, e.chunk.stop_reason) for e in bad] == [
        ("error", "the model failed: out of memory while copying")
    ]
    assert found_beams(good) == expected_beams(toy(), single, ())
    assert is_empty(engine)


def test_scores_equal_teacher_forcing(llm: nc.LLM) -> None:
    """The embedded model computes the logprobs of each output again."""
    options = dict(num_beams=4, max_tokens=14, length_penalty=0.7, early_stopping="never")
    prompts = ["Once upon a time", "Lily had a big red ball. She"]
    for completion in llm.beam_search(prompts, **options):
        assert len(completion.outputs) == 4
        assert [beam.score for beam in completion.outputs] == sorted(
            (b.score for b in completion.outputs), reverse=True
        )
        for beam in completion.outputs:
            ids = [*completion.prompt_token_ids, *beam.token_ids]
            logits_TV = llm.model.begin().forward_all(ids).astype(np.float64)
            logits_TV -= logits_TV.max(axis=1, keepdims=True)
            logits_TV -= np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
            first = len(completion.prompt_token_ids)
            total = sum(logits_TV[at - 1, ids[at]] for at in range(first, len(ids)))
            assert beam.logprob == pytest.approx(total, abs=1e-3)
            assert beam.score == beam.logprob / len(beam.token_ids) ** 0.7
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in llm.tokenizer.eos_token_ids else "length")
