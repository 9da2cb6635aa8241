"""Stress tests: nothing is lost, stuck or leaked, and finished outputs equal the reference."""

from __future__ import annotations

import gc
import random

import pytest
import tiers
from engine_storm import run_stress
from toy_requests import KINDS, SIZE, is_empty, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_short_stress(llm: nc.LLM, kind: str, seed: int) -> None:
    run_stress(llm, kind, seed, steps=350)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_long_stress(llm: nc.LLM, kind: str) -> None:
    run_stress(llm, kind, 100, steps=10_000)


@pytest.mark.parametrize("kind", ["paged", "contexts"])
@pytest.mark.fast_cases(1)
def test_memory_is_flat_over_2000_requests(llm: nc.LLM, kind: str) -> None:
    engine = Engine(runner(kind, toy(), 100), llm.tokenizer, max_num_seqs=16, backend="reference")
    rng = random.Random(1)

    def serve(count: int) -> int:
        """Run this number of requests. Returns the number of live objects."""
        for _ in range(count):
            prompt = [rng.randrange(1, SIZE) for _ in range(rng.randint(1, 12))]
            engine.add(Request(prompt, nc.SamplingParams(max_tokens=2, seed=rng.randrange(99), temperature=0)))
            while len(engine) > 20:
                engine.step()
        while len(engine):
            engine.step()
        getattr(engine.runner, "forwards", []).clear()
        gc.collect()
        return len(gc.get_objects())

    before = serve(tiers.count(200, 500))
    assert serve(tiers.count(800, 1500)) - before < 700  # an object per request would be more
    assert is_empty(engine)
