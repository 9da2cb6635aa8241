"""Random requests, aborts, pauses and model failures over many engine steps: nothing is lost, stuck or leaked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_requests import SIZE, TABLE, alone, answers, is_empty, random_request, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.runner import ModelInput
from nucleate.outputs import CompletionChunk, EngineOutput

BAD = TABLE[0].copy()
BAD[5] = np.nan


def rule(seen: tuple[int, ...]) -> np.ndarray:
    """Logits as in ``toys``, invalid after some beginnings."""
    place = hash(seen) % (len(TABLE) * 20)
    return BAD if place == 7 else TABLE[place % len(TABLE)]


class Failing:
    """A runner that fails now and then: as a whole, or for the sequences of one key."""

    def __init__(self, inner: object, rng: random.Random) -> None:
        self.inner, self.rng, self.cursed, self.armed = inner, rng, set(), True

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(self, parts: Sequence[ModelInput]) -> object:
        if self.armed and self.rng.random() < 0.02:
            self.cursed.add(self.rng.choice(parts).key)
        if any(part.key in self.cursed for part in parts):
            raise RuntimeError("out of memory\nin a kernel")
        if self.armed and len(parts) > 1 and self.rng.random() < 0.02:
            self.inner.forward(parts[: len(parts) // 2])  # it fails in the middle, and can be asked again
            raise MemoryError
        return self.inner.forward(parts)


class Watched:
    """A request from outside: what it was told, and whether the contract of events was kept."""

    def __init__(self, request: Request) -> None:
        self.request, self.events, self.aborted, self.paused = request, [], False, False

    def take(self, event: EngineOutput) -> None:
        assert not self.over, "an event after the last one"
        assert all(not piece.finish_reason for piece in self.pieces(event.chunk.index)), "a piece after the last one"
        self.events.append(event)

    @property
    def over(self) -> bool:
        return bool(self.events) and self.events[-1].finished

    def pieces(self, index: int) -> list[CompletionChunk]:
        return [event.chunk for event in self.events if event.chunk.index == index]

    def check(self, model: object, llm: nc.LLM) -> None:
        """Answers that ended by themselves are those of the slow twin; others are a beginning of them."""
        count = self.request.params.n
        for pieces, wanted in zip(answers(self.events, count), alone(model, llm.tokenizer, self.request), strict=True):
            reason, detail = pieces[-1].finish_reason, pieces[-1].stop_reason
            if reason == "abort" or (reason == "error" and "model failed" in str(detail)):
                assert pieces[-1].token_ids == ()
                assert reason == "error" or self.aborted
                told = [piece.token_ids for piece in pieces[:-1]]
                assert told == [piece.token_ids for piece in wanted[: len(told)]]
                whole = "".join(piece.text for piece in wanted)
                assert whole.startswith("".join(piece.text for piece in pieces[:-1]))
            else:
                assert pieces == wanted
        last = self.events[-1].usage
        assert last.completion_tokens == sum(len(event.chunk.token_ids) for event in self.events)


def taken(live: dict[str, Watched]) -> list[Request]:
    """A request with an id that there is already."""
    return [Request([1], id=number) for number in list(live)[:1]]


def storm(llm: nc.LLM, kind: str, seed: int, steps: int, **options: Any) -> None:
    rng = random.Random(seed)
    model = toy(context_length=96, of=rule)
    inner = runner(kind, model, blocks=rng.randint(26, 60), block_size=4)
    failing = Failing(inner, rng)
    limits = {"max_num_seqs": rng.randint(1, 9), "max_num_batched_tokens": rng.randint(9, 40)}
    options = {**limits, "enable_prefix_caching": rng.random() < 0.8, "backend": "reference", **options}
    engine = Engine(failing, llm.tokenizer, **options)
    live: dict[str, Watched] = {}
    done: list[Watched] = []

    def take(events: list[EngineOutput]) -> None:
        for event in events:
            live[event.request_id].take(event)
            if event.finished:
                done.append(live.pop(event.request_id))

    for _ in range(steps):
        chance = rng.random()
        if chance < 0.25 and len(live) < 15:
            watched = Watched(random_request(rng))
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
            with pytest.raises(nc.ParameterError):
                engine.add(rng.choice([Request([]), Request([SIZE]), Request([1] * 96), *taken(live)]))
        take(engine.step())
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
        watched.check(model, llm)
    reasons = {piece.finish_reason for watched in done for piece in (event.chunk for event in watched.events)}
    assert reasons >= {"stop", "length", "abort", "error"} or steps < 1000
