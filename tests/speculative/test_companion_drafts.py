"""Speculative decoding with guidance and contrastive decoding: drafts are verified on both sequences."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from companion_requests import (
    any_companion_request,
    companion_chunks,
    companion_request,
    run_companion_stress,
    weaker,
)
from scripted_proposers import Oracle, TreeOracle
from test_speculation_engine import drafting, outputs_by_prompt
from toy_requests import SIZE, chunks_by_index, drive, is_empty, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.config import Speculation
from nucleate.structured_output import GrammarCompiler

DRAFTING = ("paged", "asynchronous")


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nucleate.structured_output.guide.VALIDATION_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def grammars(llm: nc.LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, SIZE)


def engine_of(llm: nc.LLM, kind: str, config: Speculation, **options: int) -> Engine:
    model, others = runner(kind, toy(), 100), runner(kind, weaker(), 100)
    return Engine(
        model, llm.tokenizer, companion_runner=others, speculative_config=config, backend="reference", **options
    )


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 9}])
@pytest.mark.parametrize("proposer", [Oracle, TreeOracle])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_chunks_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, int], proposer: type[Oracle], share: float
) -> None:
    rng = random.Random(f"{kind}{options}{proposer.__name__}{share}")
    requests = [any_companion_request(rng) for _ in range(14)]
    expected = [companion_chunks(toy(), llm.tokenizer, request, grammars) for request in requests]
    made = proposer(outputs_by_prompt(requests, expected), share)
    width = 3 if proposer is TreeOracle else 1
    config = Speculation(lambda: made, rng.choice([3, 6]), adaptive=False, tree_width=width)
    engine = engine_of(llm, kind, config, **options)
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", RULES)
def test_distribution_rules_equal_coupled_for_greedy_decoding(llm: nc.LLM, kind: str, name: str) -> None:
    rng = random.Random(f"{kind}{name}")
    requests = [companion_request(rng) for _ in range(16)]
    for index, request in enumerate(requests):
        requests[index] = dataclasses.replace(request, params=request.params.replace(temperature=0.0))
    expected = [companion_chunks(toy(), llm.tokenizer, request) for request in requests]
    made = Oracle(outputs_by_prompt(requests, expected), 0.7)
    engine = engine_of(llm, kind, Speculation(lambda: made, 4, name, adaptive=False))
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_pauses_and_failures(llm: nc.LLM, kind: str, seed: int) -> None:
    run_companion_stress(llm, kind, seed, 400, speculative_config=drafting(seed))
