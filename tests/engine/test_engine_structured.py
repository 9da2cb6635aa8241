"""Structured output in the engine: the reference's chunks, forced tokens, and other parameters with a grammar."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from bundled_grammars import TOKENIZER, bundled_compiler
from grammar_examples import RECORD, validated
from toy_models import PagedToy
from toy_requests import (
    KINDS,
    SIZE,
    chunks_by_index,
    drive,
    is_empty,
    random_request,
    reference_chunks,
    rule,
    runner,
    toy,
)

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, EngineOutput, Validation
from nucleate.structured_output import (
    GrammarCompiler,
    GrammarLimits,
    compiler,
    grammar_matcher,
    guide,
    llguidance_engine,
    llguidance_library,
)

SECTIONS: dict[str, Any] = {
    "structural_tag": {
        "structures": [{"begin": "e", "schema": {"enum": ["ha", 12, [True]]}, "end": "!"}],
        "triggers": ["e"],
    }
}
"""Sections that begin with a frequent letter."""
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": RECORD, "whitespace": "none"},
    {"json_schema": RECORD},
    {"json_object": True},
    {"json_schema": {"const": {"all of it": ["is", "forced", 1.5, None]}}, "whitespace": "none"},
    {"choice": ["yes", "no", "perhaps not today", "perhaps not tomorrow"]},
    {"regex": "[0-9]{3}-[0-9]{4}"},
    {"regex": "[a-z ]{4,}"},
    {"regex": "a very long text that leaves no choice at all"},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "on_unsupported": "ignore"},
    SECTIONS,
]
EVERY_STAGE = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"mirostat_tau": 3.0},
    {"adaptive_p_target": 0.4},
    {"typical_p": 0.6, "min_p": 0.02, "frequency_penalty": 1.0},
    {"dry_multiplier": 0.8, "no_repeat_ngram_size": 4},
    {"xtc_probability": 0.9, "xtc_threshold": 0.05},
    {"logit_bias": {300: 5.0}, "suppress_token_ids": [301]},
    {"logprobs": 2},
    {"logprobs": 2, "logprobs_mode": "processed", "top_k": 5},
    {"draw": "categorical", "top_k": 30},
]


def engine_of(kind: str = "paged", blocks: int = 300, **options: Any) -> Engine:
    return Engine(runner(kind, toy(), blocks), TOKENIZER, **{"backend": "reference", **options})


def expected(request: Request) -> list[list[CompletionChunk]]:
    """The chunks of each output, from the reference loop."""
    return reference_chunks(toy(), TOKENIZER, request, bundled_compiler())


def events_of(structured_outputs: Any, kind: str = "paged", **params: Any) -> list[EngineOutput]:
    """The events of one request."""
    params["structured_outputs"] = structured_outputs
    [events] = drive(engine_of(kind), [Request([5, 6], nc.SamplingParams(**params))])
    return events


def last(events: list[EngineOutput]) -> CompletionChunk:
    return events[-1].chunk


def text_of(events: list[EngineOutput]) -> str:
    return "".join(event.chunk.text for event in events)


def structured_request(rng: random.Random) -> Request:
    """A random request, mostly with structured output."""
    request = random_request(rng)
    if rng.random() < 0.2:
        return request
    params = request.params.override(
        structured_outputs=rng.choice(CONSTRAINTS),
        **rng.choice(EVERY_STAGE),
        max_tokens=rng.randint(max(1, request.params.min_tokens), 60),
        stop_regex=(),
    )
    return dataclasses.replace(request, params=params)


@pytest.mark.slow
def test_pauses_of_the_process_change_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, garbage collection, or a slow thread for masks: each may take long between any two steps."""
    params = nc.SamplingParams(seed=7, n=2, max_tokens=20)
    requests = [Request([7, 8, 9], params.replace(structured_outputs=each)) for each in CONSTRAINTS[::3]]
    chunks = [expected(request) for request in requests]
    engine = engine_of("asynchronous", max_num_seqs=3, structured_limits=GrammarLimits(mask_budget_seconds=0.5))
    for request in requests:
        engine.prepare(request)  # compiles the grammar
    clock, fill_all = itertools.count(0, 1000), GrammarCompiler.fill_all
    monkeypatch.setattr(compiler, "OVERLAP_SECONDS", -1.0)
    monkeypatch.setattr(grammar_matcher, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(guide, "thread_time", lambda: float(next(clock)))

    def filled(self: GrammarCompiler, *arguments: Any, **named: Any) -> None:
        time.sleep(0.002 * (next(clock) % 3))
        fill_all(self, *arguments, **named)

    def forward(parts: Any) -> Any:
        grammar_matcher._CPU_TIME.marked = -np.inf  # a forward pass takes long
        return PagedToy.forward(engine.runner, parts)

    monkeypatch.setattr(GrammarCompiler, "fill_all", filled)
    monkeypatch.setattr(engine.runner, "forward", forward)
    assert [chunks_by_index(events, 2) for events in drive(engine, requests)] == chunks


@pytest.mark.slow
def test_masks_computed_during_the_forward_pass_with_model_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if seen[0] == 13 and len(seen) > 6:
            raise OSError("no memory")
        return rule(seen)

    monkeypatch.setattr(compiler, "OVERLAP_SECONDS", -1.0)
    engine = Engine(runner("paged", toy(of=fails), 300), TOKENIZER, backend="reference")
    rng = random.Random(3)
    params = nc.SamplingParams(structured_outputs={"regex": "[a-z ]{30,}"}, max_tokens=12, seed=7, ignore_eos=True)
    requests = [Request([13, rng.randrange(40), 3] if i % 3 == 1 else [i, 4], params) for i in range(9)]
    threads = set()
    fill_all = GrammarCompiler.fill_all

    def filled(self: GrammarCompiler, *arguments: Any, **named: Any) -> None:
        threads.add(threading.current_thread().name.split("_")[0])
        fill_all(self, *arguments, **named)

    monkeypatch.setattr(GrammarCompiler, "fill_all", filled)
    for request, events in zip(requests, drive(engine, requests), strict=True):
        if request.prompt_ids[0] == 13:
            assert last(events).finish_reason == "error"
            assert "no memory" in str(last(events).stop_reason)
        else:
            assert chunks_by_index(events, 1) == expected(request)
    assert "nucleate-masks" in threads
    assert is_empty(engine)


@pytest.mark.slow
def test_beam_searches_do_not_fill_masks_that_are_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two threads would use one matcher, which the library does not support."""
    monkeypatch.setattr(compiler, "OVERLAP_SECONDS", -1.0)
    engine = engine_of()
    filling = threading.Lock()
    here, fill_all = threading.current_thread(), GrammarCompiler.fill_all
    together = []

    def filled(self: GrammarCompiler, *arguments: Any, **named: Any) -> None:
        together.append(not filling.acquire(blocking=False))
        if threading.current_thread() is not here:
            time.sleep(0.02)
        fill_all(self, *arguments, **named)
        if not together[-1]:
            filling.release()

    monkeypatch.setattr(GrammarCompiler, "fill_all", filled)
    request = Request([7, 8, 9], nc.SamplingParams(structured_outputs={"regex": "[a-z ]{30,}"}, max_tokens=12, seed=7))
    engine.add(nc.BeamRequest([1, 2, 3], nc.BeamParams(num_beams=3, max_tokens=12)))
    number = engine.add(request)
    events = []
    while len(engine):
        events += [event for event in engine.step() if event.request_id == number]
    assert not any(together)
    assert chunks_by_index(events, 1) == expected(request)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("stage", EVERY_STAGE, ids=str)
@pytest.mark.parametrize("structured_outputs", CONSTRAINTS[:4] + CONSTRAINTS[7:8], ids=str)
def test_jump_forward_changes_no_output(structured_outputs: dict[str, Any], stage: dict[str, Any]) -> None:
    params = nc.SamplingParams(**{"structured_outputs": structured_outputs, "seed": 5, "max_tokens": 60, **stage})
    request = Request([7, 8, 9], params)
    engine = engine_of()
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == expected(request)
    not_skippable = {"logprobs", "suppress_token_ids", "dry_multiplier"} & stage.keys()
    if structured_outputs.get("whitespace") == "none" or "regex" in structured_outputs:
        assert bool(engine.stats.jump_forward_tokens) != bool(not_skippable)


def test_forced_tokens_are_computed_in_one_step() -> None:
    engine = engine_of()
    text = "a very long text that leaves no choice at all"
    [events] = drive(engine, [Request([5, 6], nc.SamplingParams(structured_outputs={"regex": text}))])
    assert text_of(events) == text
    assert engine.num_steps == 1
    assert engine.stats.jump_forward_tokens == len(events) - 1 > 5
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(events)


def test_forced_tokens_respect_max_tokens() -> None:
    events = events_of({"regex": "a very long text that leaves no choice at all"}, max_tokens=4)
    assert [event.chunk.finish_reason for event in events] == [None, None, None, "length"]


def run_one(structured_outputs: Any, kind: str = "paged", **params: Any) -> tuple[str, str | None, Any]:
    events = events_of(structured_outputs, kind, seed=1, **params)
    return text_of(events), last(events).finish_reason, last(events).stop_reason


@pytest.mark.parametrize("kind", KINDS)
class TestOtherParameters:
    """Other request parameters combined with a grammar."""

    def test_the_grammar_decides_at_the_last_token(self, kind: str) -> None:
        [seven] = TOKENIZER.encode("7", add_special_tokens=False)
        assert run_one({"choice": ["7"]}, kind, max_tokens=1) == ("7", "stop", None)
        assert run_one({"choice": ["7"]}, kind, max_tokens=1, stop_token_ids=[seven]) == ("", "stop", seven)
        assert run_one({"choice": ["7"]}, kind, max_tokens=1, stop="7") == ("", "stop", "7")

    def test_min_tokens_beyond_the_grammar(self, kind: str) -> None:
        assert run_one({"choice": ["7"]}, kind, min_tokens=20) == ("7", "stop", None)

    def test_min_tokens_within_the_grammar(self, kind: str) -> None:
        text, why, _ = run_one({"regex": "[a-z]{0,99}"}, kind, min_tokens=12, max_tokens=12)
        assert why == "length"
        assert re.fullmatch("[a-z]+", text)

    @pytest.mark.slow
    def test_ignore_eos_continues_as_long_as_the_grammar_allows(self, kind: str) -> None:
        text, why, _ = run_one({"regex": "[a-z]{0,300}"}, kind, ignore_eos=True, max_tokens=40)
        assert why == "length"
        assert re.fullmatch("[a-z]{40,}", text)
        text, why, _ = run_one({"regex": "[a-z]{0,9}"}, kind, ignore_eos=True)
        assert why == "stop"
        assert re.fullmatch("[a-z]{9}", text)

    def test_a_stop_string_within_the_grammar(self, kind: str) -> None:
        text, why, which = run_one({"json_schema": RECORD, "whitespace": "none"}, kind, stop='"kind"')
        assert text.endswith(",")
        assert (why, which) == ("stop", '"kind"')

    def test_bans_that_leave_nothing_end_only_their_sequence(self, kind: str) -> None:
        seven = [token for token in range(SIZE) if "7" in TOKENIZER.decode([token])]
        alive = Request([1, 2], nc.SamplingParams(seed=3, max_tokens=9))
        dies = Request([1, 2], nc.SamplingParams(structured_outputs={"regex": "a{9}7"}, suppress_token_ids=seven, n=2))
        engine = engine_of(kind)
        events, others = drive(engine, [dies, alive])
        for output in chunks_by_index(events, 2):
            assert "".join(chunk.text for chunk in output) == "a" * 9
            assert output[-1].finish_reason == "error"
            assert "no token satisfies the structured-output constraint" in str(output[-1].stop_reason)
        assert chunks_by_index(others, 1) == expected(alive)
        assert is_empty(engine)

    def test_logprobs_raw_and_processed(self, kind: str) -> None:
        for mode in ("raw", "processed"):
            for event in events_of({"regex": "[01]{4}"}, kind, logprobs=3, logprobs_mode=mode, seed=2):
                [step] = event.chunk.logprobs or ()
                shown = [TOKENIZER.decode([each.token_id]) for each in step.top if each.logprob > -np.inf]
                inside = all(set(text) <= {"0", "1"} for text in shown)
                assert inside == (mode == "processed")

    @pytest.mark.slow
    def test_outputs_with_ignored_keywords_are_validated(self, kind: str) -> None:
        events = events_of({"json_schema": validated(4), "on_unsupported": "ignore"}, kind, seed=1, n=2)
        for chunks in chunks_by_index(events, 2):
            *others, end = (chunk.validation for chunk in chunks)
            assert not any(others)
            assert isinstance(end, Validation)
            assert end.ignored == ("uniqueItems",)
            assert len(end.errors) == 1
            assert "non-unique" in end.errors[0]
        supported = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4}
        events = events_of({"json_schema": supported, "on_unsupported": "ignore"}, kind, seed=1)
        assert last(events).validation is None

    @pytest.mark.parametrize("fault", ["it broke", "not allowed here"])
    def test_grammar_failures_end_only_their_sequence(
        self, kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A matcher has an error, or rejects a token that its mask allowed."""
        engine = engine_of(kind)
        params = nc.SamplingParams(structured_outputs={"regex": "[a-z]{30}"}, seed=1)
        dies, lives = engine.add(Request([1, 2], params)), engine.add(Request([1, 3], params))
        events = engine.step()
        [branch] = engine._requests[dies].sequences.values()
        failing = branch.processor.guide.matcher
        accept_token = type(failing).accept_token

        def accept(matcher: Any, token: int) -> None:
            if matcher is failing:
                raise ValueError(fault)
            accept_token(matcher, token)

        if fault == "it broke":
            failing._error = fault
        else:
            monkeypatch.setattr(type(failing), "accept_token", accept)
        while len(engine):
            events += engine.step()
        of = {number: [event for event in events if event.request_id == number] for number in (dies, lives)}
        assert last(of[dies]).finish_reason == "error"
        assert last(of[dies]).stop_reason == f"the output cannot satisfy its structured-output constraint: {fault}"
        assert re.fullmatch("[a-z]{30}", text_of(of[lives]))
        assert last(of[lives]).finish_reason == "stop"
        assert is_empty(engine)


def test_slow_masks_end_only_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grammar_matcher, llguidance_engine):  # as if each call took 50 ms longer
        monkeypatch.setattr(module, "FREE_SECONDS", -0.05)
    monkeypatch.setattr(compiler, "SLOW_STEP_SECONDS", -1.0)
    engine = engine_of(structured_limits=GrammarLimits(mask_budget_seconds=0.4))
    params = nc.SamplingParams(structured_outputs={"regex": "[0-9]{3,30}"}, logprobs=0, ignore_eos=True, seed=1)
    other = params.replace(
        structured_outputs={"regex": "[0-9]{3,31}"}, max_tokens=3
    )  # outputs of one grammar share its time budget
    slow, quick = drive(engine, [Request([1, 2], params), Request([1, 3], other)])
    assert last(slow).finish_reason == "error"
    assert 3 <= len(slow) <= 8
    assert "too long" in str(last(slow).stop_reason)
    assert last(quick).finish_reason == "length"
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("structured_outputs", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"json_schema": {"uniqueItems": True}}, "json_schema"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"choice": ["x" * 30_000]}, "choice"),
    ],
)
def test_grammars_that_do_not_compile_are_rejected(structured_outputs: dict[str, Any], field: str) -> None:
    engine = engine_of()
    with pytest.raises(nc.ParameterError) as caught:
        engine.add(Request([1], nc.SamplingParams(structured_outputs=structured_outputs)))
    assert caught.value.field == field
    assert is_empty(engine)


def test_without_llguidance_requests_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("structured output needs the package llguidance")

    monkeypatch.setattr(llguidance_engine, "library", missing)
    monkeypatch.setattr(llguidance_library, "library", missing)
    with pytest.raises(nc.ParameterError, match="llguidance") as caught:
        engine_of().add(Request([1], nc.SamplingParams(structured_outputs={"regex": "a"})))
    assert caught.value.field == "structured_outputs"


def test_without_jsonschema_requests_that_need_validation_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    supported = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    lenient = nc.SamplingParams(structured_outputs={"json_schema": supported, "on_unsupported": "ignore"})
    engine.prepare(Request([1], lenient))
    unique = {"json_schema": {**supported, "uniqueItems": True}, "on_unsupported": "ignore"}
    with pytest.raises(nc.ParameterError, match="needs jsonschema") as caught:
        engine.prepare(Request([1], nc.SamplingParams(structured_outputs=unique)))
    assert caught.value.field == "structured_outputs"
