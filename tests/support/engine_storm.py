"""Random requests, aborts, pauses and model failures over many engine steps: nothing is lost, stuck or leaked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from beam_searches import expected_beams, found_beams
from toy_requests import SIZE, TABLE, chunks_by_index, is_empty, random_request, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.runner import ModelInput
from nucleate.outputs import CompletionChunk, EngineOutput

BAD = TABLE[0].copy()
BAD[5] = np.nan


def sometimes_invalid(seen: tuple[int, ...]) -> np.ndarray:
    """Logits as in ``toy_requests``, but invalid after some prefixes."""
    index = hash(seen) % (len(TABLE) * 20)
    return BAD if index == 7 else TABLE[index % len(TABLE)]


class FailingRunner:
    """A runner that fails at random: a whole forward pass, or all passes with a certain key."""

    def __init__(self, inner: object, rng: random.Random) -> None:
        self.inner, self.rng, self.failing_keys, self.armed = inner, rng, set(), True

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(self, parts: Sequence[ModelInput]) -> object:
        if self.armed and self.rng.random() < 0.02:
            self.failing_keys.add(self.rng.choice(parts).key)
        if any(part.key in self.failing_keys for part in parts):
            raise RuntimeError("out of memory\nin a kernel")
        if self.armed and len(parts) > 1 and self.rng.random() < 0.02:
            self.inner.forward(parts[: len(parts) // 2])  # fails in the middle; the call can be repeated
            raise MemoryError
        return self.inner.forward(parts)


class TrackedRequest:
    """A request or a beam search with its events. Checks that no event follows the last one."""

    def __init__(self, request: Request | BeamRequest) -> None:
        self.request, self.events, self.aborted, self.paused = request, [], False, False

    def take(self, event: EngineOutput) -> None:
        assert not self.is_finished, "an event after the last one"
        assert all(not chunk.finish_reason for chunk in self.chunks(event.chunk.index)), "a chunk after the last one"
        self.events.append(event)

    @property
    def is_finished(self) -> bool:
        return bool(self.events) and self.events[-1].finished

    def chunks(self, index: int) -> list[CompletionChunk]:
        return [event.chunk for event in self.events if event.chunk.index == index]

    def check(self, model: object, llm: nc.LLM, expect: Callable[..., Any]) -> None:
        """Finished outputs equal the reference; aborted and failed ones are prefixes of it."""
        if isinstance(self.request, BeamRequest):
            self.check_search(model, llm)
            return
        count = self.request.params.n
        for chunks, expected in zip(
            chunks_by_index(self.events, count), expect(model, llm.tokenizer, self.request), strict=True
        ):
            reason, detail = chunks[-1].finish_reason, chunks[-1].stop_reason
            if reason == "abort" or (reason == "error" and "model failed" in str(detail)):
                assert chunks[-1].token_ids == ()
                assert reason == "error" or self.aborted
                reported = [chunk.token_ids for chunk in chunks[:-1]]
                assert reported == [chunk.token_ids for chunk in expected[: len(reported)]]
                full_text = "".join(chunk.text for chunk in expected)
                assert full_text.startswith("".join(chunk.text for chunk in chunks[:-1]))
            else:
                same = len(expected)
                if self.request.params.structured_outputs is not None and "NaN" in str(expected[-1].stop_reason):
                    same -= len(chunks) >= same and chunks[same - 1] != expected[-1]  # a forced token needs no logits
                assert chunks[:same] == expected[:same]
                assert same < len(expected) or len(chunks) == same
        last = self.events[-1].usage
        assert last.completion_tokens == sum(len(event.chunk.token_ids) for event in self.events)

    def check_search(self, model: object, llm: nc.LLM) -> None:
        """A finished search has the beams of the reference; one with invalid logits fails there, too."""
        reason, detail = self.events[-1].chunk.finish_reason, self.events[-1].chunk.stop_reason
        if reason == "error" and "model failed" not in str(detail):
            with pytest.raises(ValueError, match="NaN"):
                expected_beams(model, self.request, llm.tokenizer.eos_token_ids)
        elif reason not in ("abort", "error"):
            assert found_beams(self.events) == expected_beams(model, self.request, llm.tokenizer.eos_token_ids)


def check_companions(engine: Engine) -> None:
    """A sequence and its companion run together, and have the same output."""
    running = engine._scheduler.running
    companions = [entry for entry in running if entry.owner is not None]
    assert len(companions) == engine._scheduler.num_companions
    assert all(entry.owner in running and entry.owner.companion is entry for entry in companions)
    assert all(entry.companion in companions for entry in running if entry.companion is not None)
    for entry in companions:
        left = [one.max_length - len(one.token_ids) for one in (entry, entry.owner)]
        assert left[0] == left[1]
        assert entry.paused == entry.owner.paused


def run_stress(
    llm: nc.LLM,
    kind: str,
    seed: int,
    steps: int,
    new_request: Callable[[random.Random], Request | BeamRequest] = random_request,
    expect: Callable[..., Any] = reference_chunks,
    together: int = 1,
    **options: Any,
) -> None:
    """Run random requests.

    expect: returns the chunks of a request, as ``reference_chunks`` does. together: sequences that must fit at a time.
    """
    rng = random.Random(seed)
    model = toy(context_length=96, of=sometimes_invalid)
    inner = runner(kind, model, blocks=rng.randint(26 * together, 26 * together + 34), block_size=4)
    failing = FailingRunner(inner, rng)
    limits = {"max_num_seqs": rng.randint(together, 9), "max_num_batched_tokens": rng.randint(9, 40)}
    options = {**limits, "enable_prefix_caching": rng.random() < 0.8, "backend": "reference", **options}
    engine = Engine(failing, llm.tokenizer, **options)
    live: dict[str, TrackedRequest] = {}
    done: list[TrackedRequest] = []

    def take(events: list[EngineOutput]) -> None:
        for event in events:
            live[event.request_id].take(event)
            if event.finished:
                done.append(live.pop(event.request_id))

    for _ in range(steps):
        chance = rng.random()
        if chance < 0.25 and len(live) < 15:
            watched = TrackedRequest(new_request(rng))
            live[engine.add(watched.request)] = watched
        elif chance < 0.28 and live:
            number = rng.choice(list(live))
            live[number].aborted = True
            take(engine.abort(number))
            assert number not in live
        elif chance < 0.32 and live:
            number = rng.choice(list(live))
            live[number].paused ^= True
            engine.pause(number, paused=live[number].paused)
        elif chance < 0.34:
            in_use = [Request([1], id=number) for number in list(live)[:1]]
            with pytest.raises(nc.ParameterError):
                engine.add(rng.choice([Request([]), Request([SIZE]), Request([1] * 96), *in_use]))
        take(engine.step())
        check_companions(engine)
        stats = engine.stats
        assert stats.num_running_seqs <= limits["max_num_seqs"]
        assert stats.num_used_kv_blocks <= stats.num_kv_blocks
        assert len(engine) == len(live)
    failing.armed = False
    for number in live:
        engine.pause(number, paused=False)
    for _ in range(5000):
        if not live:
            break
        take(engine.step())
    assert not live, f"stuck: {engine.stats}"
    assert is_empty(engine)
    for watched in done:
        watched.check(model, llm, expect)
    reasons = {chunk.finish_reason for watched in done for chunk in (event.chunk for event in watched.events)}
    assert reasons >= {"stop", "length", "abort", "error"} or steps < 1000
