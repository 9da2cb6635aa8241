"""Prefix caching and chunked prompts on runners that keep, and can save, the state of each sequence."""

from __future__ import annotations

import random

import pytest
from toy_models import SavingToy
from toy_requests import chunks_by_index, drive, reference_chunks, tokens_of, toy

import nucleate as nc
from nucleate.engine.beam_params import BeamParams, BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request

GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)
SYSTEM = [*range(1, 41)]


def engine_of(llm: nc.LLM, blocks: int = 100, **options: int) -> Engine:
    return Engine(SavingToy(toy(), blocks, 4), llm.tokenizer, backend="reference", **options)


def starts(engine: Engine) -> list[list[tuple[int, int]]]:
    """The start and stop of the prompt chunks of each sequence, in order of arrival."""
    found: dict[int, list[tuple[int, int]]] = {}
    for key, start, stop in (one for forward in engine.runner.forwards for one in forward):
        found.setdefault(key, []).append((start, stop))
    return [[one for one in spans if one[1] - one[0] > 1] for _, spans in sorted(found.items())]


def run(llm: nc.LLM, engine: Engine, *prompts: list[int], params: nc.SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens after some prompts that arrive together, which are those of the reference."""
    requests = [Request(prompt, params) for prompt in prompts]
    events = drive(engine, requests)
    for request, own in zip(requests, events, strict=True):
        assert chunks_by_index(own, params.n) == reference_chunks(toy(), llm.tokenizer, request)
    return [tokens_of(own) for own in events]


def test_long_prompts_are_computed_in_chunks_beside_sequences_that_decode(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=10, max_num_seqs=10)
    engine.add(Request([1, 2], GREEDY))
    engine.step()
    engine.add(Request([*range(1, 20)], GREEDY))
    engine.add(Request([7] * 4, GREEDY))
    for _ in range(4):
        engine.step()
    sizes = [[stop - start for _, start, stop in forward] for forward in engine.runner.forwards]
    assert sizes == [[2], [1, 9], [1, 9], [1, 1, 4], [1, 1, 1]]  # the last prompt is not split for the rest of a step


def test_the_next_turn_of_a_chat_continues_the_sequence(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    [output] = run(llm, engine, SYSTEM)
    second = [*SYSTEM, *output, 50, 51]
    [[*_, last]] = drive(engine, [Request(second, GREEDY)])
    assert starts(engine)[1] == [(45, 48)]  # the last token of the output was not computed
    assert last.usage.cached_tokens == 45
    assert (engine.stats.prefix_cache_hits, engine.stats.prefix_cache_queries) == (45, 88)
    run(llm, engine, second)


def test_a_common_beginning_is_computed_twice_and_then_found(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    for end in (50, 60, 70, 80):
        run(llm, engine, [*SYSTEM, end, 1, 2])
    assert starts(engine) == [[(0, 43)], [(0, 40), (40, 43)], [(40, 43)], [(40, 43)]]


def test_prompts_that_arrive_together_share_a_state(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=44, max_num_seqs=8)
    run(llm, engine, *[[*SYSTEM, end, 1, 2] for end in (50, 60, 70, 80)])
    assert [spans[0][0] for spans in starts(engine)] == [0, 0, 40, 40]
    assert engine.runner.saved.count(40) == 1


def test_other_outputs_of_a_prompt_continue_its_state(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=44, max_num_seqs=8)
    run(llm, engine, SYSTEM, params=GREEDY.replace(n=4, temperature=1.0))
    assert [spans[:1] for spans in starts(engine)] == [[(0, 40)], [(0, 39)], [], []]


@pytest.mark.parametrize("prompt", [SYSTEM[:30], [*SYSTEM[:20], 99, *SYSTEM[:30]]])
def test_short_beginnings_are_not_worth_a_state(llm: nc.LLM, prompt: list[int]) -> None:
    engine = engine_of(llm)
    run(llm, engine, SYSTEM[:30])
    run(llm, engine, prompt)
    assert starts(engine)[1] == [(0, len(prompt))]


def test_states_use_only_blocks_that_no_sequence_needs(llm: nc.LLM) -> None:
    engine = engine_of(llm, blocks=36)
    for first in range(1, 6):
        run(llm, engine, [first] * 40)  # of 12 blocks with its output
        assert engine._kv_cache.num_free_blocks == 36
    assert len(engine._kv_cache._states) == 3
    assert [ids[0] for ids in engine._kv_cache._states] == [3, 4, 5]
    run(llm, engine, [4] * 45)
    assert [ids[0] for ids in engine._kv_cache._states] == [5, 4, 4]
    run(llm, engine, [9] * 138)
    assert len(engine._kv_cache._states) == 1
    assert engine.stats.num_preemptions == 0


def test_a_preempted_sequence_continues_where_it_was(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_seqs=1)
    requests = [Request(SYSTEM, GREEDY), Request([7] * 40, GREEDY, priority=-1)]
    engine.add(requests[0])
    outputs = [output for _ in range(3) for output in engine.step()]
    engine.add(requests[1])
    while len(engine):
        outputs += engine.step()
    for request, name in zip(requests, ("request-0", "request-1"), strict=True):
        own = [output for output in outputs if output.request_id == name]
        assert chunks_by_index(own, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert (engine.stats.num_preemptions, engine.stats.computed_tokens) == (1, 2 * 45)


@pytest.mark.parametrize("method", ["save", "restore"])
def test_a_state_that_cannot_be_copied_is_computed_again(
    llm: nc.LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(runner: SavingToy, key: int, *_: object) -> None:
        runner._open.pop(key, None)
        raise MemoryError

    monkeypatch.setattr(SavingToy, method, fails)
    engine = engine_of(llm)
    for end in (50, 60, 70):
        run(llm, engine, [*SYSTEM, end, 1, 2])


def test_nothing_is_saved_without_prefix_caching_or_for_beams(llm: nc.LLM) -> None:
    engine = engine_of(llm, enable_prefix_caching=False)
    run(llm, engine, SYSTEM, [*SYSTEM, 50], [*SYSTEM, 60])
    searching = engine_of(llm)
    drive(searching, [BeamRequest(SYSTEM, BeamParams(num_beams=3, max_tokens=5))])
    assert engine.runner.saved == searching.runner.saved == []


def test_random_chats_have_the_tokens_of_the_reference(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nucleate.engine.state_cache.MIN_TOKENS", 4)
    rng = random.Random(0)
    engine = engine_of(llm, blocks=60, max_num_seqs=3, max_num_batched_tokens=12)
    chats = [[*SYSTEM[: rng.choice((3, 8, 20))]] for _ in range(5)]
    for _ in range(3):
        for chat in chats:
            chat += [rng.randrange(1, 99) for _ in range(rng.randint(1, 9))]
        for chat, output in zip(chats, run(llm, engine, *chats), strict=True):
            chat += output
    assert engine.stats.prefix_cache_hit_rate > 0.3
