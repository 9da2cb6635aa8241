"""Adapters that give all backends one interface for property tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.pipeline import simplify, to_fused_pipeline
from nucleate.sampling.stage import History, Tap
from nucleate.sampling.stages import Mask

NOTHING = History()


class Reference:
    """The reference backend."""

    name = "reference"
    run = staticmethod(reference.run)
    survivors = staticmethod(reference.survivors)
    probabilities = staticmethod(reference.probabilities)

    def draw(self, logits, stages, seed, step, past=NOTHING):
        return self.run(logits, stages, seed, step, past).token

    def sampler(self, size):
        return nc.Sampler(size, backend=self.name)

    def sample(self, logits, params, **options):
        return nc.sample(logits, params, backend=self.name, **options)


class Stages(Reference):
    """The composed CPU path, also for pipelines that the fused kernel supports."""

    name = "cpu"
    run = staticmethod(composed.run)
    survivors = staticmethod(composed.survivors)
    probabilities = staticmethod(composed.probabilities)


class Cpu(Stages):
    """``backend="cpu"``: the fused kernel runs the pipelines that it supports."""

    def run(self, logits, stages, seed, step, past=NOTHING):
        chain = to_fused_pipeline(simplify(stages))
        if isinstance(chain, str):
            return composed.run(logits, stages, seed, step, past)
        seeded = [dataclasses.replace(s, seed=seed) if "seed" in s.parameters else s for s in stages]
        mask = past.mask[None] if any(isinstance(stage, Mask) for stage in stages) and past.mask is not None else None
        options = {"prompt_ids": [past.prompt], "output_ids": [past.output], "mask": mask}
        rows = np.asarray(logits, np.float32)[None]
        try:
            token = int(self.sample(rows, tuple(seeded), step=step, **options)[0])
        except nc.LogitsError as error:
            raise reference.RowError(error.errors[0]) from error
        taps = [stage for stage in stages if isinstance(stage, Tap) and not stage.neutral]
        reports = [composed.step_logprobs(rows[0], token, tap.request) for tap in taps]
        return reference.RowResult(token, reports[0] if reports else None, stages)


ENGINES = (Reference(), Stages(), Cpu())

on_every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__.lower())


def assert_logprobs_close(one, other):
    """Check logprobs for equal tokens and ranks and near values: the fused kernel computes them in float32."""
    assert (one is None) == (other is None)
    for actual, expected in zip(*((r.chosen, *r.top, *r.requested) for r in (one, other)), strict=True) if one else ():
        assert actual[::2] == expected[::2]
        assert actual.logprob == pytest.approx(expected.logprob, abs=1e-6)
