"""Random requests with guidance and contrastive decoding, and their reference."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import numpy as np
from test_structured_random import CONSTRAINTS
from toy_models import Toy
from toy_requests import TABLE, random_request, reference_chunks, toy

import nucleate as nc
from nucleate.engine.request import Request


def weaker_rule(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of the companion model: they depend on every token, unlike those of the model."""
    return TABLE[hash(seen[::-1]) % len(TABLE)] * np.float32(0.5)


def weaker(context_length: int = 230) -> Toy:
    """The companion model, with a shorter context than the model."""
    return toy(context_length, of=weaker_rule)


def random_companion(rng: random.Random) -> dict[str, object]:
    """The fields of a companion; in a third of the cases none."""
    kind = rng.randrange(3)
    if kind == 0:
        return {}
    if kind == 1:
        return {
            "contrastive_beta": rng.choice([0.5, 1.0]),
            "contrastive_alpha": rng.choice([0.01, 0.3]),
            "contrastive_temperature": rng.choice([1.0, 0.5]),
        }
    prompt = [rng.randrange(1, 40) for _ in range(rng.choice([0, 1, 3, 9, 30]))]
    if rng.random() < 0.4:
        prompt = [*range(1, rng.randint(2, 30)), *prompt]
    return {"guidance_scale": rng.choice([0.0, 1.5, 2.0, -0.5]), "negative_prompt": prompt}


def companion_request(rng: random.Random) -> Request:
    """A random request, in most cases with a companion."""
    request = random_request(rng)
    return dataclasses.replace(request, params=request.params.replace(**random_companion(rng)))


def any_companion_request(rng: random.Random) -> Request:
    """The same, sometimes with structured output."""
    request = companion_request(rng)
    params = request.params
    if rng.random() < 0.2:
        params = params.replace(
            structured_outputs=nc.StructuredOutputs(**rng.choice(CONSTRAINTS)), max_tokens=rng.randint(1, 24)
        )
    return dataclasses.replace(request, params=params)


companion_chunks = partial(reference_chunks, companion_model=weaker())
"""``reference_chunks`` with the companion model."""
