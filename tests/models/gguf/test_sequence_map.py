"""Blocks of the engine as sequences of llama.cpp, with a simulated memory: no token is lost or mixed up."""

from __future__ import annotations

import random

import pytest
import tiers
from toy_models import CellToy
from toy_requests import drive, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.protocol import ModelError
from nucleate.models.runner import Fork, ModelInput

SIZE = 4


def finished(engine: Engine, requests: list[Request]) -> list[dict[int, list[int]]]:
    """The outputs of each request by index, after all have run."""
    found: list[dict[int, list[int]]] = []
    for events in drive(engine, requests):
        found.append({})
        for event in events:
            found[-1].setdefault(event.chunk.index, []).extend(event.chunk.token_ids)
    return found


def requests(count: int, seed: int) -> list[Request]:
    """Requests with common prefixes, more than fit at a time."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1, 40) for _ in range(rng.randint(8, 24))] for _ in range(4)]
    return [
        Request(
            [*rng.choice(prefixes)[: rng.randint(4, 24)], *[rng.randrange(1, 40) for _ in range(rng.randint(1, 6))]],
            nc.SamplingParams(max_tokens=rng.randint(1, 20), seed=seed, ignore_eos=True, n=rng.randint(1, 3)),
        )
        for seed in range(count)
    ]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("slots", "keep"), [(9, 1000), (24, 10), (24, 0), (256, 1000)])
@pytest.mark.parametrize("seed", range(tiers.count(1, 12)))
def test_prefixes_preemption_and_few_slots(llm: nc.LLM, slots: int, keep: int, seed: int) -> None:
    """Slots of finished sequences are given up when numbers or tokens run out; the tokens are computed again then."""
    given = requests(40, seed)
    plain = Engine(CellToy(toy(), 400, SIZE, slots=256), llm.tokenizer, enable_prefix_caching=False)
    runner = CellToy(toy(), 20, SIZE, slots=slots, keep=keep)
    engine = Engine(runner, llm.tokenizer, max_num_seqs=8, max_num_batched_tokens=16)
    assert finished(engine, given) == finished(plain, given)
    assert engine.stats.num_preemptions
    assert engine.stats.prefix_cache_hit_rate > 0
    assert not runner._map._active
    assert sum(slot.length for slot in runner._map._kept.values()) <= keep


def test_a_cached_prefix_is_not_computed_again(llm: nc.LLM) -> None:
    runner = CellToy(toy(), 64, SIZE)
    engine = Engine(runner, llm.tokenizer, max_num_seqs=8)
    prompt, params = [*range(1, 22)], nc.SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    [first] = finished(engine, [Request(prompt, params)])
    computed = runner.context.computed
    assert computed == 21 + 2
    assert finished(engine, [Request(prompt, params)]) == [first]
    assert runner.context.computed == computed + 1 + 2  # the last token of the prompt, after five blocks
    assert len(finished(engine, [Request([*prompt[:15], 7, 7], params)])) == 1
    assert runner.context.computed == computed + 3 + 2 + 2  # three blocks and three tokens of the fourth are there


def test_a_copied_block_is_computed_if_its_source_was_written_again() -> None:
    prompt = [*range(1, 10)]
    for keep in (0, 1000):
        runner = CellToy(toy(), 8, SIZE, keep=keep)
        [expected] = runner.forward([ModelInput(0, prompt, 0, 9, [0, 1, 2], 1)]).copy()
        runner.forget(0)
        runner.copy_blocks([(2, 5), (1, 4)])
        runner.forward([ModelInput(1, [9] * 4, 0, 4, [1], 1)])  # the source of block 4
        runner.forward([ModelInput(2, [8] * 4, 0, 4, [5], 1)])  # the copy of block 2
        assert not runner._map._copied
        assert (runner.forward([ModelInput(3, prompt, 7, 9, [0, 4, 6], 1)]) == expected).all()


def test_beams_share_cells(llm: nc.LLM) -> None:
    for whole in (False, True):
        runner = CellToy(toy(), 64, SIZE, whole=whole)
        engine = Engine(runner, llm.tokenizer, max_num_seqs=8)
        [events] = drive(engine, [nc.BeamRequest([*range(1, 12)], nc.BeamParams(num_beams=4, max_tokens=12))])
        outputs = [event.chunk.token_ids for event in events]
        if not whole:
            expected = outputs
            assert runner.context.computed < 11 + 4 * 12
    assert outputs == expected


def never() -> None:
    raise AssertionError


def test_too_many_sequences() -> None:
    for whole in (False, True):
        mapping = CellToy(toy(), 16, SIZE, slots=3, keep=64, whole=whole)._map
        for key in range(3):
            mapping.prepare(key, 0, 2, [key], never)
        with pytest.raises(ModelError, match="too many sequences at a time"):
            mapping.prepare(3, 0, 2, [3], never)
        mapping.fork(0, 4, None)  # no room: the child starts anew later
        mapping.forget(1)
        assert mapping.prepare(4, 2, 3, [7], never)[1] == 0


def test_an_error_leaves_nothing_behind() -> None:
    """After a failure, the same input can be computed again."""
    runner = CellToy(toy(), 64, SIZE)
    prompt = [*range(1, 11)]
    given = [ModelInput(0, prompt, 0, 10, [4, 5, 6], 1)]
    expected = runner.forward(given).copy()
    failing, runner.context.decode = runner.context.decode, lambda _tokens: (_ for _ in ()).throw(ModelError("no"))
    more = [ModelInput(0, [*prompt, 3], 10, 11, [4, 5, 6], 1), ModelInput(1, prompt, 8, 10, [4, 5, 9], 1)]
    with pytest.raises(ModelError):
        runner.forward(more)
    runner.context.decode = failing
    assert (runner.forward(more)[1] == expected[0]).all()
    assert runner.context.used == 11 + 2  # two blocks are shared


def test_two_sequences_continue_a_prefix_whose_cells_are_gone() -> None:
    """It is computed once, before the second one continues it."""
    runner = CellToy(toy(), 4, SIZE, keep=0)
    prompt = [*range(1, 10)]
    [expected] = runner.forward([ModelInput(0, prompt, 0, 9, [0, 1, 2], 1)]).copy()
    runner.forget(0)
    assert not runner.context.used
    computed = runner.context.computed
    both = [ModelInput(key, prompt, 8, 9, [0, 1, 1 + key], 1) for key in (1, 2)]
    assert (runner.forward(both) == expected).all()
    assert runner.context.computed == computed + 9 + 1


def test_bad_inputs_are_errors_before_anything_is_computed() -> None:
    runner = CellToy(toy(context_length=8), 64, SIZE)
    for token_ids, match in (([1, -1], "token ids must be in 0"), ([1, 10**6], "token ids"), ([1] * 9, "exceed the")):
        with pytest.raises(ValueError, match=match):
            runner.forward([ModelInput(0, token_ids, 0, len(token_ids), [0, 1, 2], 1)])
    assert not runner.context.computed
    assert runner.forward([]).shape == (0, runner.vocab_size)
    with pytest.raises(ModelError, match="hidden states"):
        runner.capture_hidden_states((1,))


def test_max_num_seqs_is_limited(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="max_num_seqs is at most 5 for this model, got 6"):
        Engine(CellToy(toy(), 64, SIZE, slots=5), llm.tokenizer, max_num_seqs=6)


def test_forks_of_unknown_sequences_do_nothing() -> None:
    runner = CellToy(toy(), 64, SIZE)
    runner.fork([Fork(8, 9, None)])
    runner.forget(9)
    runner.move([])
    runner.warm()
