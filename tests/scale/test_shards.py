"""Tests of ShardedSampler with ranks as threads: equal to one Sampler, and errors that are the same on all ranks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import near_tie_rows
import numpy as np
import pytest
import shard_ranks
import tiers
import torch
from shard_ranks import OneRank, OneSampler, errors_of_ranks, run_ranks

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.stage import Shift
from nucleate.sampling.stages import Gumbel, LogitBias, Logprobs, Mirostat, Temperature, TopK, TopP, Typical
from nucleate.scale.shards import ShardedSampler, ShardError
from nucleate.sharding import local_shard, rank_exchange


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("any_pipeline", [False, True], ids=["common", "any"])
def test_all_ranks_get_the_results_of_one_sampler(
    ranks: int, any_pipeline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(tiers.count(4, 60)):
        rng = random.Random(seed)
        size, backend = rng.choice([5, 300, 2049, 5000]), rng.choice(["reference", "cpu"])
        shards, steps = shard_ranks.bounds(rng, size, ranks), 15
        pipeline = shard_ranks.any_pipeline if any_pipeline else shard_ranks.hot_pipeline
        expected = shard_ranks.play(OneSampler(size, backend), seed, steps, size, pipeline)

        def results(exchange: Any) -> Any:
            face = OneRank(size, exchange, shards[exchange.rank], backend=backend)  # noqa: B023
            return shard_ranks.play(face, seed, steps, size, pipeline)  # noqa: B023

        with monkeypatch.context() as patch:
            if seed % 2:
                patch.setattr(local_shard, "COMPOSED", NotReady())
            for found in run_ranks(ranks, results):
                assert shard_ranks.same(found, expected), f"seed {seed}"


class NotReady:
    """Stands for kernels that are not loaded."""

    ready = False


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_near_ties_are_decided_as_by_the_reference(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(local_shard, "COMPOSED", NotReady())
    paths = Counter[str]()
    for index in range(tiers.count(24, 700)):
        case = near_tie_rows.case(index)
        size = len(case.logits)
        shards = shard_ranks.bounds(random.Random(index), size, 2)

        def step(exchange: Any) -> Any:
            first, columns = shards[exchange.rank]  # noqa: B023
            sampler = ShardedSampler(size, exchange, backend="reference")  # noqa: B023
            sampler.add(case.stages, output_ids=[0] * case.step)  # noqa: B023
            local = shard_ranks.shard(case.logits[None], first, columns)  # noqa: B023
            return int(sampler(local, first).token_ids[0]), sampler.last_paths[0].partition(":")[0]

        expected = reference.draw(case.logits, case.stages, case.seed, case.step)
        found, other = run_ranks(2, step)
        assert found == other
        assert found[0] == expected, f"case {index}"
        paths[found[1]] += 1
    assert paths.keys() == {"candidates", "top-p", "groups", "whole row"}


ROWS = 4
SIZE = 3000
HALVES = ((0, 1500), (1500, 1500))


def peaked(seed: int = 0) -> Any:
    """Logits of which few tokens have most of the probability."""
    numbers = np.random.default_rng(seed)
    x_RV = numbers.normal(size=(ROWS, SIZE)).astype(np.float32)
    x_RV[:, ::300] += np.linspace(6, 14, 10, dtype=np.float32)
    return x_RV


def tokens_and_paths(params: Any, logits_RV: Any, **arguments: Any) -> tuple[list[int], list[str]]:
    """The tokens and paths of a step of two ranks, which must agree, and equal one Sampler's."""
    one = nc.Sampler(SIZE, "reference")
    for row in range(ROWS):
        one.add(params, seed=row)
    expected = one(logits_RV, **arguments).token_ids.tolist()

    def step(exchange: Any) -> Any:
        first, count = HALVES[exchange.rank]
        sampler = ShardedSampler(SIZE, exchange, backend="reference")
        for row in range(ROWS):
            sampler.add(params, seed=row)
        out = sampler(logits_RV[:, first : first + count], first, **arguments)
        return out.token_ids.tolist(), [*sampler.last_paths], sampler.explain(0), sampler.stats

    results = run_ranks(2, step)
    assert results[0] == results[1]
    tokens, paths, _, stats = results[0]
    assert tokens == expected
    assert stats.calls == 1
    assert stats.rows.total() == ROWS
    return tokens, paths


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (nc.SamplingParams(temperature=0.0), "candidates"),
        (nc.SamplingParams(temperature=0.8, top_k=5), "candidates"),
        (nc.SamplingParams(temperature=0.8, top_k=100), "candidates"),
        (nc.SamplingParams(temperature=0.8, min_p=0.1, repetition_penalty=1.2), "candidates"),
        (nc.SamplingParams(top_k=20, typical_p=0.9, order=("top_k", "typical")), "candidates"),
        (nc.SamplingParams(temperature=0.8, top_p=0.9), "top-p"),
        (nc.SamplingParams(temperature=0.8, top_p=0.9, logit_bias={5: 3.3}), "top-p"),
        (nc.SamplingParams(temperature=0.8), "groups"),
        (nc.SamplingParams(), "groups"),
        ((TopK(3000), Gumbel()), "whole row: TopK(3000) may keep more than 2048 tokens"),
        ((Typical(0.9), Gumbel()), "whole row: Typical(0.9) reads the whole row"),
        ((Mirostat(3.0), Gumbel()), "whole row: Mirostat(tau=3.0, mu=6.0) reads the whole row"),
        ((TopK(5), TopP(0.9, True), Gumbel()), "whole row: TopP(p=0.9, of_full_mass=True) refers to the whole row"),
        ((Temperature(1e-9), TopK(5), Gumbel()), "whole row: its temperature is not from 0.0001 to 10000"),
        ((Logprobs(65), TopK(5), Gumbel()), "whole row: it reports more than 64 logprobs"),
    ],
    ids=range(15),
)
def test_the_paths_of_pipelines(params: Any, path: str) -> None:
    assert tokens_and_paths(params, peaked())[1] == [path] * ROWS


