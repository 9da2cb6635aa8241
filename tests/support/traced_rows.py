"""Random rows and pipelines of all kinds, for tests of traces."""

from __future__ import annotations

import dataclasses

import numpy as np

from nucleate.sampling import stages as s
from nucleate.sampling.stage import Ceiling

SIZE = 37  # no multiple of 32
CHOICES = (
    lambda r: s.LogitBias({int(i): float(r.normal()) for i in r.integers(0, SIZE, 3)}),
    lambda r: s.Repetition(float(r.uniform(0.5, 2)), int(r.integers(-1, 9))),
    lambda r: s.Frequency(float(r.uniform(-2, 2))),
    lambda r: s.Presence(float(r.uniform(-2, 2)), 4),
    lambda r: s.Dry(0.8, allowed_length=1),
    lambda r: s.NoRepeatNgram(int(r.integers(1, 4))),
    lambda r: s.BadWords(((int(r.integers(SIZE)),), (3, 4))),
    lambda r: s.Suppress(tuple(r.integers(0, SIZE, 3).tolist())),
    lambda r: s.Temperature(float(r.choice([0.0, 0.5, 1.0, 3.0]))),
    lambda r: s.DynamicTemperature(0.5, 1.5),
    lambda r: s.TopNSigma(1.5),
    lambda r: s.TopK(int(r.integers(0, 20)), bool(r.integers(2))),
    lambda r: s.Typical(float(r.uniform(0.2, 1))),
    lambda r: s.MinP(0.05),
    lambda r: s.TopA(0.2),
    lambda r: s.Epsilon(0.02),
    lambda r: s.Eta(0.02),
    lambda r: s.PLess(True),
    lambda r: s.TopH(0.6),
    lambda r: s.Mirostat(2.0, mu=float(r.uniform(-1, 6))),
    lambda r: s.TopP(float(r.uniform(0.2, 1)), bool(r.integers(2))),
    lambda r: s.Xtc(float(r.uniform(0, 1)), 0.05, (2,)),
    lambda r: s.AdaptiveP(0.3),
    lambda r: s.MirostatV1(2.0, mu=float(r.uniform(-1, 6))),
    lambda r: s.Quadratic(float(r.uniform(0, 0.5))),
    lambda r: s.MinP(0.2, min_keep=int(r.integers(0, 9))),
)


def case(seed):
    """A random pipeline in a random order, with a row of logits that has ties and -inf, histories, a mask, a step."""
    r = np.random.default_rng(seed)
    stages = [CHOICES[i](r) for i in r.permutation(len(CHOICES))[: r.integers(0, 8)]]
    if r.integers(3) == 0:
        stages.insert(int(r.integers(len(stages) + 1)), s.Logprobs(2))
    draw = [s.Gumbel(seed), s.Categorical(seed), *[s.Greedy()] * (not any(isinstance(one, s.Xtc) for one in stages))]
    stages.append(draw[r.integers(len(draw))])
    logits = np.round(r.normal(size=SIZE) * 12) / 4
    logits[r.random(SIZE) < 0.1] = -np.inf
    logits[5] = 1.0
    words = {"prompt_ids": r.integers(0, SIZE, 9).tolist(), "output_ids": r.integers(0, SIZE, 6).tolist()}
    mask = r.integers(-(2**31), 2**31, 2).astype(np.int32) if r.integers(3) == 0 else None
    return logits, tuple(stages), words, int(r.integers(0, 5)), mask


def batch(words):
    return {name: [ids] for name, ids in words.items()}


def active_stages(uniform, stages):
    """The stages in a step with a known random decision."""
    for stage in stages:
        if not isinstance(stage, Ceiling):
            yield stage
        elif uniform < stage.act_probability:
            yield dataclasses.replace(stage, probability=1.0)
