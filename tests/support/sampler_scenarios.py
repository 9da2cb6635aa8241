"""Random operations on a Sampler, recorded to compare backends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import triton_interpreter as interpreted

import nucleate as nc
from nucleate.sampling.stages import (
    Allowed,
    BadWords,
    Dry,
    Frequency,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    MinTokens,
    Mirostat,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)


def stages(rng: random.Random, size: int) -> tuple[Any, ...]:
    """A random pipeline that usually runs on the device."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(size) for _ in range(rng.randrange(1, most)))

    window = rng.choice([None, None, -1, 0, 1, 3, 7])
    ways = {
        "tap": [Logprobs(rng.choice([None, 0, 1, 3, size + 5]), rng.choice([(), some(4)]))],
        "bans": [BadWords(tuple((t,) for t in some(3))), MinTokens(rng.randrange(6), some(9)), Suppress(some(5))],
        "bias": [LogitBias({token: rng.uniform(-2.0, 4.0) for token in some(6)})],
        "penalties": [
            *(Repetition(rng.choice([0.7, 1.4]), window), Frequency(rng.uniform(-1, 1), window)),
            Presence(rng.uniform(-1, 1), window),
        ],
        "late": [Allowed((*some(30), *some(30))), Suppress(some(4))],
        "cuts": rng.choice([
            [Temperature(rng.choice([0.0, 0.6, 1.7])), TopNSigma(2.0), TopK(9), MinP(0.02), TopP(0.9)],
            [TopK(rng.choice([1, 5, 2**31 - 1])), TopP(0.7), Temperature(0.7)],
            [MinP(0.1)],
        ]),
    }  # fmt: skip
    chosen = [stage for name in ways if rng.random() < 0.5 for stage in ways[name]]
    if rng.random() < 0.15:  # runs on the CPU
        chosen.append(rng.choice([Typical(0.8), Mirostat(3.0)]))
    if rng.random() < 0.1:
        chosen = [Dry(0.8, 1.75, 1, ((4,),)), *(stage for stage in chosen if not isinstance(stage, Logprobs))]
    return (*chosen, Greedy() if rng.random() < 0.1 else Gumbel(rng.getrandbits(64)))


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


def same(one: Any, other: Any) -> bool:
    """Equal up to rounding of logprobs: kernels sum groups in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) < 1e-6
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def play(backend: str, seed: int, steps: int, size: int = 77, most: int = 5) -> list[Any]:
    """The result of each random action."""
    rng, sampler, results = random.Random(seed), nc.Sampler(size, backend), []
    for _ in range(steps):
        rows, action = list(sampler.rows), rng.random()
        if len(rows) < 2 or (action < 0.2 and len(rows) < most):
            prompt, output = ([rng.randrange(size) for _ in range(rng.randrange(9))] for _ in range(2))
            seed = rng.getrandbits(64)  # a greedy row would get a random one
            results.append(sampler.add(stages(rng, size), prompt, output_ids=output, seed=seed))
        elif action < 0.3:
            results.append(sampler.remove(rng.choice(rows)))
        elif action < 0.4:
            sampler.accept(rng.choice(rows), rng.randrange(size))
        elif action < 0.5:
            row, x_RV = rng.choice(rows), scores(rng, 2, size).float().nan_to_num(0.5, 9.0)
            distribution_V = sampler.distributions(row, x_RV, [3])[0]
            if not np.isnan(distribution_V).any():
                results.append(
                    (
                        distribution_V.tolist(),
                        sampler.accept(row, int(distribution_V.argmax()), x_RV[0]),
                        sampler.stages(row),
                    )
                )
        elif action < 0.55:
            results.append([sampler.output_ids(row) for row in rows])
        else:
            selected = rng.choice([None, rng.sample(rows, rng.randrange(1, len(rows) + 1))])
            count = len(rows if selected is None else selected)
            mask = np.random.default_rng(rng.getrandbits(32)).integers(-(2**31), 2**31, (count, -(-size // 32) + 1))
            mask = mask.astype(np.int32) if rng.random() < 0.3 else None
            results.append(as_values(sampler(scores(rng, count, size), selected, mask=mask)))
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
        chain = (Repetition(1.2, 6), Frequency(0.5, 6), Presence(0.1, 6), Temperature(0.9), TopK(20))
        sampler.add((*chain, Gumbel(seed + row)), [3, first[row]])
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


if __name__ == "__main__":
    interpreted.serve(globals())
