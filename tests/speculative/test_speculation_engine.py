"""Speculation in random engines: the chunks of the reference loop, whatever the proposer does, chains and trees."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from companion_requests import (
    any_companion_request,
    companion_chunks,
    companion_request,
    weaker,
)
from scripted_proposers import FaultyProposer, FaultyTrees, HiddenStateOracle, NoDrafts, Oracle, Outputs, TreeOracle
from test_structured_random import CONSTRAINTS, STAGES, follows_grammar
from toy_requests import chunks_by_index, drive, is_empty, random_request, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, EngineOutput, Usage
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import SuffixProposer
from nucleate.structured_output import GrammarCompiler

DRAFTING = ("paged", "asynchronous")


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


CHAINS: dict[str, Callable[[Outputs, random.Random], Proposer]] = {
    "ngram": lambda outputs, rng: NgramProposer(3, 1),
    "suffix": lambda outputs, rng: SuffixProposer(),
    "correct": lambda outputs, rng: Oracle(outputs),
    "half": lambda outputs, rng: Oracle(outputs, 0.7),
    "wrong": lambda outputs, rng: Oracle(outputs, 0.0),
    "faulty": lambda outputs, rng: FaultyProposer(outputs, 0.8),
}
TREES: dict[str, Callable[[Outputs, random.Random], Proposer]] = {
    "correct trees": lambda outputs, rng: TreeOracle(outputs, 1.0, rng),
    "half trees": lambda outputs, rng: TreeOracle(outputs, 0.7, rng),
    "wrong trees": lambda outputs, rng: TreeOracle(outputs, 0.0, rng),
    "hidden states": lambda outputs, rng: HiddenStateOracle(outputs, 0.9, rng),
    "faulty trees": lambda outputs, rng: FaultyTrees(outputs, 0.8, rng),
}


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_chunks_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, few: bool, name: str
) -> None:
    """With any parameter, structured output and n > 1, in 64 blocks of 4 tokens, with preemption."""
    rng, tree = random.Random(f"{kind}{few}{name}"), name in TREES
    requests, model = [any_request(rng) for _ in range(6 if tree and name != "faulty trees" else 16)], toy()
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    proposer: Any = (CHAINS | TREES)[name](outputs_by_prompt(requests, expected), rng)
    adaptive = rng.random() < 0.3 and not name.startswith(("correct", "faulty"))  # which depends on timing
    proposer.complete = not adaptive
    tokens = rng.choice([6, 9, 14]) if tree else rng.choice([1, 3, 4, 9]) if name != "correct" else 6
    config = Speculation(lambda: proposer, tokens, adaptive=adaptive, tree_width=4 if tree else 1)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16 if tree else 9} if few else {}
    engine = Engine(runner(kind, model, 64), llm.tokenizer, **options, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
        written = sum(len(chunk.token_ids) for chunks in own for chunk in chunks)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
    assert is_empty(engine)
    assert not isinstance(proposer, NoDrafts) or not proposer.keys
    assert engine._speculator._failed == name.startswith("faulty")  # proposer failures are reported there
    assert engine.stats.jump_forward_tokens or not getattr(proposer, "late", 0)
    stats = engine.stats.speculative
    assert stats.draft_tokens >= stats.accepted_tokens
    if name.startswith("correct") and not few:
        assert stats.mean_acceptance_length > 1.1 + 0.2 * tree
    if not few and name != "ngram" and not adaptive:
        assert stats.draft_tokens > 0


def assert_valid(grammars: GrammarCompiler, request: Request, chunks: list[CompletionChunk]) -> None:
    """A sampled output ends once, follows its grammar, and has logprobs for all tokens."""
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    if request.params.structured_outputs is not None and chunks[-1].finish_reason != "error":
        assert follows_grammar(grammars, request.params, chunks)
    if request.params.logprobs is not None:
        assert sum(bool(chunk.logprobs) for chunk in chunks) == sum(bool(chunk.token_ids) for chunk in chunks)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["half", "faulty", "half trees"])
def test_distribution_rules_equal_coupled_for_greedy_decoding(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, rule: str, name: str
) -> None:
    """Greedy outputs are equal; the others satisfy all invariants."""
    rng = random.Random(f"{kind}{rule}{name}")
    requests, model = [any_request(rng) for _ in range(12)], toy()
    for index in range(0, len(requests), 2):
        greedy = requests[index].params.replace(temperature=0.0, draw="gumbel", mirostat_tau=0.0)
        requests[index] = dataclasses.replace(requests[index], params=greedy)
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    proposer = (CHAINS | TREES)[name](outputs_by_prompt(requests, expected), rng)
    config = Speculation(lambda: proposer, rng.choice([4, 9]), rule, adaptive=False, tree_width=1 + 2 * (name in TREES))
    engine = Engine(runner(kind, model, 64), llm.tokenizer, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        found = chunks_by_index(events, request.params.n)
        if request.params.temperature == 0:
            assert found == own, request
        for chunks in found:
            assert_valid(grammars, request, chunks)
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
    [plain] = drive(Engine(runner("paged", toy(), 64), llm.tokenizer, backend="reference"), [search])
    assert [event.chunk for event in beams] == [event.chunk for event in plain]
    assert engine.stats.speculative.accepted_tokens > 0
    assert is_empty(engine)


# with guidance and contrastive decoding, drafts are verified on both sequences


def run_companions(
    llm: nc.LLM, kind: str, requests: list[Request], config: Speculation, **options: int
) -> list[list[EngineOutput]]:
    model, others = runner(kind, toy(), 100), runner(kind, weaker(), 100)
    given: Any = {"companion_runner": others, "speculative_config": config, "backend": "reference", **options}
    engine = Engine(model, llm.tokenizer, **given)
    found = drive(engine, requests)
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0
    return found


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 9}])
@pytest.mark.parametrize("proposer", [Oracle, TreeOracle])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_chunks_with_companions_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, int], proposer: type[Oracle], share: float
) -> None:
    rng = random.Random(f"{kind}{options}{proposer.__name__}{share}")
    requests = [any_companion_request(rng) for _ in range(14)]
    expected = [companion_chunks(toy(), llm.tokenizer, request, grammars) for request in requests]
    made = proposer(outputs_by_prompt(requests, expected), share)
    width = 3 if proposer is TreeOracle else 1
    config = Speculation(lambda: made, rng.choice([3, 6]), adaptive=False, tree_width=width)
    found = run_companions(llm, kind, requests, config, **options)
    for request, own, events in zip(requests, expected, found, strict=True):
        assert chunks_by_index(events, request.params.n) == own, request


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("rule", RULES)
def test_distribution_rules_with_companions_equal_coupled(llm: nc.LLM, kind: str, rule: str) -> None:
    rng = random.Random(f"{kind}{rule}")
    requests = [companion_request(rng) for _ in range(16)]
    requests = [dataclasses.replace(one, params=one.params.replace(temperature=0.0)) for one in requests]
    expected = [companion_chunks(toy(), llm.tokenizer, request) for request in requests]
    made = Oracle(outputs_by_prompt(requests, expected), 0.7)
    found = run_companions(llm, kind, requests, Speculation(lambda: made, 4, rule, adaptive=False))
    for request, own, events in zip(requests, expected, found, strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
