"""Beam search with structured output: every output conforms, and equals the reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from beam_searches import expected_beams, found_beams
from grammar_examples import validated
from toy_requests import KINDS, drive, is_empty, runner, toy

import nucleate as nc
from nucleate.engine.beam_params import BeamParams, BeamRequest
from nucleate.engine.beam_search import BeamConstraint
from nucleate.engine.engine import Engine
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, MatcherError

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 12}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "choice": nc.StructuredOutputs(choice=("a cat", "a dog", "a dragon", "the cat")),
    "regex": nc.StructuredOutputs(regex="[ab]{1,4}c?"),
    "numbers": nc.StructuredOutputs(regex="-?[1-9][0-9]{0,2}"),
    "schema": nc.StructuredOutputs(json_schema=PERSON, whitespace="none"),
    "object": nc.StructuredOutputs(json_object=True),
    "sections": nc.StructuredOutputs(
        structural_tag={  # type: ignore[arg-type]
            "structures": [{"begin": "e", "schema": {"enum": ["ha", 12]}, "end": "!"}],
            "triggers": ["e"],
        }
    ),
}


def allowed_by(grammar: CompiledGrammar, *, ignore_eos: bool) -> Callable[[tuple[int, ...]], set[int]]:
    def allowed(ids: tuple[int, ...]) -> set[int]:
        matcher = grammar.matcher(ignore_eos=ignore_eos)
        for token in ids:
            matcher.accept_token(token)
        if ids and matcher.terminated:
            return set()
        mask_W = np.empty(grammar.num_words, np.int32)
        matcher.fill_bitmask(mask_W)
        return set(np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist())

    return allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.fast_cases(0)
def test_beams_equal_the_reference(llm: nc.LLM, grammars: GrammarCompiler, kind: str, name: str) -> None:
    rng = random.Random(f"{kind}{name}")
    model, grammar = toy(), grammars.compile(CONSTRAINTS[name])
    engine = Engine(runner(kind, model, rng.choice([20, 200])), llm.tokenizer, backend="reference")
    requests = []
    for ignores in (False, True):
        num_beams = rng.randint(1, 5)
        params = BeamParams(
            num_beams=num_beams, max_tokens=rng.randint(2, 8), structured_outputs=CONSTRAINTS[name], ignore_eos=ignores,
            length_penalty=rng.choice([0.0, 1.0, 2.0]), early_stopping=rng.choice([True, False, "never"]),
        )  # fmt: skip
        requests.append(BeamRequest([rng.randrange(1, 40) for _ in range(5)], params))
    for request, events in zip(requests, drive(engine, requests), strict=True):
        allowed = allowed_by(grammar, ignore_eos=request.params.ignore_eos)
        assert found_beams(events) == expected_beams(model, request, llm.tokenizer.eos_token_ids, allowed=allowed)
    assert is_empty(engine)
    assert engine.stats.grammar_mask_seconds > 0


def test_many_beams_find_every_possible_text(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    texts = ("a cat", "a dog", "a dragon", "the cat", "no")
    [completion] = llm.beam_search("It was", num_beams=200, structured_outputs=nc.StructuredOutputs(choice=texts))
    assert {beam.text for beam in completion.outputs} == set(texts)
    assert {beam.finish_reason for beam in completion.outputs} == {"stop"}
    assert len({beam.token_ids for beam in completion.outputs}) == len(completion.outputs)


def test_outputs_with_ignored_keywords_are_validated(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    structured = nc.StructuredOutputs(json_schema=validated(2), on_unsupported="ignore", whitespace="none")
    grammars.compile(structured).validate("[1,2]")  # load the library first, which takes time
    [completion] = llm.beam_search("x", num_beams=4, structured_outputs=structured, max_tokens=20)
    assert {beam.text for beam in completion.outputs} == {"[1,1]", "[1,2]", "[2,1]", "[2,2]"}
    for beam in completion.outputs:
        assert beam.validation is not None
        assert bool(beam.validation.errors) == (beam.text in ("[1,1]", "[2,2]"))


def test_logits_that_allow_no_valid_token_are_an_error(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    def mute(ids: tuple[int, ...]) -> np.ndarray:
        logits = np.full(4096, -np.inf, np.float32)
        logits[7] = 0.0
        return logits

    engine = Engine(runner("paged", toy(of=mute)), llm.tokenizer, backend="reference")
    params = BeamParams(num_beams=2, structured_outputs=CONSTRAINTS["choice"], max_tokens=5)
    [[event]] = drive(engine, [BeamRequest([1, 2], params)])
    assert event.chunk.finish_reason == "error"
    assert "every token that is allowed is at -inf" in str(event.chunk.stop_reason)
    assert is_empty(engine)


def test_grammar_failures_end_only_their_search(
    llm: nc.LLM, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(runner("paged", toy()), llm.tokenizer, backend="reference")
    params = BeamParams(num_beams=2, structured_outputs=CONSTRAINTS["choice"], max_tokens=5)

    def advance(constraint: BeamConstraint, token: int) -> tuple[BeamConstraint, bool]:
        raise MatcherError("the grammar engine failed")

    monkeypatch.setattr(BeamConstraint, "advance", advance)
    plain = BeamRequest([1, 2], BeamParams(num_beams=2, max_tokens=5))
    [event], good = drive(engine, [BeamRequest([1, 2], params), plain])
    message = "the output cannot satisfy its structured-output constraint: the grammar engine failed"
    assert (event.chunk.finish_reason, event.chunk.stop_reason) == ("error", message)
    assert found_beams(good) == expected_beams(toy(), plain, llm.tokenizer.eos_token_ids)
    assert is_empty(engine)


def test_unsupported_patterns_are_rejected(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    with pytest.raises(nc.ParameterError, match="regex") as error:
        llm.beam_search("x", structured_outputs=nc.StructuredOutputs(regex="a(?=b)"))
    assert error.value.field == "regex"
