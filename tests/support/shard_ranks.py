"""Runs ranks of a ShardedSampler, as threads or as processes over gloo, and compares them with one Sampler."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pipeline_cases
import sampler_scenarios
import torch
import torch.distributed as dist

import nucleate as nc
from nucleate.sampling import stages as s
from nucleate.scale.shards import ShardedSampler, ShardError


class ThreadExchange:
    """A RankExchange between threads."""

    device = torch.device("cpu")

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def gather(self, payload: Any) -> Callable[[], Any]:
        def wait() -> Any:
            self._slots[self.rank] = payload.clone()
            self._barrier.wait(60)
            assert len({len(one) for one in self._slots}) == 1
            received = torch.stack(self._slots)
            self._barrier.wait(60)
            return received

        return wait


def run_ranks(size: int, action: Callable[[ThreadExchange], Any]) -> list[Any]:
    """The results of an action on every rank. Raises the first error."""
    slots, barrier = [None] * size, threading.Barrier(size)

    def guarded(rank: int) -> Any:
        try:
            return action(ThreadExchange(rank, slots, barrier))
        except BaseException:
            if not isinstance(threading.current_thread(), threading._MainThread):
                barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(guarded, rank) for rank in range(size)]]


def errors_of_ranks(size: int, action: Callable[[ThreadExchange], Any]) -> list[str]:
    """The messages of the errors that an action raises on every rank."""

    def message(exchange: ThreadExchange) -> str:
        try:
            action(exchange)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(size, message)


def bounds(rng: random.Random, vocab: int, ranks: int) -> list[tuple[int, int]]:
    """Random shards, as (first id, columns): even ones with padding, or uneven ones, perhaps empty, in any order."""
    if rng.random() < 0.5:
        width = -(-vocab // ranks)
        width = -(-width // 64) * 64 if rng.random() < 0.5 else width
        return [(rank * width, width) for rank in range(ranks)]
    cuts = [0, *sorted(rng.randrange(vocab + 1) for _ in range(ranks - 1)), vocab]
    shards = [(low, high - low) for low, high in itertools.pairwise(cuts)]
    rng.shuffle(shards)
    return shards


def shard(x_RV: Any, first: int, columns: int) -> Any:
    """The columns of a shard; padding is NaN, which no sampler may read."""
    part = x_RV[:, first : first + columns]
    pad = columns - part.shape[1]
    if not pad:
        return part
    if isinstance(x_RV, np.ndarray):
        return np.pad(part, ((0, 0), (0, pad)), constant_values=np.nan)
    return torch.nn.functional.pad(part, (0, pad), value=float("nan"))


def cuts(rng: random.Random) -> list[list[Any]]:
    """What is exchanged for a row depends on these."""
    t = s.Temperature(rng.choice([0.0, 0.6, 0.7, 1.0, 1.5]))
    return [
        [t, s.TopK(rng.choice([2, 5, 20, 50, 300]))],
        [t, s.TopK(rng.choice([5, 50])), s.TopP(rng.choice([0.5, 0.9]))],
        [t, s.MinP(rng.choice([0.01, 0.1]))],
        [t, s.TopP(rng.choice([0.1, 0.5, 0.9, 0.99]))],
        [t, s.TopP(0.9), s.MinP(0.02)],
        [t, s.TopK(40), s.MinP(0.05), s.TopP(0.9)],
        [t, s.TopP(0.95), s.Xtc(0.5, 0.1)],
        [s.TopK(30), s.Typical(0.9), s.Mirostat(4.0)],
        [t, s.TopK(50, True)],
        [t],
    ]


def hot_pipeline(rng: random.Random, size: int) -> Any:
    """A pipeline as in requests: shifts, a temperature, cuts and a draw, some of them with more."""
    *chain, draw = sampler_scenarios.stages(rng, size, cuts)
    return (*chain, s.Categorical() if rng.random() < 0.25 else draw)


def logits(rng: random.Random, rows: int, size: int) -> Any:
    """Peaked, flat, tied and invalid rows of random data types, NumPy or torch."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    x_RV = numbers.normal(size=(rows, size)) * rng.choice([0.01, 1.0, 3.0, 3.0])
    for row in range(rows):
        kind = rng.random()
        if kind < 0.5:
            count = min(size, rng.randrange(1, 30))
            x_RV[row, numbers.integers(0, size, count)] += numbers.exponential(6.0, count) + 6.0
        elif kind < 0.6:
            x_RV[row] = np.round(x_RV[row])
        elif kind < 0.7:
            x_RV[row, numbers.random(size) < 0.5] = -np.inf
        elif kind < 0.73:
            x_RV[row, rng.randrange(size)] = rng.choice([np.nan, np.inf])
        elif kind < 0.75:
            x_RV[row] = -np.inf
    kind = rng.choice([np.float32, np.float32, np.float16, torch.bfloat16, torch.float32])
    return x_RV.astype(kind) if isinstance(kind, type) else torch.from_numpy(x_RV).to(kind)


