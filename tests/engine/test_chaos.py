"""Stress tests: nothing is lost, stuck or leaked, and finished outputs equal the reference."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import tiers
from beam_searches import random_search
from companion_requests import any_companion_request, companion_chunks, companion_request, weaker
from engine_storm import run_stress, sometimes_invalid
from scripted_proposers import FaultyProposer, FaultyTrees
from test_engine_structured import structured_request
from toy_requests import CELLS, KINDS, SIZE, is_empty, random_request, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine import state_cache
from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.speculative.config import Speculation
from nucleate.structured_output import GrammarCompiler, compiler

DRAFTING = ("paged", "asynchronous")


class Storm(NamedTuple):
    """A kind of requests and engines. options: of ``run_stress``, by the kind of runner and the seed."""

    kinds: tuple[str, ...]
    steps: int
    long_steps: int
    options: Callable[[str, int], dict[str, Any]] = lambda kind, seed: {}


def search_or_request(rng: random.Random) -> Request | BeamRequest:
    return random_search(rng) if rng.random() < 0.6 else random_request(rng, 20)


def structured(overlap_seconds: float) -> Callable[[str, int], dict[str, Any]]:
    return lambda kind, seed: {"new_request": structured_request, "overlap_seconds": overlap_seconds}


def companions(new_request: Callable[[random.Random], Request], kind: str) -> dict[str, Any]:
    others = runner(kind, weaker(), blocks=90, block_size=4)
    return {"new_request": new_request, "expect": companion_chunks, "together": 2, "companion_runner": others}


def drafts(seed: int, width: int = 1) -> dict[str, Any]:
    """Drafts that are often correct and often invalid."""
    rng, faulty = random.Random(seed), FaultyProposer if width == 1 else FaultyTrees

    def best(seen: tuple[int, ...]) -> int:
        return int(sometimes_invalid(seen).argmax())

    def proposer() -> FaultyProposer:
        return faulty({}, 0.9, rng, best)

    config = Speculation(proposer, rng.randint(width, 9 + width), adaptive=False, tree_width=width)
    return {"speculative_config": config}


STORMS = {
    "requests": Storm((*KINDS, *CELLS), 350, 10_000),
    "beam searches": Storm(KINDS, 150, 6000, lambda kind, seed: {"new_request": search_or_request}),
    "structured output, masks during the forward": Storm(KINDS, 100, 2000, structured(-1.0)),
    "structured output, masks after it": Storm(KINDS, 100, 2000, structured(1e9)),
    "companions": Storm(KINDS, 300, 2000, lambda kind, seed: companions(any_companion_request, kind)),
    "drafts": Storm(DRAFTING, 350, 10_000, lambda kind, seed: drafts(seed)),
    "trees": Storm(DRAFTING, 100, 6000, lambda kind, seed: drafts(seed, 3)),
    "companions with drafts": Storm(
        DRAFTING, 400, 2000, lambda kind, seed: {**companions(companion_request, kind), **drafts(seed)}
    ),
    "n-gram drafts": Storm(
        ("cells",), 350, 2000, lambda kind, seed: {"speculative_config": Speculation("ngram", 5, adaptive=False)}
    ),
}
EACH = pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in STORMS for kind in STORMS[name].kinds])


def run(
    llm: nc.LLM, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, seed: int, steps: int
) -> None:
    options = STORMS[name].options(kind, seed)
    monkeypatch.setattr(compiler, "OVERLAP_SECONDS", options.pop("overlap_seconds", compiler.OVERLAP_SECONDS))
    monkeypatch.setattr(state_cache, "MIN_TOKENS", 4)
    expect = options.pop("expect", reference_chunks)
    run_stress(llm, kind, seed, steps, expect=lambda *given: expect(*given, grammars), **options)


@pytest.mark.fast_cases(0)
@EACH
@pytest.mark.parametrize("seed", range(3))
def test_short_stress(
    llm: nc.LLM, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, seed: int
) -> None:
    run(llm, grammars, monkeypatch, name, kind, seed, tiers.count(STORMS[name].steps // 2, STORMS[name].steps))


@pytest.mark.exhaustive
@EACH
def test_long_stress(
    llm: nc.LLM, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    run(llm, grammars, monkeypatch, name, kind, 100, STORMS[name].long_steps)


@pytest.mark.parametrize("kind", ["paged", "contexts"])
@pytest.mark.fast_cases(0)
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
