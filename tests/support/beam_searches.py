"""Beam searches for the engine's tests, and their reference results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import toy_requests as toys
from toy_models import Toy

from nucleate.engine.beam_params import BeamChunk, BeamParams, BeamRequest
from nucleate.generation.beam_search import beam_search
from nucleate.outputs import EngineOutput

SIZE = 300
"""A smaller vocabulary than in ``toy_requests``, as the reference sorts all of it."""

NAMES = (
    "num_beams",
    "length_penalty",
    "early_stopping",
    "num_return_sequences",
    "num_beam_groups",
    "diversity_penalty",
)


def hashed(
    size: int, seed: int, banned: float = 0.0, *, coarse: bool = False
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Logits that depend on all tokens. banned: the fraction at -inf, never all. coarse: so that many are equal."""

    def logits_of(ids: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(ids), *ids])
        logits = rng.normal(size=size) * 2
        if coarse:
            logits = np.round(logits * 0.7)
        out = rng.random(size) < banned
        out[rng.integers(size)] = False
        logits[out] = -np.inf
        return logits.astype(np.float32)

    return logits_of


BeamTuple = tuple[tuple[int, ...], float, float, str | None]


def rule(seen: tuple[int, ...]) -> np.ndarray:
    """Logits that depend on every token and on their order; EOS is often likely."""
    return toys.rule(seen)[:SIZE]


def toy(context_length: int = 256, of: Callable[[tuple[int, ...]], np.ndarray] = rule) -> Toy:
    return Toy(of, SIZE, context_length)


def random_search(rng: random.Random, longest: int = 20) -> BeamRequest:
    """A search with random parameters."""
    groups = rng.choice([1, 1, 1, 2])
    num_beams = groups * rng.randint(1, 4)
    params = BeamParams(
        num_beams=num_beams,
        num_beam_groups=groups,
        max_tokens=rng.randint(1, 14),
        length_penalty=rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        early_stopping=rng.choice([True, False, "never"]),
        diversity_penalty=rng.choice([0.0, 1.0, 20.0]),
        num_return_sequences=rng.choice([None, None, 1, num_beams]),
        stop_token_ids=rng.choice([(), (), (5, 6)]),
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice([None, None, 0, 2]),
    )
    prompt = [rng.randrange(1, 40) for _ in range(rng.randint(1, longest))]
    return BeamRequest(prompt, params, priority=rng.choice([0, 0, 1, -1]))


def expected_beams(
    model: Toy, request: BeamRequest, eos: Sequence[int] | frozenset[int], **more: object
) -> list[BeamTuple]:
    """The beams of the reference search."""
    params = request.params
    options = {name: getattr(params, name) for name in NAMES}
    max_new = model.context_length - len(request.prompt_ids)
    max_tokens = max_new if params.max_tokens is None else min(max_new, params.max_tokens)
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    rule: Callable[[tuple[int, ...]], np.ndarray] = model.rule
    beams = beam_search(rule, request.prompt_ids, max_tokens=max_tokens, eos_token_ids=ends, **options, **more)
    return [(beam.token_ids, beam.score, beam.logprob, beam.finish_reason) for beam in beams]


def found_beams(events: Sequence[EngineOutput]) -> list[BeamTuple]:
    """The beams in the events of a finished search."""
    beams: list[BeamTuple] = []
    for index, event in enumerate(events):
        chunk = event.chunk
        assert isinstance(chunk, BeamChunk)
        assert (chunk.index, event.finished) == (index, index == len(events) - 1)
        beams.append((chunk.token_ids, chunk.score, chunk.logprob, chunk.finish_reason))
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == sum(len(beam[0]) for beam in beams)
    return beams
