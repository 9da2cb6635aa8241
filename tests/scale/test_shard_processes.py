"""Ranks of a ShardedSampler as real processes over gloo: equal to one Sampler, and with a rank lost."""

from __future__ import annotations

import random

import pytest
import shard_ranks
import tiers
import torch


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (1, 1), (3, 2), (4, 3), (8, 4)])
@pytest.mark.fast_cases(0)
def test_ranks_get_the_tokens_of_one_sampler(size: int, seed: int) -> None:
    vocab, steps = 5000, tiers.count(15, 40)
    shards = shard_ranks.bounds(random.Random(seed), vocab, size)
    one = shard_ranks.OneSampler(vocab, "auto")
    expected = shard_ranks.play(one, seed, steps, vocab)
    results = shard_ranks.run_processes(size, shard_ranks.play_in_process, seed, steps, vocab, shards, "cpu")
    for result in results:
        found, paths = result
        assert shard_ranks.same(found, expected)
        assert paths.keys() >= {"candidates", "whole row"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device per rank")
def test_ranks_get_the_tokens_of_one_sampler_over_nccl() -> None:
    size, vocab, steps = torch.cuda.device_count(), 5000, 30
    shards = shard_ranks.bounds(random.Random(0), vocab, size)
    expected = shard_ranks.play(shard_ranks.OneSampler(vocab, "auto"), 7, steps, vocab)
    arguments = 7, steps, vocab, shards, "cuda"
    for found, _ in shard_ranks.run_processes(size, shard_ranks.play_in_process, *arguments, backend="nccl"):
        assert shard_ranks.same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "size"), [("killed", 2), ("killed", 4), ("stopped", 3)])
def test_a_lost_rank_is_an_error_of_the_others(how: str, size: int) -> None:
    results = shard_ranks.run_processes(size, shard_ranks.lose_a_rank, how, 4.0, lost=1)
    tokens = [result[0] for rank, result in enumerate(results) if rank != 1]
    assert all(one == tokens[0] for one in tokens)
    assert len(tokens[0]) == 6
    for rank, result in enumerate(results):
        if rank == 1:
            assert result in ("exit -9", "exit None")
            continue
        _, first, second, in_time = result
        assert first.startswith(f"rank {rank} of {size} could not exchange logits: another rank has ended, or did not")
        assert second == first
        assert in_time


@pytest.mark.slow
def test_a_late_rank_is_waited_for() -> None:
    results = shard_ranks.run_processes(2, shard_ranks.lose_a_rank, "late", 200.0)
    assert results[0] == results[1]
    assert len(results[0][0]) == 12
    assert results[0][1:] == ("", "", True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_twenty_thousand_rows_equal_those_of_one_sampler(size: int) -> None:
    results = shard_ranks.run_processes(size, shard_ranks.equal_rows, size, 20_000, limit=3600.0)
    assert all(paths == results[0][0] for paths, _ in results)
    paths, different = results[0]
    print(f"{size} ranks: {dict(paths)}")
    assert paths.total() >= 20_000
    assert min(paths.values()) > 500
    assert different == 0