def test_a_row_that_needs_more_is_exchanged_whole() -> None:
    x_RV = peaked()
    x_RV[0] = np.random.default_rng(0).normal(size=SIZE) * 0.01  # flat
    x_RV[1, 7], x_RV[2] = np.nan, -np.inf
    _, paths = tokens_and_paths(nc.SamplingParams(top_p=0.9), x_RV)
    invalid = "whole row: it has NaN, +inf or no finite score"
    assert paths == ["whole row: its top-p may keep tokens of every group", invalid, invalid, "top-p"]


def test_scores_that_float32_cannot_hold_are_exchanged_whole() -> None:
    bias = {5: 1e30, 1600: 1e30}
    assert tokens_and_paths((LogitBias(bias), TopP(0.9), Gumbel()), peaked())[1][0].endswith("summarized in float32")


def test_equal_scores_and_many_candidates() -> None:
    x_RV = np.zeros((ROWS, SIZE), np.float32)
    assert tokens_and_paths((TopK(7), Gumbel()), x_RV)[1] == ["candidates"] * ROWS
    one = nc.Sampler(5000, "reference")
    one.add((TopK(7), Gumbel()), seed=1)
    expected = one(np.zeros((1, 5000), np.float32)).token_ids.tolist()

    def step(exchange: Any) -> Any:
        sampler = ShardedSampler(5000, exchange, backend="reference")
        sampler.add((TopK(7), Gumbel()), seed=1)
        return sampler(np.zeros((1, 5000), np.float32), 0).token_ids.tolist(), sampler.last_paths

    assert run_ranks(1, step) == [(expected, ("whole row: more than 2048 tokens of a shard may be kept",))]


