"""Runs ranks of a ShardedSampler as threads, and compares random operations with those of one Sampler."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pipeline_cases
import torch

import nucleate as nc
from nucleate.sampling.stages import (
    Allowed,
    Categorical,
    Dry,
    Frequency,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    Mirostat,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)
from nucleate.scale.shards import ShardedSampler


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


def hot_pipeline(rng: random.Random, size: int) -> Any:
    """A pipeline as in requests: shifts, a temperature, cuts and a draw, some of them with more."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(size) for _ in range(rng.randrange(1, most)))

    window = rng.choice([None, None, -1, 3])
    shifts = [
        [LogitBias({token: rng.uniform(-3.0, 5.0) for token in some(9)})],
        [Repetition(rng.choice([0.8, 1.3]), window), Frequency(rng.uniform(-1, 1), window), Presence(0.4, window)],
        [Suppress(some(9))],
        [Allowed((*some(99), *some(99)))],
        [Dry(0.8, 1.75, 1)],
    ]
    cuts = rng.choice([
        [TopK(rng.choice([2, 5, 20, 50, 300]))],
        [TopK(rng.choice([5, 50])), TopP(rng.choice([0.5, 0.9]))],
        [MinP(rng.choice([0.01, 0.1]))],
        [TopP(rng.choice([0.1, 0.5, 0.9, 0.99]))],
        [TopP(0.9), MinP(0.02)],
        [TopK(40), MinP(0.05), TopP(0.9)],
        [TopP(0.95), Xtc(0.5, 0.1)],
        [TopK(30), Typical(0.9), Mirostat(4.0)],
        [TopK(50, True), Logprobs(2)],
        [TopNSigma(1.0)],
        [Typical(0.8)],
        [],
        [],
        [Greedy()],
    ])  # fmt: skip
    chain = [stage for group in shifts if rng.random() < 0.25 for stage in group]
    if rng.random() < 0.7:
        chain.append(Temperature(rng.choice([0.0, 0.6, 0.7, 1.0, 1.5])))
    if rng.random() < 0.2 and not any(isinstance(stage, Logprobs) for stage in cuts):
        chain.insert(0, Logprobs(rng.choice([None, 0, 3, 20]), rng.choice([(), some(4)])))
    draw = (
        [] if isinstance((cuts or [None])[-1], Greedy) else [rng.choice([Gumbel(), Gumbel(), Gumbel(), Categorical()])]
    )
    return (*chain, *cuts, *draw)


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
        self.sampler = nc.Sampler(size, backend)
        self.cut = lambda x_RV: (x_RV,)


class OneRank:
    """One rank of a ShardedSampler, given whole rows."""

    def __init__(self, size: int, backend: str, exchange: Any, shards: list[tuple[int, int]]) -> None:
        first, columns = shards[exchange.rank]
        self.sampler: Any = ShardedSampler(size, exchange, backend=backend)
        self.cut = lambda x_RV: (shard(x_RV, first, columns), first)


def play(face: Any, seed: int, steps: int, size: int, any_pipeline: bool = False) -> list[Any]:
    """The results of random operations: rows added and removed, steps of some rows, tokens accepted."""
    rng, results = random.Random(seed), []
    sampler = face.sampler
    for _ in range(steps):
        rows, action = list(sampler.rows), rng.random()
        if len(rows) < 3 or (action < 0.2 and len(rows) < 8):
            prompt, output = ([rng.randrange(size) for _ in range(rng.randrange(9))] for _ in range(2))
            if any_pipeline:
                names = sorted(rng.sample(pipeline_cases.OTHERS, rng.randrange(4)))
                stages = tuple(pipeline_cases.stage(rng, name, size) for name in names)
                stages = (*stages, pipeline_cases.stage(rng, rng.choice(pipeline_cases.DRAWS), size))
            else:
                stages = hot_pipeline(rng, size)
            results.append(sampler.add(stages, prompt, output_ids=output, seed=rng.getrandbits(64)))
        elif action < 0.25:
            sampler.remove(rng.choice(rows))
        elif action < 0.3:
            sampler.accept(rng.choice(rows), rng.randrange(size))
        elif action < 0.35:
            row = rng.choice(rows)
            x_RV = np.random.default_rng(rng.getrandbits(32)).normal(size=(2, size)).astype(np.float32)
            distribution = sampler.distributions(row, *face.cut(x_RV), [3 % size])[0]
            if not np.isnan(distribution).any():
                token = int(distribution.argmax())
                first = face.cut(x_RV[:1])
                reported = sampler.accept(row, token, first[0][0], *first[1:])
                results.append((distribution.tolist(), reported))
        else:
            selected = rng.choice([None, rng.sample(rows, rng.randrange(1, len(rows) + 1))])
            count = len(rows if selected is None else selected)
            mask = np.random.default_rng(rng.getrandbits(32)).integers(-(2**31), 2**31, (count, -(-size // 32) + 1))
            mask = mask.astype(np.int32) if rng.random() < 0.3 else None
            out = sampler(*face.cut(logits(rng, count, size)), selected, mask=mask)
            logprobs = None if out.logprobs is None or not any(out.logprobs) else [*out.logprobs]
            results.append((out.token_ids.tolist(), dict(out.errors), logprobs, out.seeds.tolist()))
    return [*results, [(sampler.output_ids(row), sampler.seed(row), repr(sampler.stages(row))) for row in sampler.rows]]


def same(one: Any, other: Any) -> bool:
    """Equal, except for the last digits of logprobs."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) < 1e-9
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
