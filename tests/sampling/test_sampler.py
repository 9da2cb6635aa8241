"""The Sampler: adding and removing rows, rejected arguments, state after errors, seeds, logprobs."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.host_batch import HostBatch
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.stages import (
    AdaptiveP,
    Allowed,
    BadWords,
    Dry,
    DynamicTemperature,
    Frequency,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    Mask,
    MinP,
    MinTokens,
    Mirostat,
    NoRepeatNgram,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopK,
    TopP,
    Typical,
    Xtc,
)

V = 37
STATELESS = (
    (Gumbel(1),),
    (Temperature(0.7), TopP(0.9), Gumbel(2)),
    (LogitBias({3: 2.0}), Repetition(1.3), Frequency(0.4), Presence(0.2, 5), MinP(0.05), Gumbel(3)),
    (Dry(0.8, 1.75, 1, ((4,),)), NoRepeatNgram(2), BadWords(((1, 2), (3,))), Gumbel(4)),
    (MinTokens(3, (5, 6)), Suppress((7,)), TopK(9), Typical(0.8), Xtc(0.5, 0.05), Gumbel(5)),
    (Temperature(0.0), Gumbel(6)),
    (DynamicTemperature(0.5, 1.5), Greedy()),
    (Logprobs(2, (3,)), Temperature(0.7), Gumbel(7)),
)
STATEFUL = (
    (Mirostat(3.0), Gumbel(8)),
    (AdaptiveP(0.3), Gumbel(9)),
    (Mirostat(2.0), Xtc(0.5), AdaptiveP(0.2), Gumbel(1)),
)
ALL = (*STATELESS, *STATEFUL)


def logits(seed, rows, size=V):
    return np.random.default_rng(seed).normal(size=(rows, size)).astype(np.float32) * 3


def packed(allowed):
    """Booleans [R, V] as a mask."""
    size = -(-allowed.shape[1] // 32) * 32
    return np.packbits(np.pad(allowed, ((0, 0), (0, size - allowed.shape[1]))), axis=1, bitorder="little").view("<i4")


def full(pipelines=ALL):
    sampler = nc.Sampler(V)
    return sampler, [sampler.add(stages, [1, 2, position % 5]) for position, stages in enumerate(pipelines)]


def state(sampler):
    """All state that later tokens depend on."""
    return copy.deepcopy(
        {row: (sampler.stages(row), sampler.seed(row), sampler.output_ids(row)) for row in sampler.rows}
    )


# ---- sampling


def test_without_row_numbers_all_rows_are_sampled_in_insertion_order():
    sampler = nc.Sampler(V)
    rows = [sampler.add((LogitBias({token: 1e4}), Gumbel(0))) for token in range(5)]
    assert sampler(logits(0, 5)).token_ids.tolist() == [0, 1, 2, 3, 4]
    sampler.remove(rows[1])
    sampler.remove(rows[0])
    assert sampler(logits(0, 3)).token_ids.tolist() == [2, 3, 4]
    new = sampler.add((LogitBias({9: 1e4}), Gumbel(0)))
    assert new not in rows
    assert (len(sampler), sampler.rows) == (4, (2, 3, 4, new))
    assert sampler(logits(0, 4)).token_ids.tolist() == [2, 3, 4, 9]
    assert sampler(logits(0, 4), [new, 4, 2, 3]).token_ids.tolist() == [9, 4, 2, 3]
    assert sampler(logits(0, 2), np.array([3, new])).token_ids.tolist() == [3, 9]
    assert sampler(logits(0, 1), iter([new])).token_ids.tolist() == [9]
    assert sampler.output_ids(new) == (9, 9, 9, 9)


def test_adding_and_removing_rows_keeps_the_fast_path(monkeypatch):
    rng, size = random.Random(2), 300
    requests = [(Temperature(0.8), TopK(9), Gumbel(1)), (Repetition(1.2, 5), MinP(0.05), Gumbel(2)), (Greedy(),)]
    sampler, alone = nc.Sampler(size, backend="cpu"), nc.Sampler(size, backend="cpu")
    pairs = []
    for turn in range(60):
        if len(pairs) > 6:
            for one, row in zip((sampler, alone), pairs.pop(rng.randrange(len(pairs))), strict=True):
                one.remove(row)
        params = requests[turn % 3]
        pairs.append((sampler.add(params, [1], seed=turn), alone.add(params, [1], seed=turn)))
        if turn < 10:
            continue
        alone_rows = dict(pairs)
        some = rng.sample(sorted(alone_rows), rng.randrange(1, len(alone_rows) + 1))
        for rows in (None, sorted(alone_rows), some, some, some[::-1]):
            named = list(sampler.rows) if rows is None else rows
            x = logits(turn, len(named), size)
            expected = [
                alone._host._step(LogitsInput(x[i : i + 1]), alone._host._make_batch([alone_rows[row]]), None, None)
                for i, row in enumerate(named)
            ]
            with monkeypatch.context() as only:
                only.setattr(HostBatch, "_step", None)
                got = sampler(x, rows)
            assert got.token_ids.tolist() == [int(token_ids[0]) for token_ids, *_ in expected]
            assert got.seeds.tolist() == [sampler.seed(row) for row in named]
    assert [sampler.output_ids(row) for row, _ in pairs] == [alone.output_ids(other) for _, other in pairs]


def test_returned_tokens_are_not_overwritten_and_returned_seeds_are_read_only():
    sampler = nc.Sampler(300, backend="cpu")
    for seed in range(3):
        sampler.add((Gumbel(seed),))
    first = sampler(logits(0, 3, 300))
    tokens_before = first.token_ids.tolist()
    first.token_ids[:] = 0
    assert sampler(logits(1, 3, 300)).seeds.tolist() == [0, 1, 2]
    assert [sampler.output_ids(row)[0] for row in range(3)] == tokens_before
    with pytest.raises(ValueError, match="read-only"):
        first.seeds[0] = 5


def test_an_invalid_row_of_a_subset_is_reported_by_its_position():
    sampler, reference = nc.Sampler(300, backend="cpu"), nc.Sampler(300, backend="cpu")
    for seed in range(4):
        sampler.add((Temperature(0.5), Gumbel(seed)))
        reference.add((Temperature(0.5), Gumbel(seed)))
    x = logits(0, 3, 300)
    x[1, 7] = np.nan
    got = sampler(x, [3, 0, 2])
    assert got.errors == {1: "NaN at token 7"}
    assert got.token_ids.tolist() == [*reference(x[:1], [3]).token_ids, -1, *reference(x[2:], [2]).token_ids]
    assert [sampler.output_ids(row) for row in range(4)] == [reference.output_ids(row) for row in range(4)]
    again = logits(1, 4, 300)
    assert sampler(again).token_ids.tolist() == reference(again).token_ids.tolist()


def test_no_rows_give_empty_results():
    sampler = nc.Sampler(V)
    for rows in (None, [], ()):
        empty = sampler(np.zeros((0, V), np.float32), rows)
        assert (empty.token_ids.tolist(), empty.logprobs, empty.errors, empty.seeds.tolist()) == ([], None, {}, [])
        assert (empty.token_ids.dtype, empty.seeds.dtype) == (np.int64, np.uint64)


def test_a_vocabulary_of_one_token():
    sampler = nc.Sampler(1)
    for stages in ALL:
        if not any(isinstance(stage, LogitBias | BadWords | MinTokens | Logprobs | Dry) for stage in stages):
            sampler.add(stages)
    sampler.add(nc.SamplingParams(temperature=0, top_k=5, seed=1), [0, 0])
    for _ in range(3):
        assert set(sampler(np.full((len(sampler._rows), 1), -50.0, np.float32)).token_ids.tolist()) == {0}


# ---- types of logits


# ---- rejected arguments


WRONG = {
    "one row too few": dict(logits_RV=logits(0, 10)),
    "one row too many": dict(logits_RV=logits(0, 12)),
    "a wrong vocabulary": dict(logits_RV=logits(0, 11, V + 1)),
    "no vocabulary": dict(logits_RV=np.zeros((11, 0), np.float32)),
    "one dimension": dict(logits_RV=logits(0, 11)[0]),
    "three dimensions": dict(logits_RV=logits(0, 11)[None]),
    "integers": dict(logits_RV=logits(0, 11).astype(int)),
    "complex numbers": dict(logits_RV=logits(0, 11).astype(complex)),
    "objects": dict(logits_RV=logits(0, 11).astype(object)),
    "booleans": dict(logits_RV=logits(0, 11) > 0),
    "a row that never was": dict(logits_RV=logits(0, 2), rows=[1, 99]),
    "a negative row": dict(logits_RV=logits(0, 1), rows=[-1]),
    "a row that is gone": dict(logits_RV=logits(0, 2), rows=[1, 11]),
    "a row twice": dict(logits_RV=logits(0, 3), rows=[1, 2, 1]),
    "fewer logits than rows": dict(logits_RV=logits(0, 1), rows=[1, 2]),
    "more logits than rows": dict(logits_RV=logits(0, 2), rows=[1]),
    "logits for no rows": dict(logits_RV=logits(0, 1), rows=[]),
    "a row that is half": dict(logits_RV=logits(0, 1), rows=[1.5]),
    "a row that is text": dict(logits_RV=logits(0, 1), rows=["1"]),
    "rows that are one number": dict(logits_RV=logits(0, 1), rows=1),
    "a mask of too few rows": dict(logits_RV=logits(0, 11), mask=np.full((10, 2), -1, np.int32)),
    "a mask of too few words": dict(logits_RV=logits(0, 11), mask=np.full((11, 1), -1, np.int32)),
    "a mask of one dimension": dict(logits_RV=logits(0, 11), mask=np.full(11, -1, np.int32)),
    "a mask of bytes": dict(logits_RV=logits(0, 11), mask=np.full((11, 8), -1, np.int8)),
    "a mask of booleans": dict(logits_RV=logits(0, 11), mask=np.ones((11, V), bool)),
    "a mask of floats": dict(logits_RV=logits(0, 11), mask=np.ones((11, 2), np.float32)),
    "a mask of long integers": dict(logits_RV=logits(0, 11), mask=np.ones((11, 2), np.int64)),
    "a mask for rows that are not sampled": dict(logits_RV=logits(0, 2), rows=[1, 2], mask=np.ones((11, 2), np.int32)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.fast_cases(4)
def test_wrong_arguments_change_nothing(wrong):
    assert len(ALL) == 11
    (sampler, _), (reference, _) = full(), full()
    for one in (sampler, reference):
        one.remove(one.add((Gumbel(0),)))
        one(logits(9, 11))
    before = state(sampler)
    with pytest.raises((ValueError, TypeError)):
        sampler(**wrong)
    assert state(sampler) == before
    for step in range(3):
        got, expected = sampler(logits(step, 11)), reference(logits(step, 11))
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("params", "more", "kind", "words"),
    [
        ([Gumbel(0)], {}, TypeError, "a tuple of stages"),
        ({}, {}, TypeError, "a tuple of stages"),
        ((Gumbel(0), TopK(1)), {}, ValueError, "one draw, its last stage"),
        ((Logprobs(1), Logprobs(2)), {}, ValueError, "at most one Tap"),
        ((LogitBias({V: 1.0}), Gumbel(0)), {}, ParameterError, f"names token {V}"),
        ((BadWords(((1, V),)), Gumbel(0)), {}, ParameterError, f"names token {V}"),
        ((Dry(1.0, breakers=((V,),)), Gumbel(0)), {}, ParameterError, f"names token {V}"),
        ((Xtc(0.5, exempt=(V,)), Gumbel(0)), {}, ParameterError, f"names token {V}"),
        ((Logprobs(0, (V,)), Gumbel(0)), {}, ParameterError, f"names token {V}"),
        ((BadWords(("text",)), Gumbel(0)), {}, ParameterError, "no tokenizer"),
        ((Dry(1.0, breakers=("\n",)), Gumbel(0)), {}, ParameterError, "no tokenizer"),
        (nc.SamplingParams(bad_words=["text"]), {}, ParameterError, "no tokenizer"),
        ((Gumbel(0),), {"prompt_ids": [V]}, ValueError, "outside the vocabulary"),
        ((Gumbel(0),), {"prompt_ids": [-1]}, ValueError, "outside the vocabulary"),
        ((Gumbel(0),), {"output_ids": [V]}, ValueError, "outside the vocabulary"),
        ((Gumbel(0),), {"prompt_ids": [0.5]}, TypeError, "prompt_ids must be a list"),
        ((Gumbel(0),), {"output_ids": [[1]]}, TypeError, "output_ids must be a list"),
        ((Gumbel(0),), {"prompt_ids": 3}, TypeError, "prompt_ids must be a list"),
        ((Gumbel(0),), {"prompt_ids": "12"}, TypeError, "prompt_ids must be a list"),
        ((Gumbel(0),), {"index": 0.5}, (TypeError, ValueError), "index"),
        ((Gumbel(0),), {"index": -1}, ValueError, "index"),
    ],
)
def test_an_invalid_row_is_rejected_and_changes_nothing(params, more, kind, words):
    (sampler, _), (reference, _) = full(), full()
    before = state(sampler)
    with pytest.raises(kind, match=words):
        sampler.add(params, **more)
    assert state(sampler) == before
    assert sampler.add((Gumbel(7),)) == reference.add((Gumbel(7),))
    assert sampler(logits(0, 12)).token_ids.tolist() == reference(logits(0, 12)).token_ids.tolist()


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "9", None, (5,)])
def test_a_vocabulary_is_at_least_one_token(given):
    with pytest.raises(ParameterError, match="vocab_size must be an integer >= 1"):
        nc.Sampler(given)


def test_unsupported_devices_are_rejected():
    assert nc.Sampler(np.int64(5)).vocab_size == 5
    with pytest.raises(ParameterError, match=r"device must be one that torch supports here|needs torch"):
        nc.Sampler(5, device="tpu")
    with pytest.raises(ParameterError, match="backend must be one of auto, reference, cpu, torch, triton, got"):
        nc.Sampler(5, backend="fast")


@pytest.mark.parametrize("access", ["remove", "seed", "stages", "output_ids"])
def test_an_unknown_row_is_an_error_that_lists_the_existing_rows(access):
    sampler, _ = full(ALL[:3])
    sampler.remove(1)
    for row in (1, 3, -1, None, "0"):
        with pytest.raises(ParameterError, match=r"unknown row .*\(known: 0, 2\)"):
            getattr(sampler, access)(row)
    assert list(sampler._rows) == [0, 2]


# ---- rows without a token


BAD = {
    "NaN": (np.nan, "NaN at token 3"),
    "+inf": (np.inf, r"\+inf at token 3"),
    "nothing": (None, "every token is at -inf"),
}


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_an_invalid_row_is_an_error_and_continues_afterwards(value, words):
    (sampler, rows), (reference, _) = full(), full()
    for step in range(8):
        good = logits(step, len(rows))
        bad, invalid = good.copy(), [step, (step * 3 + 5) % len(rows)] if step % 2 else []
        for position in invalid:
            bad[position, 3] = 0 if value is None else value
            bad[position] = -np.inf if value is None else bad[position]
        before = {position: (sampler.stages(position), sampler.output_ids(position)) for position in invalid}
        got = sampler(bad)
        valid = [position for position in range(len(rows)) if position not in invalid]
        assert got.errors.keys() == set(invalid)
        assert all(got.errors[position].startswith(words.replace("\\", "")) for position in invalid)
        assert all(got.token_ids[position] == -1 for position in invalid)
        assert all((sampler.stages(p), sampler.output_ids(p)) == before[p] for p in invalid)
        assert got.seeds.tolist() == [sampler.seed(row) for row in rows]
        expected = reference(good[valid], valid)
        assert got.token_ids[valid].tolist() == expected.token_ids.tolist()
        actual_logprobs, expected_logprobs = (one.logprobs or [None] * len(one.token_ids) for one in (got, expected))
        assert [actual_logprobs[position] for position in valid] == list(expected_logprobs)
        assert all(actual_logprobs[position] is None for position in invalid)
        assert (got.logprobs is None) == (7 in invalid)


def test_an_error_names_the_stage_that_emptied_the_row():
    sampler = nc.Sampler(4)
    sampler.add((Suppress((0, 1, 2, 3)), Gumbel(0)))
    sampler.add((Allowed(()), Greedy()))
    sampler.add((MinTokens(9, (0, 1, 2, 3)), Gumbel(0)))
    sampler.add((TopK(1), Suppress((2,)), Gumbel(0)))
    sampler.add((Gumbel(0),))
    got = sampler(np.tile(np.array([0.0, 1, 2, 0], np.float32), (5, 1)))
    names = ["suppress", "allowed", "min_tokens", "suppress"]
    assert got.errors == {position: f"every token is at -inf after {name}" for position, name in enumerate(names)}
    assert got.token_ids[4] >= 0
    assert sampler.output_ids(0) == ()


# ---- seeds, resuming


def test_a_generated_seed_is_returned_and_reproduces_the_tokens():
    sampler = nc.Sampler(V)
    for stages in (
        (TopP(0.9),),
        (Temperature(1.5), Gumbel()),
        nc.SamplingParams(),
        nc.SamplingParams(draw="categorical"),
    ):
        sampler.add(stages)
    first = sampler(logits(0, 4))
    assert len(set(first.seeds.tolist())) == 4
    assert first.seeds.tolist() == [sampler.seed(row) for row in range(4)]
    again = nc.Sampler(V)
    for row, seed in enumerate(first.seeds.tolist()):
        again.add((*sampler.stages(row)[:-1], type(sampler.stages(row)[-1])(seed)))
    assert again(logits(0, 4)).token_ids.tolist() == first.token_ids.tolist()
    assert again(logits(1, 4)).token_ids.tolist() == sampler(logits(1, 4)).token_ids.tolist()
    assert again.seed(0) == sampler.seed(0)


def test_outputs_have_consecutive_seeds_that_wrap_around():
    sampler, last = nc.Sampler(V), 2**64 - 2
    rows = [sampler.add(nc.SamplingParams(seed=last), index=index) for index in range(4)]
    assert [sampler.seed(row) for row in rows] == [2**64 - 2, 2**64 - 1, 0, 1]
    x = np.tile(logits(0, 1), (4, 1))
    got = sampler(x)
    assert got.seeds.tolist() == [2**64 - 2, 2**64 - 1, 0, 1]
    params = [nc.SamplingParams(seed=seed) for seed in got.seeds.tolist()]
    assert got.token_ids.tolist() == nc.sample(x, params).tolist()


def test_a_seed_argument_overrides_the_seed_of_the_params():
    sampler = nc.Sampler(V)
    for params in (nc.SamplingParams(seed=5), nc.SamplingParams(), (TopP(0.9), Gumbel(5)), (TopP(0.9),)):
        row = sampler.add(params, seed=2**64 - 1, index=3)
        assert sampler.seed(row) == 2
    x = np.tile(logits(0, 1), (4, 1))
    assert sampler(x).token_ids[0] == nc.sample(x[:1], nc.SamplingParams(seed=2))[0]
    for wrong in (-1, 2**64, 0.5, True, "5"):
        with pytest.raises(ParameterError, match="seed must be an integer"):
            sampler.add((Gumbel(0),), seed=wrong)
    assert list(sampler._rows) == [0, 1, 2, 3]


def test_a_greedy_row_returns_its_seed():
    sampler = nc.Sampler(V)
    for params in (
        *(nc.SamplingParams(temperature=0, seed=5), nc.SamplingParams(top_k=1, seed=5), (Temperature(0.0), Gumbel(5))),
        nc.SamplingParams(draw="greedy", seed=5),
    ):
        assert sampler.seed(sampler.add(params, index=2)) == 7


def test_a_row_resumes_from_its_output():
    pipelines = [stages for stages in STATELESS if stages[-1].name == "gumbel"]
    original = nc.Sampler(V)
    for stages in pipelines:
        original.add(stages, [1, 2, 3])
    for step in range(20):
        if step in (1, 7, 13):
            resumed = nc.Sampler(V)
            for row, stages in enumerate(pipelines):
                resumed.add(stages, [1, 2, 3], output_ids=original.output_ids(row))
        x = logits(step, len(pipelines))
        got = original(x)
        if step > 1:
            more = resumed(x)
            assert more.token_ids.tolist() == got.token_ids.tolist()
            assert more.logprobs == got.logprobs
        elif step == 1:
            resumed(x)
    assert [resumed.output_ids(row) for row in range(3)] == [original.output_ids(row) for row in range(3)]


def test_a_stateful_row_resumes_from_its_stages():
    original, resumed = nc.Sampler(V), nc.Sampler(V)
    for stages in STATEFUL:
        original.add(stages)
    for step in range(9):
        original(logits(step, 3))
    for row in range(3):
        resumed.add(original.stages(row), output_ids=original.output_ids(row))
        assert original.stages(row) != simplify(STATEFUL[row])
    for step in range(9, 20):
        assert resumed(logits(step, 3)).token_ids.tolist() == original(logits(step, 3)).token_ids.tolist()


# ---- masks


def test_a_mask_applies_to_one_step():
    sampler, rows = full()
    allowed = np.random.default_rng(1).random((len(rows), V)) < 0.6
    allowed[:, 20] = True
    masks = packed(allowed)
    for step in range(12):
        x = logits(step, len(rows))
        if step % 2:
            before = state(sampler)
            got = sampler(x, mask=masks if step % 4 == 1 else masks.view(np.uint32))
            assert all(allowed[row, token] for row, token in enumerate(got.token_ids.tolist()))
            assert [type(s) for r in rows for s in sampler.stages(r)] == [type(s) for r in rows for s in before[r][0]]
        else:
            got = sampler(x)
            assert got.errors == {}
    free = nc.Sampler(V)
    for stages in ALL:
        free.add(stages, [1, 2, 0])
    assert any(
        not allowed[row, token] for step in range(9) for row, token in enumerate(free(logits(step, 11)).token_ids)
    )


def test_a_full_mask_changes_nothing_and_an_empty_one_is_an_error():
    (sampler, rows), (reference, _) = full(), full()
    for step in range(3):
        x = logits(step, len(rows))
        every = np.full((len(rows), 5), -1, np.int32)
        every[:, 2:] = 7  # words beyond the vocabulary
        assert sampler(x, mask=every).token_ids.tolist() == reference(x).token_ids.tolist()
    before = state(sampler)
    none = np.zeros((len(rows), 2), np.int32)
    none[:, 1] = ~np.int32(2 ** (V - 32) - 1)  # bits beyond the vocabulary
    got = sampler(x, mask=none)
    assert got.token_ids.tolist() == [-1] * len(rows)
    assert set(got.errors.values()) == {"every token is at -inf after mask"}
    assert state(sampler) == before


def test_a_mask_keeps_its_position_in_the_pipeline():
    sampler = nc.Sampler(4)
    row = sampler.add((TopK(2), Mask(), Gumbel(0)))
    x = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    assert sampler(x, mask=np.array([[0b1110]], np.int32)).token_ids.tolist() == [1]
    assert sampler(x, mask=np.array([[0b1100]], np.int32)).errors == {0: "every token is at -inf after mask"}
    assert sampler.stages(row) == (TopK(2), Mask(), Gumbel(0))
    assert sampler(x).token_ids[0] in (0, 1)


# ---- logprobs


def test_logprobs_are_returned_if_requested_for_the_requested_distribution():
    sampler = nc.Sampler(V)
    fields = dict(logprobs=3, logprob_token_ids=(0, 36, 0), top_k=5, temperature=0.5, seed=1)
    sampler.add(nc.SamplingParams(**fields))
    sampler.add(nc.SamplingParams(**fields, logprobs_mode="processed"))
    sampler.add(nc.SamplingParams(seed=1))
    sampler.add(nc.SamplingParams(logprobs=0, seed=4))
    x = np.tile(logits(3, 1), (4, 1))
    got = sampler(x)
    raw = nc.probabilities(x[:1], (Gumbel(0),))[0]
    cut = nc.probabilities(x[:1], (Temperature(0.5), TopK(5), Gumbel(0)))[0]
    for report, p, token in zip(got.logprobs[:2], (raw, cut), got.token_ids, strict=False):
        assert report.chosen.token_id == token
        assert math.exp(report.chosen.logprob) == pytest.approx(p[token])
        assert [one.token_id for one in report.top] == np.argsort(-p, kind="stable")[:3].tolist()
        assert [one.rank for one in report.top] == [1, 2, 3]
        assert [one.token_id for one in report.requested] == [0, 36, 0]
        assert [math.exp(one.logprob) for one in report.requested] == pytest.approx([p[0], p[36], p[0]])
        assert all((one.rank is None) == (p[one.token_id] == 0) for one in report.requested)
    assert got.logprobs[2] is None
    assert got.logprobs[3].top == got.logprobs[3].requested == ()
    sampler.remove(0)
    sampler.remove(1)
    sampler.remove(3)
    assert sampler(x[:1]).logprobs is None


def test_raw_logprobs_ignore_the_mask_and_processed_ones_do_not():
    x, mask = np.zeros((2, 4), np.float32), np.array([[0b0011]] * 2, np.int32)
    sampler = nc.Sampler(4)
    for mode in ("raw", "processed"):
        sampler.add(nc.SamplingParams(logprobs=4, logprobs_mode=mode, logprob_token_ids=[3], seed=0))
    raw, processed = sampler(x, mask=mask).logprobs
    assert raw.chosen.logprob == pytest.approx(math.log(0.25))
    assert len(raw.top) == 4
    assert processed.chosen.logprob == pytest.approx(math.log(0.5))
    assert (len(processed.top), processed.requested[0]) == (2, (3, -math.inf, None))


ACCEPTING = [
    (Temperature(0.8), TopK(20), Gumbel(5)),
    (Repetition(1.3), Frequency(0.4), Temperature(1.2), TopP(0.9), Gumbel(5)),
    (Typical(0.7), Temperature(0.9), Gumbel(5)),
    (Mirostat(3.0), Gumbel(5)),
    (AdaptiveP(0.4), Gumbel(5)),
    (Temperature(0.7), Greedy()),
]


@pytest.mark.parametrize("stages", ACCEPTING, ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_accepted_token_equals_sampling_with_a_mask_that_allows_only_it(stages, backend):
    rng = np.random.default_rng(3)
    size, forced = 97, (5, 96, 5, 0)
    sampling, accepting = nc.Sampler(size, backend), nc.Sampler(size, backend)
    rows = sampling.add(stages, [1, 2, 5]), accepting.add(stages, [1, 2, 5])
    sampling.add(stages), accepting.add(stages)  # other rows, which stay unchanged
    for step in range(12):
        logits_1V = rng.normal(0, 2, (1, size)).astype(np.float32)
        if step % 3 == 1:
            mask_1W = np.zeros((1, -(-size // 32)), np.int32)
            token = forced[step // 3]
            mask_1W.view(np.uint32)[0, token // 32] = 1 << token % 32
            assert sampling(logits_1V, [rows[0]], mask=mask_1W).token_ids.tolist() == [token]
            accepting.accept(rows[1], token)
        else:
            one, other = sampling(logits_1V, [rows[0]]), accepting(logits_1V, [rows[1]])
            assert one.token_ids.tolist() == other.token_ids.tolist()
        assert sampling.output_ids(rows[0]) == accepting.output_ids(rows[1])
        assert sampling.stages(rows[0]) == accepting.stages(rows[1])
    assert not accepting.output_ids(1)


def test_the_history_of_a_row_grows_with_it() -> None:
    sampler = nc.Sampler(9)
    row = sampler.add((LogitBias({3: 100.0}),), [1, 2], output_ids=[5], seed=1)
    history = sampler.history(row)
    sampler(np.zeros((1, 9), np.float32))
    assert ([*history.prompt], [*history.output]) == ([1, 2], [5, 3])
    with pytest.raises(nc.ParameterError, match="row"):
        sampler.history(7)
