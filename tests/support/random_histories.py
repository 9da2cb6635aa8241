"""Texts of rows with history-dependent Shifts, to compare backends."""

from __future__ import annotations

import random
import unittest.mock
from typing import Any

import numpy as np
import triton_interpreter as interpreted

import nucleate as nc
from nucleate.sampling.gpu import batch_state
from nucleate.sampling.stages import (
    BadWords,
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    Presence,
    Repetition,
    Temperature,
    TopP,
    Typical,
)


def shifts(rng: random.Random, size: int) -> tuple[Any, ...]:
    """Random Shifts, mostly history-dependent, sometimes shuffled."""

    def words(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(rng.randrange(size) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, most))
        )

    window = rng.choice([None, -1, 3, 20])
    stages = [
        Repetition(rng.choice([0.8, 1.4]), window),
        Frequency(rng.uniform(-0.5, 1.0), window),
        Presence(rng.uniform(-0.5, 1.0), rng.choice([window, 5])),
        Dry(rng.uniform(0.5, 3.0), 1.75, rng.randrange(1, 3), rng.choice([None, words(3)]), rng.choice([-1, 6])),
        NoRepeatNgram(rng.randrange(1, 4)),
        BadWords(words(5)),
        LogitBias({rng.randrange(size): rng.uniform(-2.0, 2.0) for _ in range(3)}),
        MinTokens(3, (0, 1)),
    ]
    some = [one for one in stages if rng.random() < 0.6] or stages[3:4]
    if rng.random() < 0.4:
        rng.shuffle(some)
    return tuple(some)


def written(backend: str, seed: int, steps: int, size: int, ring: int = 32) -> list[list[int]]:
    """The output of some rows. The logits depend on the last token and are close, so that adjustments matter.

    ring: the initial size of a row's token ring on the device.
    """
    with unittest.mock.patch.object(batch_state, "MIN_RING_SIZE", ring):
        rng, sampler = random.Random(seed), nc.Sampler(size, backend)
    table_VV = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 1.5
    last = []
    for row in range(3):
        prompt = [rng.randrange(size) for _ in range(rng.randrange(1, 12))]
        draw = (Temperature(0.5), TopP(0.95), Gumbel(row)) if rng.random() < 0.6 else (Typical(0.9), Gumbel(row))
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