def test_a_mask_and_a_bias_of_a_float_row() -> None:
    mask = np.full((ROWS, -(-SIZE // 32)), 0x55555555, np.int32)
    for params in (nc.SamplingParams(top_p=0.8), nc.SamplingParams(temperature=0.9), nc.SamplingParams(top_k=9)):
        tokens, paths = tokens_and_paths(params, torch.from_numpy(peaked()).bfloat16(), mask=mask)
        assert not any(path.startswith("whole") for path in paths)
        assert all(token % 2 == 0 for token in tokens)


class Broken(Shift):
    """Raises an exception."""

    touches = "listed"

    def listing(self, history: Any) -> Any:
        raise OSError("no list")

    def apply(self, x: Any, token: Any) -> Any:
        return x + token.listed


def test_an_exception_of_a_stage_is_an_error_of_its_row() -> None:
    def step(exchange: Any) -> Any:
        sampler = ShardedSampler(SIZE, exchange, backend="reference")
        sampler.add((Broken(), TopK(5)), seed=1)
        sampler.add((TopK(5),), seed=1)
        first, count = HALVES[exchange.rank]
        out = sampler(peaked()[:2, first : first + count], first)
        return out.errors, sampler.last_paths

    assert run_ranks(2, step) == [({0: "OSError: no list"}, ("whole row: OSError: no list", "candidates"))] * 2


def test_rows_without_a_seed_get_the_same_one_on_all_ranks() -> None:
    def seeds(exchange: Any) -> list[int]:
        sampler = ShardedSampler(SIZE, exchange)
        return [sampler.seed(sampler.add(nc.SamplingParams(top_k=5))) for _ in range(3)]

    one, other = run_ranks(2, seeds)
    assert one == other
    assert len(set(one)) == 3
    assert run_ranks(2, seeds)[0] != one


def test_guidance_combines_the_columns_of_both() -> None:
    pipeline = (nc.stages.Guidance(1.5), Temperature(0.7), Gumbel())
    x_RV, other_RV = peaked(0), peaked(1)
    one = nc.Sampler(SIZE, "reference")
    for row in range(ROWS):
        one.add(pipeline, seed=row)
    expected = one(x_RV, companion=other_RV).token_ids.tolist()

    def step(exchange: Any) -> Any:
        first, count = HALVES[exchange.rank]
        own = slice(first, first + count)
        sampler = ShardedSampler(SIZE, exchange, backend="reference")
        for row in range(ROWS):
            sampler.add(pipeline, seed=row)
        with pytest.raises(nc.ParameterError, match="needs the logits of a companion sequence"):
            sampler(x_RV[:, own], first)
        return sampler(x_RV[:, own], first, companion=other_RV[:, own]).token_ids.tolist(), sampler.last_paths[0]

    assert run_ranks(2, step) == [(expected, "whole row: Guidance(1.5) reads two whole rows")] * 2


def test_drafts_are_verified_as_by_one_sampler() -> None:
    """Speculation: the next positions of a row one after the other, while the drafted token is the sampled one."""
    pipeline = (Temperature(0.8), TopP(0.95), Gumbel())
    x_NV = np.concatenate([peaked(seed)[:1] for seed in range(6)])
    one = nc.Sampler(SIZE, "reference")
    row = one.add(pipeline, [1, 2], seed=5)
    plain = [int(one(x_V[None], [row]).token_ids[0]) for x_V in x_NV]
    draft = [*plain[:3], (plain[3] + 1) % SIZE, 0]

    def verify(exchange: Any) -> list[int]:
        first, count = HALVES[exchange.rank]
        sampler, accepted = ShardedSampler(SIZE, exchange, backend="reference"), []
        row = sampler.add(pipeline, [1, 2], seed=5)
        sampler.add((TopK(3),), seed=1)  # another row, not in these calls
        for place, drafted in enumerate([*draft, -1]):
            accepted.append(int(sampler(x_NV[place : place + 1, first : first + count], first, [row]).token_ids[0]))
            if accepted[-1] != drafted:
                return accepted
        raise AssertionError("all drafts were accepted")

    assert run_ranks(2, verify) == [plain[:4]] * 2


def start(**arguments: Any) -> Any:
    def action(exchange: Any) -> None:
        ShardedSampler(arguments.get("sizes", (SIZE, SIZE))[exchange.rank], exchange)

    return action


def test_different_setups_fail_at_the_start_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "ShardError: the vocabulary sizes differ between ranks: rank 0 (3000) against rank 1 (3001)"
    assert errors_of_ranks(2, start(sizes=(3000, 3001))) == [expected] * 2
    assert errors_of_ranks(2, start()) == [""] * 2
    facts = {"version": "versions of nucleate", "arithmetic": "checksums of the arithmetic of NumPy and the"}
    for fact, name in facts.items():
        values = iter(["a", "b", "a"])
        with monkeypatch.context() as patch:
            patch.setattr(rank_exchange, fact, lambda values=values: next(values))
            found = errors_of_ranks(3, lambda exchange: ShardedSampler(SIZE, exchange))
        assert len(set(found)) == 1
        assert found[0].startswith(f"ShardError: the {name}")


def difference(rank: int, kind: str) -> Any | None:
    """An action with a difference of one kind on rank 1 of 2."""

    def action(exchange: Any) -> None:
        odd = exchange.rank == 1
        sampler = ShardedSampler(SIZE, exchange)
        sampler.add(nc.SamplingParams(top_k=5 + (odd and kind == "params"), seed=5 + (odd and kind == "seeds")))
        row = sampler.add(nc.SamplingParams(top_p=0.5, seed=1), [1, 2 + (odd and kind == "prompts")])
        if kind == "rows" and odd:
            sampler.remove(row)
            sampler.add(nc.SamplingParams(top_p=0.5, seed=1), [1, 2])
        if kind == "tokens":
            sampler.accept(row, 7 + odd)
        first, count = HALVES[exchange.rank]
        first += (odd and kind == "gap") - (odd and kind == "overlap")
        x_RV: Any = peaked()[:2, first : first + count]
        x_RV = x_RV.astype(np.float16) if odd and kind == "types" else x_RV
        x_RV = x_RV[:1] if odd and kind == "count" else x_RV
        mask = np.full((len(x_RV), -(-SIZE // 32)), -1 - (odd and kind == "masks"), np.int32)
        rows = [0] if kind == "count" and odd else [1, 0] if kind == "order" and odd else [0, 1]
        if kind == "calls" and odd:
            sampler.distributions(row, x_RV[:1], first)
        before = [sampler.output_ids(row) for row in sampler.rows]
        try:
            sampler(x_RV, first, rows, mask=None if odd and kind == "no mask" else mask)
        finally:
            assert [sampler.output_ids(row) for row in sampler.rows] == before

    return action


DIFFERENCES = {
    "params": "parameters of the rows",
    "seeds": "seeds of the rows",
    "types": "data types of logits",
    **dict.fromkeys(("prompts", "tokens"), "tokens of the rows"),
    **dict.fromkeys(("rows", "count", "order"), "requested rows"),
    **dict.fromkeys(("masks", "no mask"), "masks"),
    "calls": "kinds of calls",
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((kind, f"the {what} differ between ranks: rank 0 against rank 1") for kind, what in DIFFERENCES.items()),
        ("gap", "the shards do not fit: rank 1 starts at token 1501, but rank 0 ends at 1500"),
        ("overlap", "the shards do not fit: rank 1 starts at token 1499, but rank 0 ends at 1500"),
    ],
)
def test_a_difference_between_ranks_is_the_same_error_on_all(kind: str, what: str) -> None:
    found = errors_of_ranks(2, difference(1, kind))
    if kind == "rows":  # rank 1 has no row 1 any more
        assert found[0].startswith("ShardError: rank 1 failed: ")
        assert found[1].startswith("ParameterError: ")
    else:
        assert found == [f"ShardError: {what}"] * 2


def test_invalid_arguments_of_one_rank_are_an_error_of_all_and_change_nothing() -> None:
    def action(exchange: Any) -> Any:
        sampler, errors = ShardedSampler(SIZE, exchange), []
        sampler.add(nc.SamplingParams(top_k=5, seed=1))
        first, count = HALVES[exchange.rank]
        x_RV, odd = peaked()[:1, first : first + count], exchange.rank == 1
        for logits, at, rows, mask in (
            (x_RV[0] if odd else x_RV, first, None, None),
            (x_RV.astype(int) if odd else x_RV, first, None, None),
            (np.repeat(x_RV, 2, 0) if odd else x_RV, first, None, None),
            (x_RV, -1 if odd else first, None, None),
            (x_RV, first, None, np.zeros((1, 2), np.int32) if odd else None),
            (x_RV, first, ["0"] if odd else [0], None),
            (x_RV, first, [3] if odd else [0], None),
        ):
            with pytest.raises((ValueError, TypeError, ShardError)) as caught:
                sampler(logits, at, rows, mask=mask)
            errors.append(str(caught.value))
        return errors, sampler(x_RV, first).token_ids.tolist(), sampler.output_ids(0)

    (of_zero, *results), (of_one, *others) = run_ranks(2, action)
    assert results == others
    assert of_one[0].startswith("logits must have")
    assert [error.removeprefix("rank 1 failed: ") for error in of_zero] == of_one
    assert all(error.startswith("rank 1 failed: ") for error in of_zero)


def test_invalid_arguments_of_the_constructor() -> None:
    for size, options, message in (
        (0, {}, "vocab_size must be an integer >= 1, got 0"),
        (5, {"timeout": 0}, "timeout must be a number of seconds > 0, got 0"),
        (5, {"backend": "triton"}, "backend must be one of auto, reference, cpu, got 'triton'"),
    ):
        with pytest.raises(nc.ParameterError, match=message):
            ShardedSampler(size, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs a process group: call torch"):
        ShardedSampler(5)


def test_bytes_of_peaked_rows() -> None:
    """At most a 64th of a row, with the messages that do not depend on the number of rows left out."""
    vocab, rows = 128_256, 8
    numbers = np.random.default_rng(0)
    x_RV = numbers.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    for x_V in x_RV:
        x_V[numbers.integers(0, vocab, 40)] += np.linspace(2, 20, 40, dtype=np.float32)
    width = vocab // 2

    def step(exchange: Any) -> dict[str, float]:
        found = {}
        for name, params in {
            "greedy": nc.SamplingParams(temperature=0.0),
            "hot": nc.SamplingParams(temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, frequency_penalty=0.1),
            "top-p": nc.SamplingParams(temperature=0.7, top_p=0.9),
            "draw": nc.SamplingParams(temperature=0.8),
        }.items():
            sampler = ShardedSampler(vocab, exchange, backend="cpu")
            for row in range(rows):
                sampler.add(params, [1, 2, 3], seed=row)
            before = sampler.stats.received_bytes
            first = exchange.rank * width
            sampler(x_RV[:, first : first + width], first)
            found[name] = (sampler.stats.received_bytes - before) / rows
        return found

    one, other = run_ranks(2, step)
    assert one == other
    assert max(one.values()) <= 4 * vocab / 64
    assert one["greedy"] < one["hot"] < 4 * vocab / 128 < one["top-p"]
