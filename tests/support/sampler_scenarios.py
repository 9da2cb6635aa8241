"""Random operations on a Sampler, and texts of rows with history-dependent Shifts, recorded to compare backends."""

from __future__ import annotations

import random
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_interpreter as interpreted

import nucleate as nc
from nucleate.sampling import stages as s


def device_cuts(rng: random.Random) -> list[list[Any]]:
    return [
        [s.Temperature(rng.choice([0.0, 0.6, 1.7])), s.TopNSigma(2.0), s.TopK(9), s.MinP(0.02), s.TopP(0.9)],
        [s.TopK(rng.choice([1, 5, 2**31 - 1])), s.TopP(0.7), s.Temperature(0.7)],
        [s.MinP(0.1)],
    ]


def stages(
    rng: random.Random, size: int, cuts: Callable[[random.Random], list[list[Any]]] = device_cuts
) -> tuple[Any, ...]:
    """A random pipeline, with one of these cuts; it usually runs on the device."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(size) for _ in range(rng.randrange(1, most)))

    window = rng.choice([None, None, -1, 0, 1, 3, 7])
    ways = {
        "tap": [s.Logprobs(rng.choice([None, 0, 1, 3, size + 5]), rng.choice([(), some(4)]))],
        "bans": [s.BadWords(tuple((t,) for t in some(3))), s.MinTokens(rng.randrange(6), some(9)), s.Suppress(some(5))],
        "bias": [s.LogitBias({token: rng.uniform(-2.0, 4.0) for token in some(6)})],
        "penalties": [
            *(s.Repetition(rng.choice([0.7, 1.4]), window), s.Frequency(rng.uniform(-1, 1), window)),
            s.Presence(rng.uniform(-1, 1), window),
        ],
        "late": [s.Allowed((*some(30), *some(30))), s.Suppress(some(4))],
        "cuts": rng.choice(cuts(rng)),
    }  # fmt: skip
    chosen = [stage for name in ways if rng.random() < 0.5 for stage in ways[name]]
    if rng.random() < 0.15:  # runs on the CPU
        chosen.append(rng.choice([s.Typical(0.8), s.Mirostat(3.0)]))
    if rng.random() < 0.1:
        chosen = [
            s.Dry(0.8, 1.75, 1, ((4 % size,),)),
            *(stage for stage in chosen if not isinstance(stage, s.Logprobs)),
        ]
    return (*chosen, s.Greedy() if rng.random() < 0.1 else s.Gumbel(rng.getrandbits(64)))


def scores(rng: random.Random, rows: int, size: int) -> Any:
    """Random logits of random dtype and stride, sometimes invalid."""
    import torch

    numbers = np.random.default_rng(rng.getrandbits(32))
    x_RV = numbers.normal(size=(rows, size)) * rng.choice([0.5, 3.0])
    if rng.random() < 0.3:
        x_RV = np.round(x_RV)
    if rng.random() < 0.3:
        x_RV[numbers.random((rows, size)) < 0.4] = -np.inf
        x_RV[:, rng.randrange(size)] = 1.0
    for row in range(rows):
        if rng.random() < 0.08:
            x_RV[row, rng.randrange(size)] = rng.choice([np.nan, np.inf])
        elif rng.random() < 0.04:
            x_RV[row] = -np.inf
    kind, stride = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64]), rng.choice([1, 1, 2])
    padded = torch.full((rows, size * stride), torch.nan, dtype=kind)
    padded[:, ::stride] = torch.from_numpy(x_RV)
    return padded[:, ::stride]


def as_values(out: Any) -> tuple[Any, ...]:
    """The results of a step as plain values."""
    logprobs = None if out.logprobs is None or not any(out.logprobs) else [*out.logprobs]
    return out.token_ids.tolist(), dict(out.errors), logprobs, out.seeds.tolist()


def same(one: Any, other: Any, tolerance: float = 1e-6) -> bool:
    """Equal up to rounding of logprobs: kernels sum groups in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) < tolerance
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def play(backend: str, seed: int, steps: int, size: int = 77, most: int = 5) -> list[Any]:
    """The result of each random action on a Sampler."""
    return operate(nc.Sampler(size, backend), seed, steps, size, most)


