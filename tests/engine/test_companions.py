"""Requests with guidance and contrastive decoding: the engine returns the chunks of the reference loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from companion_requests import any_companion_request, companion_chunks, run_companion_stress, weaker
from toy_requests import KINDS, SIZE, chunks_by_index, drive, is_empty, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import Usage
from nucleate.structured_output import GrammarCompiler

PLAIN = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)
GUIDED = PLAIN.replace(guidance_scale=2.0, negative_prompt=(3, 4, 5))
CONTRASTIVE = PLAIN.replace(contrastive_beta=1.0)


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nucleate.structured_output.guide.VALIDATION_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def grammars(llm: nc.LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, SIZE)


def engine_of(llm: nc.LLM, kind: str = "paged", blocks: int = 100, **options: Any) -> Engine:
    others = runner(kind, weaker(), blocks)
    return Engine(runner(kind, toy(), blocks), llm.tokenizer, companion_runner=others, backend="reference", **options)


def check(engine: Engine, llm: nc.LLM, requests: list[Request], grammars: GrammarCompiler | None = None) -> None:
    for request, events in zip(requests, drive(engine, requests), strict=True):
        expected = companion_chunks(toy(), llm.tokenizer, request, grammars)
        assert chunks_by_index(events, request.params.n) == expected, request
        written = sum(len(chunk.token_ids) for chunks in expected for chunk in chunks)
        [usage] = [event.usage for event in events if event.finished]
        assert usage == Usage(len(request.prompt_ids), written, usage.cached_tokens)
        assert usage.cached_tokens < len(request.prompt_ids)
    assert is_empty(engine)
    assert engine._scheduler.num_companions == 0


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("blocks", [64, 140, 500])
def test_chunks_equal_the_reference(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, Any], blocks: int
) -> None:
    rng = random.Random(f"{kind}{options}{blocks}")
    requests = [any_companion_request(rng) for _ in range(20)]
    check(engine := engine_of(llm, kind, blocks, **options), llm, requests, grammars)
    if blocks == 64 and kind != "contexts" and not options:
        assert engine.stats.num_preemptions  # the test must include preemption


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_aborts_pauses_and_failures(llm: nc.LLM, kind: str, seed: int) -> None:
    run_companion_stress(llm, kind, seed, 600)