class OneSampler:
    """The face of a ShardedSampler for one Sampler and whole rows."""

    def __init__(self, size: int, backend: str) -> None:
        self.sampler: Any = nc.Sampler(size, backend)
        self.cut: Callable[[Any], tuple[Any, ...]] = lambda x_RV: (x_RV,)


class OneRank:
    """One rank of a ShardedSampler, given whole rows. options: of the sampler. device: of the logits."""

    def __init__(self, size: int, exchange: Any, shards: tuple[int, int], device: str = "cpu", **options: Any) -> None:
        first, columns = shards
        self.sampler: Any = ShardedSampler(size, exchange, **options)

        def cut(x_RV: Any) -> tuple[Any, ...]:
            part = shard(x_RV, first, columns)
            return part if device == "cpu" else torch.as_tensor(part).to(device), first

        self.cut = cut


def any_pipeline(rng: random.Random, size: int) -> Any:
    """Stages of all kinds with extreme parameters."""
    names = sorted(rng.sample(pipeline_cases.OTHERS, rng.randrange(4)))
    return tuple(pipeline_cases.stage(rng, name, size) for name in (*names, rng.choice(pipeline_cases.DRAWS)))


def play(face: Any, seed: int, steps: int, size: int, pipeline: Any = hot_pipeline) -> list[Any]:
    """The results of random operations, and the pipelines of the rows after them."""
    results = sampler_scenarios.operate(face.sampler, seed, steps, size, 8, pipeline, logits, face.cut)
    return [*results, [repr(face.sampler.stages(row)) for row in face.sampler.rows]]


same = partial(sampler_scenarios.same, tolerance=1e-9)

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


def play_in_process(
    rank: int, size: int, seed: int, steps: int, vocab: int, shards: list[tuple[int, int]], device: str
) -> Any:
    """The results of random operations, see ``play``, and the rows by what they exchanged."""
    face = OneRank(vocab, None, shards[rank], device, timeout=LIMIT)
    return play(face, seed, steps, vocab), dict(face.sampler.stats.rows)


def equal_rows(rank: int, size: int, seed: int, rows: int) -> tuple[Counter[str], int]:
    """Sample ``rows`` rows of random pipelines and logits, 40 at a time; on rank 0, with one Sampler as well.

    Returns the number of rows by path, and the number of different tokens, errors and histories. That the ranks have
    the same tokens is checked by the sampler in each call.
    """
    nc.warm()
    rng, paths, different = random.Random(seed), Counter[str](), 0
    while paths.total() < rows:
        vocab = rng.choice([300, 1000, 5000, 20_000, 128_256])
        first, columns = bounds(rng, vocab, size)[rank]
        sampler, one = ShardedSampler(vocab, backend="cpu", timeout=LIMIT), nc.Sampler(vocab, "cpu")
        for _ in range(40):
            stages, prompt = hot_pipeline(rng, vocab), [rng.randrange(vocab) for _ in range(5)]
            row_seed = rng.getrandbits(64)
            for each in (sampler, one) if rank == 0 else (sampler,):
                each.add(stages, prompt, seed=row_seed)
        for _ in range(5):
            x_RV = logits(rng, 40, vocab)
            out = sampler(shard(x_RV, first, columns), first)
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
    from nucleate.sharding.rank_group import Rank

    Rank(rank, size, LIMIT).load(Path(folders[rank]), "cpu", "auto")
    return "loaded"