def operate(
    sampler: Any,
    seed: int,
    steps: int,
    size: int,
    most: int = 5,
    pipeline: Callable[[random.Random, int], Any] = stages,
    logits: Callable[[random.Random, int, int], Any] = scores,
    cut: Callable[[Any], tuple[Any, ...]] = lambda x_RV: (x_RV,),
) -> list[Any]:
    """The results of random actions: rows added and removed, steps of some rows, tokens accepted.

    cut: the first arguments of calls with whole rows.
    """
    rng, results = random.Random(seed), []
    for _ in range(steps):
        rows, action = list(sampler.rows), rng.random()
        if len(rows) < 2 or (action < 0.2 and len(rows) < most):
            prompt, output = ([rng.randrange(size) for _ in range(rng.randrange(9))] for _ in range(2))
            seed = rng.getrandbits(64)  # a greedy row would get a random one
            results.append(sampler.add(pipeline(rng, size), prompt, output_ids=output, seed=seed))
        elif action < 0.3:
            results.append(sampler.remove(rng.choice(rows)))
        elif action < 0.4:
            sampler.accept(rng.choice(rows), rng.randrange(size))
        elif action < 0.5:
            row = rng.choice(rows)
            x_RV = np.random.default_rng(rng.getrandbits(32)).normal(size=(2, size)).astype(np.float32)
            distribution_V = sampler.distributions(row, *cut(x_RV), [3 % size])[0]
            if not np.isnan(distribution_V).any():
                (own_RV, *first), token = cut(x_RV[:1]), int(distribution_V.argmax())
                reported = sampler.accept(row, token, own_RV[0], *first)
                results.append((distribution_V.tolist(), reported, sampler.stages(row)))
        elif action < 0.55:
            results.append([sampler.output_ids(row) for row in rows])
        else:
            selected = rng.choice([None, rng.sample(rows, rng.randrange(1, len(rows) + 1))])
            count = len(rows if selected is None else selected)
            mask = np.random.default_rng(rng.getrandbits(32)).integers(-(2**31), 2**31, (count, -(-size // 32) + 1))
            mask = mask.astype(np.int32) if rng.random() < 0.3 else None
            results.append(as_values(sampler(*cut(logits(rng, count, size)), selected, mask=mask)))
    return [*results, [(sampler.output_ids(row), sampler.seed(row)) for row in sampler.rows]]


def looped(backend: str, seed: int, size: int, rows: int, steps: int, rounds: int, cut: int = 2) -> list[Any]:
    """Tokens sampled with ``Sampler.loop``, or step by step for "reference". The logits depend on the last token.

    After token 5 the logits contain NaN; ids up to ``cut`` end a row.
    """
    import torch

    rng = random.Random(seed)
    table_VV = torch.from_numpy(np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 2)
    table_VV[5, 1] = torch.nan
    sampler, first = nc.Sampler(size, backend), [rng.randrange(6, size) for _ in range(rows)]
    for row in range(rows):
        chain = (s.Repetition(1.2, 6), s.Frequency(0.5, 6), s.Presence(0.1, 6), s.Temperature(0.9), s.TopK(20))
        sampler.add((*chain, s.Gumbel(seed + row)), [3, first[row]])
    reads = []

    def forward(tokens_R: Any, active_R: Any) -> Any:
        reads.append((tokens_R.tolist(), active_R.tolist()))
        return table_VV[tokens_R]

    if backend != "reference":
        loop = sampler.loop(forward, first, steps=steps, stop_ids=range(cut + 1))
        sampled = torch.cat([loop() for _ in range(rounds)], 1).tolist()
        return [sampled, loop.ended_R.tolist(), [sampler.output_ids(row) for row in sampler.rows]]
    sampled, last, ended = [[-1] * (steps * rounds) for _ in range(rows)], list(first), [False] * rows
    for step in range(steps * rounds):
        for row in range(rows):
            if not ended[row]:
                token = int(sampler(table_VV[last[row]][None], [row]).token_ids[0])
                sampled[row][step], ended[row] = token, token <= cut
                last[row] = token
    return [sampled, ended, [sampler.output_ids(row) for row in sampler.rows]]


def shifts(rng: random.Random, size: int) -> tuple[Any, ...]:
    """Random Shifts, mostly history-dependent, sometimes shuffled."""

    def words(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(rng.randrange(size) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, most))
        )

    window = rng.choice([None, -1, 3, 20])
    stages = [
        s.Repetition(rng.choice([0.8, 1.4]), window),
        s.Frequency(rng.uniform(-0.5, 1.0), window),
        s.Presence(rng.uniform(-0.5, 1.0), rng.choice([window, 5])),
        s.Dry(rng.uniform(0.5, 3.0), 1.75, rng.randrange(1, 3), rng.choice([None, words(3)]), rng.choice([-1, 6])),
        s.NoRepeatNgram(rng.randrange(1, 4)),
        s.BadWords(words(5)),
        s.LogitBias({rng.randrange(size): rng.uniform(-2.0, 2.0) for _ in range(3)}),
        s.MinTokens(3, (0, 1)),
    ]
    some = [one for one in stages if rng.random() < 0.6] or stages[3:4]
    if rng.random() < 0.4:
        rng.shuffle(some)
    return tuple(some)


def written(backend: str, seed: int, steps: int, size: int, ring: int = 32) -> list[list[int]]:
    """The output of some rows. The logits depend on the last token and are close, so that adjustments matter.

    ring: the initial size of a row's token ring on the device.
    """
    from nucleate.sampling.gpu import batch_state, device_batch  # noqa: F401  # its limit of steps stays that of real rings

    with unittest.mock.patch.object(batch_state, "MIN_RING_SIZE", ring):
        rng, sampler = random.Random(seed), nc.Sampler(size, backend)
    table_VV = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 1.5
    last = []
    for row in range(3):
        prompt = [rng.randrange(size) for _ in range(rng.randrange(1, 12))]
        draw = (
            (s.Temperature(0.5), s.TopP(0.95), s.Gumbel(row)) if rng.random() < 0.6 else (s.Typical(0.9), s.Gumbel(row))
        )
        sampler.add((*shifts(rng, size), *draw), prompt, seed=row)
        last.append(prompt[-1])
    for step in range(steps):
        if step % 5 == 4:
            sampler.accept(1, step % size)
        stages = sampler(table_VV[last]).token_ids.tolist()
        last = [max(token, 0) for token in stages]
    return [list(sampler.output_ids(row)) for row in sampler.rows]


if __name__ == "__main__":
    interpreted.serve(globals())
