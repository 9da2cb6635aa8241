"""Runs ranks of a ShardedSampler as processes that exchange over gloo."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import shard_ranks
import torch
import torch.distributed as dist

import nucleate as nc
from nucleate.scale.shards import ShardedSampler, ShardError
from nucleate.sharding.rank_group import Rank

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "nucleate.scale.shards", "shard_ranks"])  # imported once, not per rank

LIMIT = 240.0
"""Seconds after which a rank has failed; tests run on busy machines."""


def run_processes(
    size: int, action: Callable[..., Any], *arguments: Any, lost: int = -1, limit: float = LIMIT, backend: str = "gloo"
) -> list[Any]:
    """The results of an action on every rank; for a rank that ended without one, its exit code as "exit -9".

    Ranks that are still there after ``limit`` seconds are killed. lost: a rank from which no answer is expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank, args=(rank, size, folder, sender, backend, action, arguments), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        end, results = time.monotonic() + limit, ["no answer"] * size
        for rank in sorted(range(size), key=lambda rank: rank == lost):
            with suppress(EOFError):
                if pipes[rank].poll(1.0 if rank == lost else max(0.0, end - time.monotonic())):
                    results[rank] = pipes[rank].recv()
            if results[rank] == "no answer":
                processes[rank].join(1)
                results[rank] = f"exit {processes[rank].exitcode}"
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        return results


def _rank(
    rank: int, size: int, folder: str, sender: Any, backend: str, action: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    try:
        sender.send(action(rank, size, *arguments))
    except Exception as error:  # noqa: BLE001  # the test reads it
        sender.send(f"{type(error).__name__}: {error}")
    time.sleep(10 * LIMIT)  # until the parent ends it: no rank may close its connections before the others are done


def play(rank: int, size: int, seed: int, steps: int, vocab: int, shards: list[tuple[int, int]], device: str) -> Any:
    """The results of random operations, see ``shard_ranks.play``. device: of the logits."""
    first, columns = shards[rank]
    face: Any = shard_ranks.OneSampler.__new__(shard_ranks.OneSampler)
    face.sampler = ShardedSampler(vocab, timeout=LIMIT)

    def cut(x_RV: Any) -> tuple[Any, int]:
        part = shard_ranks.shard(x_RV, first, columns)
        return part if device == "cpu" else torch.as_tensor(part).to(device), first

    face.cut = cut
    results = shard_ranks.play(face, seed, steps, vocab)
    return results, dict(face.sampler.stats.rows)


def equal_rows(rank: int, size: int, seed: int, rows: int) -> tuple[Counter[str], int]:
    """Sample ``rows`` rows of random pipelines and logits, 40 at a time; on rank 0, with one Sampler as well.

    Returns the number of rows by path, and the number of different tokens, errors and histories. That the ranks have
    the same tokens is checked by the sampler in each call.
    """
    nc.warm()
    rng, paths, different = random.Random(seed), Counter[str](), 0
    while paths.total() < rows:
        vocab = rng.choice([300, 1000, 5000, 20_000, 128_256])
        first, columns = shard_ranks.bounds(rng, vocab, size)[rank]
        sampler, one = ShardedSampler(vocab, backend="cpu", timeout=LIMIT), nc.Sampler(vocab, "cpu")
        for _ in range(40):
            stages, prompt = shard_ranks.hot_pipeline(rng, vocab), [rng.randrange(vocab) for _ in range(5)]
            row_seed = rng.getrandbits(64)
            for each in (sampler, one) if rank == 0 else (sampler,):
                each.add(stages, prompt, seed=row_seed)
        for _ in range(5):
            x_RV = shard_ranks.logits(rng, 40, vocab)
            out = sampler(shard_ranks.shard(x_RV, first, columns), first)
            if rank == 0:
                expected = one(x_RV)
                different += int((np.asarray(out.token_ids) != np.asarray(expected.token_ids)).sum())
                different += dict(out.errors) != dict(expected.errors)
        if rank == 0:
            different += sum(sampler.output_ids(row) != one.output_ids(row) for row in one.rows)
        paths += sampler.stats.rows
    return paths, different


def lose_a_rank(rank: int, size: int, how: str, timeout: float) -> tuple[list[int], str, str, bool]:
    """Two steps; then rank 1 is killed, stopped, or late by a second. The tokens and the errors of two more calls."""
    vocab, tokens = 256 * size, list[int]()
    sampler = ShardedSampler(vocab, dist.group.WORLD, timeout=timeout)
    for row in range(3):
        sampler.add(nc.SamplingParams(seed=row, top_p=0.9, temperature=0.8))
    x_RV = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32) * 3
    width, errors, in_time = vocab // size, [], True
    local_RN, first = x_RV[:, rank * width : (rank + 1) * width], rank * width
    for _ in range(2):
        tokens += sampler(local_RN, first).token_ids.tolist()
    if rank == 1:
        if how == "late":
            time.sleep(1.0)
        else:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    for _ in range(2):
        start = time.monotonic()
        try:
            tokens += sampler(local_RN, first).token_ids.tolist()
            errors.append("")
        except ShardError as error:
            errors.append(str(error))
        in_time &= time.monotonic() - start < timeout + 30.0
    return tokens, errors[0], errors[1], in_time


def load_models(rank: int, size: int, folders: list[str]) -> str:
    """Load a folder per rank as one model."""
    Rank(rank, size, LIMIT).load(Path(folders[rank]), "cpu", "auto")
    return "loaded"
