"""The engine returns the same chunks as the reference loop, whatever else is in the batch. Single cases."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from toy_models import PagedToy
from toy_requests import (
    KINDS,
    SIZE,
    TABLE,
    check_prefix_to_the_token,
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
from nucleate.outputs import EngineOutput, SpeculativeStats, Usage
from nucleate.sampling.suffix_automaton import SuffixAutomaton
from nucleate.tokenization.detokenizer import Detokenizer

GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)


def engine_of(llm: nc.LLM, kind: str = "paged", *, blocks: int = 100, of: object = rule, **options: int) -> Engine:
    return Engine(runner(kind, toy(of=of), blocks), llm.tokenizer, backend="reference", **options)


def reasons(events: list[EngineOutput]) -> list[tuple[object, object]]:
    return [(e.chunk.finish_reason, e.chunk.stop_reason) for e in events if e.chunk.finish_reason]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("blocks", [64, 500])
def test_chunks_equal_the_reference(llm: nc.LLM, kind: str, options: dict, blocks: int) -> None:
    rng = random.Random(f"{kind}{options}{blocks}")
    requests = [random_request(rng) for _ in range(25)]
    model = toy()
    engine = Engine(runner(kind, model, blocks), llm.tokenizer, **options, backend="reference")
    for request, events in zip(requests, drive(engine, requests), strict=True):
        expected = reference_chunks(model, llm.tokenizer, request)
        assert chunks_by_index(events, request.params.n) == expected
        written = sum(len(chunk.token_ids) for chunks in expected for chunk in chunks)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
        assert events[-1].finished
    assert is_empty(engine)
    if blocks == 64 and kind != "contexts" and not options:
        assert engine.stats.num_preemptions  # the test must include preemption


def test_a_prefix_may_end_within_a_block(llm: nc.LLM) -> None:
    check_prefix_to_the_token(llm)


def test_n_outputs_compute_the_prompt_once(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    request = Request(range(1, 23), GREEDY.replace(n=5, temperature=1.0, seed=3))
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 5) == reference_chunks(toy(), llm.tokenizer, request)
    first, *others = sorted({key for forward in engine.runner.forwards for key, _, _ in forward})
    begins = {key: start for forward in reversed(engine.runner.forwards) for key, start, _ in forward}
    assert begins == {
        first: 0,
        **dict.fromkeys(others, 20),
    }  # blocks of 4: the last two of 22 tokens are computed again
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (5 * 22, 4 * 20)
    assert engine.stats.prefix_cache_hit_rate == 80 / 110
    assert events[-1].usage == Usage(22, 30)
    assert [event.finished for event in events].count(True) == 1


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("length", [197, 198, 200, 201])  # 201: the others compute one token each, in the same step
def test_a_step_does_not_read_the_prompt_again_for_every_output(
    llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """What a step does per output does not grow with the prompt, which is read once for the first two outputs."""
    read = {"history": 0, "detokenizer": 0}
    for name, kind in (("history", SuffixAutomaton), ("detokenizer", Detokenizer)):

        def counted(self: object, token: int, name: str = name, push: Callable[..., object] = kind.push) -> object:
            read[name] += 1
            return push(self, token)

        monkeypatch.setattr(kind, "push", counted)
    engine = engine_of(llm, blocks=400, max_num_seqs=24, max_num_batched_tokens=240)
    params = GREEDY.replace(n=20, temperature=1.0, dry_multiplier=0.8, no_repeat_ngram_size=30, max_tokens=8)
    request = Request(tuple(place * place % SIZE for place in range(length)), params)
    engine.add(request)
    events, most = [], {"history": 0, "detokenizer": 0}
    while len(engine):
        before = dict(read)
        events += engine.step()
        most = {name: max(most[name], read[name] - before[name]) for name in read}
    assert most["history"] <= 2 * length + 2 * 20  # two stages
    assert read["history"] == 2 * 2 * length + 2 * 20 * 8
    assert most["detokenizer"] <= length + 20
    assert read["detokenizer"] == length + 20 * 8
    assert chunks_by_index(events, 20) == reference_chunks(toy(), llm.tokenizer, request)


def test_other_outputs_wait_for_the_prompt(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(Request(range(1, 23), GREEDY.replace(n=100)))
    assert engine.stats.num_waiting_seqs == 1
    engine.step()
    assert (engine.stats.num_running_seqs, engine.stats.num_waiting_seqs) == (1, 0)
    engine.step()
    engine.step()
    assert (engine.stats.num_running_seqs, engine.stats.num_waiting_seqs) == (1, 99)
    engine.step()
    assert engine.stats.num_running_seqs == 2


def test_prefill_chunks_are_mixed_with_decodes(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=10, max_num_seqs=10)
    engine.add(Request([1, 2], GREEDY))
    engine.step()
    engine.add(Request(range(1, 30), GREEDY))
    for _ in range(4):
        engine.step()
    sizes = [[stop - start for _, start, stop in forward] for forward in engine.runner.forwards]
    assert sizes == [[2], [1, 9], [1, 9], [1, 9], [1, 2]]


def test_a_prompt_does_not_wait_for_the_sequences_that_generate(llm: nc.LLM) -> None:
    engine = llm.new_engine(max_num_seqs=48)
    for number in range(47):
        engine.add(Request([5 + number], nc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
    engine.step()
    late = engine.add(Request([*range(10, 100)], nc.SamplingParams(max_tokens=1, temperature=0)))
    outputs = engine.step()
    assert len(outputs) == 48
    assert [output.finished for output in outputs if output.request_id == late] == [True]


def test_requests_run_by_priority(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_seqs=1)
    ids = [engine.add(Request([1, 2], GREEDY, priority=priority)) for priority in (5, 5, -1, 0)]
    ended = []
    while len(engine):
        ended += [event.request_id for event in engine.step() if event.finished]
    assert ended == [ids[2], ids[3], ids[0], ids[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_logits_end_only_their_sequence(llm: nc.LLM, kind: str) -> None:
    def broken(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(SIZE, np.nan, np.float32) if seen[0] == 9 and len(seen) > 4 else rule(seen)

    requests = [Request([8, 1, 1], GREEDY), Request([9, 1, 1], GREEDY.replace(n=2)), Request([7, 1, 1], GREEDY)]
    events = drive(engine := engine_of(llm, kind, of=broken), requests)
    assert reasons(events[0]) == reasons(events[2]) == [("length", None)]
    assert [reason for reason, _ in reasons(events[1])] == ["error", "error"]
    assert "invalid logits" in str(reasons(events[1])[0][1])
    assert [len(chunks) for chunks in chunks_by_index(events[1], 2)] == [3, 3]  # two tokens, then the error
    assert is_empty(engine)


@pytest.mark.slow
def test_slow_stop_patterns_end_only_their_sequence(llm: nc.LLM) -> None:
    a, b = (llm.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b"))

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        return np.eye(SIZE, dtype=np.float32)[b if len(seen) > 90 else a] * 50

    slow = GREEDY.replace(stop_regex="(a|aa)+c", max_tokens=120)
    events = drive(engine := engine_of(llm, of=scripted), [Request([1], slow), Request([2], GREEDY)])
    assert [reason for reason, _ in reasons(events[0]) + reasons(events[1])] == ["error", "length"]
    assert is_empty(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_model_failures_for_a_sequence_end_only_it(llm: nc.LLM, kind: str) -> None:
    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if seen[0] == 9 and len(seen) > 4:
            raise RuntimeError("a kernel\nhas failed")
        return rule(seen)

    requests = [Request([8, 1, 1], GREEDY), Request([9, 1, 1], GREEDY), Request([7, 1, 1], GREEDY)]
    events = drive(engine := engine_of(llm, kind, of=fails), requests)
    assert reasons(events[1]) == [("error", "the model failed: a kernel has failed")]
    for index in (0, 2):
        assert chunks_by_index(events[index], 1) == reference_chunks(toy(), llm.tokenizer, requests[index])
    assert is_empty(engine)


def test_abort_flushes_buffered_text(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("The little fox", add_special_tokens=False)

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        return np.eye(SIZE, dtype=np.float32)[ids[len(seen) - 1]] * 50

    engine = engine_of(llm, of=scripted)
    number = engine.add(Request([1], GREEDY.replace(stop="The little fox ran")))
    for _ in ids:
        assert [event.chunk.text for event in engine.step()] == [""]
    assert [event.chunk.text for event in engine.abort(number)] == ["The little fox"]


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(2)
def test_prompt_logprobs_with_chunked_prefill(
    llm: nc.LLM, kind: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nucleate.engine.engine.MAX_PROMPT_LOGITS", 5 * SIZE)
    monkeypatch.setattr("nucleate.engine.engine.MIN_PROMPT_CHUNK", 1)
    params = GREEDY.replace(prompt_logprobs=2, logprob_token_ids=[3], n=2)
    same, others = list(range(1, 14)), [Request(range(1, 30), GREEDY.replace(max_tokens=30)) for _ in range(3)]
    requests = [Request(same, GREEDY), *others, Request(same, params), Request([4], params), Request(same, params)]
    engine = engine_of(llm, kind, blocks=34, max_num_seqs=min(budget, 4), max_num_batched_tokens=budget)
    events = drive(engine, requests)
    for request, own in zip(requests, events, strict=True):
        assert chunks_by_index(own, request.params.n) == reference_chunks(toy(), llm.tokenizer, request)


def test_tokens_computed_after_the_end(llm: nc.LLM) -> None:
    """With asynchronous runners: none at a length limit, which is known in advance, and one at a stop token."""
    requests = [Request([1, 2], GREEDY), Request([3, 4], GREEDY)]
    stop = drive(engine_of(llm), requests)[0][2].chunk.token_ids[0]
    requests[0] = Request([1, 2], GREEDY.replace(stop_token_ids=[stop]))
    read = {}
    for kind in ("paged", "asynchronous"):
        drive(engine := engine_of(llm, kind), requests)
        read[kind] = engine.stats.computed_tokens
        assert engine.stats.sampled_tokens == 3 + 6
    assert read["asynchronous"] == read["paged"] + 1


def test_paused_requests_make_no_progress(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    number, request = engine.add(Request([1, 2], GREEDY.replace(n=2))), Request([3, 4], GREEDY)
    other = engine.add(request)
    events = engine.step()
    engine.pause(number)
    for _ in range(20):
        events += engine.step()
    assert [event.request_id for event in events if event.finished] == [other]
    assert engine.step() == []
    engine.pause(number, paused=False)
    engine.pause("nobody")
    while len(engine):
        events += engine.step()
    own = [event for event in events if event.request_id == number]
    assert chunks_by_index(own, 2) == reference_chunks(toy(), llm.tokenizer, Request([1, 2], GREEDY.replace(n=2)))


@pytest.mark.slow
def test_preemption_keeps_the_sampler_state(llm: nc.LLM) -> None:
    """Mirostat's state cannot be computed from the tokens; penalties and seeds continue."""
    params = GREEDY.replace(
        temperature=1.0, max_tokens=30, mirostat_tau=3.0, repetition_penalty=1.3, seed=1, logprobs=2
    )
    requests = [Request([1 + i, 2, 3], params.replace(seed=i)) for i in range(4)]
    engine = engine_of(llm, blocks=14)
    for request, events in zip(requests, drive(engine, requests), strict=True):
        assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert engine.stats.num_preemptions > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_alone_may_fill_the_context_and_the_kv_cache(llm: nc.LLM, kind: str) -> None:
    params = nc.SamplingParams(prompt_logprobs=2, seed=1, n=2, ignore_eos=True)
    engine = engine_of(llm, kind, blocks=10)  # of 4 tokens
    assert engine.context_length == 40
    [events] = drive(engine, [Request(range(1, 41), params, prompt_only=True)])
    assert [len(event.chunk.token_ids) for event in events] == [1, 1]
    shorter = Request(range(1, 40), params.replace(max_tokens=1))
    [others] = drive(engine_of(llm, kind, blocks=10), [shorter])
    found, expected = (ev[0].chunk.prompt_logprobs for ev in (events, others))
    assert len(found) == 40
    assert found[:39] == expected
    [events] = drive(engine, [Request([1, 2, 3], params, prompt_only=True)])  # whatever max_tokens is
    assert [len(event.chunk.token_ids) for event in events] == [1, 1]
    with pytest.raises(nc.ParameterError, match="has 41 tokens, but the context holds 40"):
        engine.add(Request([1] * 41, params, prompt_only=True))
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (lambda: Request([]), "prompt", "the prompt is empty"),
        (lambda: Request("text"), "prompt", "token ids, not text"),
        (lambda: Request([1.5]), "prompt", "must be token ids"),
        (lambda: Request([True]), "prompt", "must be token ids"),
        (lambda: Request(7), "prompt", "must be token ids"),
        (lambda: Request([SIZE]), "prompt", r"outside the vocabulary \(0..4095\)"),
        (lambda: Request([1] * 40), "prompt", "has 40 tokens, but the context holds 40, output included"),
        (lambda: Request([1], {"n": 2}), "params", "must be a SamplingParams"),
        (lambda: Request([1], id=7), "id", "id must be a string"),
        (lambda: Request([1], priority="high"), "priority", "priority must be an integer"),
        (lambda: Request([1], nc.SamplingParams(logit_bias={SIZE: 1.0})), "logit_bias", "names token 4096"),
        (lambda: Request([1], nc.SamplingParams(stop_token_ids=[SIZE])), "stop_token_ids", "names token 4096"),
        (lambda: Request([1], nc.SamplingParams(min_tokens=41)), "min_tokens", "room for 39 tokens"),
        (lambda: Request([1], nc.SamplingParams(stop_regex="(")), "stop_regex", "invalid pattern"),
        (lambda: Request([1], id="here"), "id", "there is a request 'here' already"),
    ],
)
def test_rejected_requests_change_nothing(llm: nc.LLM, request_: object, field: str, message: str) -> None:
    engine = engine_of(llm, blocks=10)  # of 4 tokens
    engine.add(Request([1, 2], GREEDY, id="here"))
    with pytest.raises(nc.ParameterError, match=message) as caught:
        engine.add(request_())
    assert caught.value.field == field
    assert len(engine) == 1
    while len(engine):
        engine.step()
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer >= 1"),
        ({"max_num_batched_tokens": 63}, r"max_num_batched_tokens must be an integer >= max_num_seqs \(64\), got 63"),
        ({"max_model_len": 1}, "max_model_len must be an integer >= 2"),
        ({"max_model_len": 10**6}, r"max_model_len is at most \d+, the context length of this model, got 1000000"),
        ({"backend": "fast"}, "backend must be one of"),
    ],
)
def test_invalid_engine_options(llm: nc.LLM, options: dict, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        Engine(runner("paged", toy()), llm.tokenizer, **options)


def test_request_ids_are_given_or_unused_numbers(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    assert engine.add(Request([1], GREEDY, id="request-0")) == "request-0"
    assert engine.add(Request([1], GREEDY, id="request-1")) == "request-1"
    unused = engine.add(Request([1], GREEDY))
    assert unused not in ("request-0", "request-1")
    assert engine.add(Request([1], GREEDY)) != unused
    while len(engine):
        engine.step()
    assert engine.add(Request([1], GREEDY, id=unused)) == unused  # it has ended


def test_max_model_len_limits_the_length(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_model_len=10)
    [events] = drive(engine, [Request([1, 2, 3], GREEDY.replace(max_tokens=None))])
    assert (len(events), reasons(events)) == (7, [("length", None)])


def test_only_needed_logits_are_requested(llm: nc.LLM) -> None:
    class Counting(PagedToy):
        requested_logits = 0

        def forward(self, parts: object) -> np.ndarray:
            self.requested_logits += sum(part.num_logits for part in parts)
            return super().forward(parts)

    engine = Engine(Counting(toy(), 100, 4), llm.tokenizer, max_num_batched_tokens=5, max_num_seqs=5)
    drive(engine, [Request(range(1, 20), GREEDY), Request(range(1, 9), GREEDY)])
    assert engine.runner.requested_logits == 12


def test_an_idle_step_does_nothing(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    assert engine.step() == []
    assert engine.stats == (0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, SpeculativeStats(), False)
    assert TABLE.shape[1] == engine.vocab_size
