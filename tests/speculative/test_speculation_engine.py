"""Coupled verification in the engine: the chunks of the reference loop, whatever the proposer does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_storm import run_stress, sometimes_invalid
from scripted_proposers import FaultyProposer, NoDrafts, Oracle, Outputs
from test_structured_random import CONSTRAINTS, STAGES, follows_grammar
from toy_requests import SIZE, chunks_by_index, drive, is_empty, random_request, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, Usage
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import SuffixProposer
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


def any_request(rng: random.Random) -> Request:
    """A request with random stages, sometimes with structured output."""
    request = random_request(rng)
    params = request.params.override(**rng.choice(STAGES))
    if rng.random() < 0.4:
        params = params.replace(
            structured_outputs=nc.StructuredOutputs(**rng.choice(CONSTRAINTS)), max_tokens=rng.randint(1, 50)
        )
    return dataclasses.replace(request, params=params)


def outputs_by_prompt(requests: list[Request], expected: list[list[list[CompletionChunk]]]) -> Outputs:
    """The outputs by prompt and seed, for an ``Oracle``."""
    return {
        (tuple(request.prompt_ids), (request.params.seed + index) % 2**64): [
            token for chunk in chunks for token in chunk.token_ids
        ]
        for request, own in zip(requests, expected, strict=True)
        for index, chunks in enumerate(own)
    }


PROPOSERS: dict[str, Callable[[Outputs], Proposer]] = {
    "ngram": lambda outputs: NgramProposer(3, 1),
    "suffix": lambda outputs: SuffixProposer(),
    "oracle": Oracle,
    "half": lambda outputs: Oracle(outputs, 0.7),
    "wrong": lambda outputs: Oracle(outputs, 0.0),
    "faulty": lambda outputs: FaultyProposer(outputs, 0.8),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 9}])
@pytest.mark.parametrize("name", PROPOSERS)
def test_chunks_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, Any], name: str
) -> None:
    rng = random.Random(f"{kind}{options}{name}")
    requests, model = [any_request(rng) for _ in range(14)], toy()
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    proposer = PROPOSERS[name](outputs_by_prompt(requests, expected))
    config = Speculation(
        lambda: proposer,
        rng.choice([1, 3, 4, 9]) if name != "oracle" else 6,
        adaptive=rng.random() < 0.3 and name != "oracle",  # depends on timing
    )
    engine = Engine(runner(kind, model, 64), llm.tokenizer, **options, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
        written = sum(len(chunk.token_ids) for chunks in own for chunk in chunks)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
    assert is_empty(engine)
    assert not isinstance(proposer, NoDrafts) or not proposer.keys
    stats = engine.stats.speculative
    if name == "oracle":
        assert stats.mean_acceptance_length > 1.1
        assert stats.accepted_tokens > 0.3 * stats.draft_tokens
    if not options and name != "ngram" and not config.adaptive:
        assert stats.draft_tokens > 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("proposer", ["half", "faulty"])
def test_distribution_rules_equal_coupled_for_greedy_decoding(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, name: str, proposer: str
) -> None:
    """Greedy outputs are equal; the others satisfy all invariants."""
    rng = random.Random(f"{kind}{name}{proposer}")
    requests, model = [any_request(rng) for _ in range(16)], toy()
    for index in range(0, len(requests), 2):
        greedy = requests[index].params.replace(temperature=0.0, draw="gumbel", mirostat_tau=0.0)
        requests[index] = dataclasses.replace(requests[index], params=greedy)
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    made = PROPOSERS[proposer](outputs_by_prompt(requests, expected))
    config = Speculation(lambda: made, rng.choice([2, 4, 9]), name, adaptive=False)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        found = chunks_by_index(events, request.params.n)
        if request.params.temperature == 0:
            assert found == own, request
        for chunks in found:
            assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            if request.params.structured_outputs is not None and chunks[-1].finish_reason != "error":
                assert follows_grammar(grammars, request.params, chunks)
            if request.params.logprobs is not None:
                logprobs = [chunk.logprobs[0] for chunk in chunks if chunk.logprobs]
                assert len(logprobs) == len([chunk for chunk in chunks if chunk.token_ids])
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


def test_beam_searches_in_a_batch_with_drafts(llm: nc.LLM) -> None:
    rng = random.Random(5)
    requests = [random_request(rng) for _ in range(6)]
    expected = [reference_chunks(toy(), llm.tokenizer, request) for request in requests]
    search = nc.BeamRequest([3, 4, 5], nc.BeamParams(num_beams=3, max_tokens=8))
    proposer = Oracle(outputs_by_prompt(requests, expected), 0.8)
    speculation = Speculation(lambda: proposer, 5, adaptive=False)
    engine = Engine(runner("paged", toy(), 64), llm.tokenizer, speculative_config=speculation, backend="reference")
    found = drive(engine, [*requests[:3], search, *requests[3:]])
    beams = found.pop(3)
    for request, own, events in zip(requests, expected, found, strict=True):
        assert chunks_by_index(events, request.params.n) == own
    plain = Engine(runner("paged", toy(), 64), llm.tokenizer, backend="reference")
    assert [[event.chunk for event in beams]] == [
        [event.chunk for event in events] for events in drive(plain, [search])
    ]
    assert engine.stats.speculative.accepted_tokens > 0
    assert is_empty(engine)


def drafting(seed: int) -> Speculation:
    """A speculation whose drafts are often correct and often invalid."""
    rng = random.Random(seed)

    def best(seen: tuple[int, ...]) -> int:
        return int(sometimes_invalid(seen).argmax())

    return Speculation(lambda: FaultyProposer({}, 0.9, rng, best), rng.randint(1, 9), adaptive=False)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("seed", range(3))
def test_short_stress(llm: nc.LLM, kind: str, seed: int) -> None:
    run_stress(llm, kind, seed, steps=350, speculative_config=drafting(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTING)
def test_long_stress(llm: nc.LLM, kind: str) -> None:
    run_stress(llm, kind, 100, steps=10_000, speculative_config=drafting(100))
