"""Coupled verification in the engine: the chunks of the reference loop, whatever the proposer does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_storm import rule, storm
from scripted_proposers import Answers, Oracle, Silent, Storm
from test_structured_random import FORMS, STAGES, holds
from toy_requests import SIZE, alone, answers, drive, is_empty, random_request, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, Usage
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Proposer
from nucleate.speculative.proposers.ngram import NgramProposer
from nucleate.speculative.proposers.suffix import SuffixProposer
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
    """With any stage, and with a form now and then."""
    request = random_request(rng)
    params = request.params.override(**rng.choice(STAGES))
    if rng.random() < 0.4:
        params = params.replace(
            structured_outputs=nc.StructuredOutputs(**rng.choice(FORMS)), max_tokens=rng.randint(1, 50)
        )
    return dataclasses.replace(request, params=params)


def known(requests: list[Request], wanted: list[list[list[CompletionChunk]]]) -> Answers:
    """What an oracle knows."""
    return {
        (tuple(request.prompt_ids), (request.params.seed + index) % 2**64): [
            token for piece in pieces for token in piece.token_ids
        ]
        for request, own in zip(requests, wanted, strict=True)
        for index, pieces in enumerate(own)
    }


PROPOSERS: dict[str, Callable[[Answers], Proposer]] = {
    "ngram": lambda answers: NgramProposer(3, 1),
    "suffix": lambda answers: SuffixProposer(),
    "oracle": Oracle,
    "half": lambda answers: Oracle(answers, 0.7),
    "liar": lambda answers: Oracle(answers, 0.0),
    "storm": lambda answers: Storm(answers, 0.8),
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
    wanted = [alone(model, llm.tokenizer, request, grammars) for request in requests]
    proposer = PROPOSERS[name](known(requests, wanted))
    asked = Speculation(
        lambda: proposer,
        rng.choice([1, 3, 4, 9]) if name != "oracle" else 6,
        adaptive=rng.random() < 0.3 and name != "oracle",  # which looks at the clock
    )
    engine = Engine(runner(kind, model, 64), llm.tokenizer, **options, speculative_config=asked, backend="reference")
    for request, own, events in zip(requests, wanted, drive(engine, requests), strict=True):
        assert answers(events, request.params.n) == own, request
        written = sum(len(piece.token_ids) for pieces in own for piece in pieces)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
    assert is_empty(engine)
    assert not isinstance(proposer, Silent) or not proposer.keys
    figures = engine.stats.speculative
    if name == "oracle":
        assert figures.mean_acceptance_length > 1.1
        assert figures.accepted_tokens > 0.3 * figures.draft_tokens
    if not options and name != "ngram":
        assert figures.draft_tokens > 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("proposer", ["half", "storm"])
def test_distribution_rules_equal_coupled_for_greedy_decoding(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, name: str, proposer: str
) -> None:
    """A greedy answer has but one text; of the others all is as it must be, whatever they say."""
    rng = random.Random(f"{kind}{name}{proposer}")
    requests, model = [any_request(rng) for _ in range(16)], toy()
    for place in range(0, len(requests), 2):
        greedy = requests[place].params.replace(temperature=0.0, draw="gumbel", mirostat_tau=0.0)
        requests[place] = dataclasses.replace(requests[place], params=greedy)
    wanted = [alone(model, llm.tokenizer, request, grammars) for request in requests]
    made = PROPOSERS[proposer](known(requests, wanted))
    asked = Speculation(lambda: made, rng.choice([2, 4, 9]), name, adaptive=False)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, speculative_config=asked, backend="reference")
    for request, own, events in zip(requests, wanted, drive(engine, requests), strict=True):
        found = answers(events, request.params.n)
        if request.params.temperature == 0:
            assert found == own, request
        for pieces in found:
            assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
            if request.params.structured_outputs is not None and pieces[-1].finish_reason != "error":
                assert holds(grammars, request.params, pieces)
            if request.params.logprobs is not None:
                told = [piece.logprobs[0] for piece in pieces if piece.logprobs]
                assert len(told) == len([piece for piece in pieces if piece.token_ids])
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


def test_beam_searches_in_a_batch_with_drafts(llm: nc.LLM) -> None:
    rng = random.Random(5)
    asked = [random_request(rng) for _ in range(6)]
    wanted = [alone(toy(), llm.tokenizer, request) for request in asked]
    search = nc.BeamRequest([3, 4, 5], nc.BeamParams(num_beams=3, max_tokens=8))
    proposer = Oracle(known(asked, wanted), 0.8)
    speculation = Speculation(lambda: proposer, 5, adaptive=False)
    engine = Engine(runner("paged", toy(), 64), llm.tokenizer, speculative_config=speculation, backend="reference")
    found = drive(engine, [*asked[:3], search, *asked[3:]])
    beams = found.pop(3)
    for request, own, events in zip(asked, wanted, found, strict=True):
        assert answers(events, request.params.n) == own
    plain = Engine(runner("paged", toy(), 64), llm.tokenizer, backend="reference")
    assert [[event.chunk for event in beams]] == [
        [event.chunk for event in events] for events in drive(plain, [search])
    ]
    assert engine.stats.speculative.accepted_tokens > 0
    assert is_empty(engine)


def drafting(seed: int) -> Speculation:
    """Drafts that are often right, and often nonsense."""
    rng = random.Random(seed)

    def best(seen: tuple[int, ...]) -> int:
        return int(rule(seen).argmax())

    return Speculation(lambda: Storm({}, 0.9, rng, best), rng.randint(1, 9), adaptive=False)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("seed", range(3))
def test_a_short_storm(llm: nc.LLM, kind: str, seed: int) -> None:
    storm(llm, kind, seed, steps=350, speculative_config=drafting(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTING)
def test_a_long_storm(llm: nc.LLM, kind: str) -> None:
    storm(llm, kind, 100, steps=10_000, speculative_config=drafting(100))
