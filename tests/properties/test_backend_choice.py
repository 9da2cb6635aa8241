"""The choice of backend never changes a token, for any size of the call and any other rows in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pipeline_cases as cases
import pytest
import tiers

import nucleate as nc
from nucleate.sampling.stage import Ceiling, Pipeline
from nucleate.sampling.stages import Greedy

BACKENDS = ("reference", "cpu", "auto")
BATCHES = (1, 2, 16, tiers.count(64, 300))
ROWS = tiers.count(8, 30)
"""Random rows of each size."""


class Case(NamedTuple):
    logits_V: Any
    stages: Pipeline
    prompt: Sequence[int]
    output: Sequence[int]
    mask_W: Any


def made(size: int) -> list[Case]:
    """Rows of random stages at the edges of their parameters, half of them with a mask."""
    found: list[Case] = []
    for seed in range(10**6):
        logits_V, stages, past, _ = cases.case(seed)
        seeded = not isinstance(stages[-1], Greedy) or not any(isinstance(stage, Ceiling) for stage in stages)
        if len(logits_V) == size and seeded:
            words = -(-size // 32)
            mask_W = np.full(words, -1, np.int32) if past.mask is None else past.mask[:words]
            found.append(Case(logits_V, stages, past.prompt, past.output, mask_W))
        if len(found) == ROWS:
            return found
    raise AssertionError(size)


def sampled(batch: list[Case], backend: str) -> list[int]:
    """A token per row, -1 for rows without one."""
    arguments = {
        "step": [len(case.output) for case in batch],
        "prompt_ids": [case.prompt for case in batch],
        "output_ids": [case.output for case in batch],
        "mask": np.array([case.mask_W for case in batch]),
    }
    logits = np.array([case.logits_V for case in batch])
    try:
        tokens = nc.sample(logits, [case.stages for case in batch], backend=backend, **arguments)
    except nc.LogitsError as error:
        tokens = error.token_ids
    return [int(token) for token in tokens]


def stepped(batch: list[Case], backend: str) -> list[int]:
    """The same tokens from a ``Sampler``."""
    sampler = nc.Sampler(len(batch[0].logits_V), backend)
    for case in batch:
        sampler.add(case.stages, case.prompt, output_ids=case.output)
    logits, mask = np.array([case.logits_V for case in batch]), np.array([case.mask_W for case in batch])
    return [int(token) for token in sampler(logits, mask=mask).token_ids]


@pytest.mark.parametrize("size", cases.SIZES)
@pytest.mark.fast_cases(0)
def test_no_choice_of_a_backend_changes_a_token(size: int) -> None:
    every, rng = made(size), random.Random(size)
    expected = {id(case): sampled([case], "reference")[0] for case in every}
    for count in BATCHES:
        starts = range(0, ROWS, count) if count < ROWS else [0]
        for start in starts:
            batch = every[start : start + count] if count < ROWS else rng.choices(every, k=count)
            expected_tokens = [expected[id(case)] for case in batch]
            for backend in BACKENDS:
                for draw in (sampled, stepped):
                    assert draw(batch, backend) == expected_tokens, (backend, draw.__name__, count, start)
