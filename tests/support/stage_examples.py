"""Examples of the stages for property tests (nothing to add for a new stage), and all backends with one interface."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import nucleate as nc
from nucleate.plugins import stage_check
from nucleate.plugins.stage_check import SIZE, inside, valid
from nucleate.sampling import reference
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.pipeline import simplify, to_fused_pipeline
from nucleate.sampling.stage import Ceiling, Combine, Draw, Floor, History, Prefix, Scale, Shift, Tap, Transform
from nucleate.sampling.stages import STAGES, Mask

every, examples = stage_check.every, stage_check.examples
neutrals, rows = stage_check.neutrals, stage_check.rows

COMBINES = [kind for kind in STAGES.values() if issubclass(kind, Combine)]
KINDS = [kind for kind in STAGES.values() if kind not in COMBINES]
TRUNCATIONS = [kind for kind in KINDS if issubclass(kind, Floor | Prefix | Ceiling)]
SHIFTS = [kind for kind in KINDS if issubclass(kind, Shift)]
DRAWS = [kind for kind in KINDS if issubclass(kind, Draw)]
TAPS = [kind for kind in KINDS if issubclass(kind, Tap)]
SWITCHED = [kind for kind in KINDS if any(p.neutral is not dataclasses.MISSING for p in kind.parameters.values())]


def keeps_the_first(kind):
    """Whether the best token always survives and stays first, whatever the parameters."""
    if issubclass(kind, Prefix):
        return kind.order is Prefix.order
    return kind.monotone if issubclass(kind, Scale) else not issubclass(kind, Ceiling | Shift | Transform)


def on(kind, **values):
    """Enabled stages of a kind, with these values and a few valid values of every switch, with a key if needed."""
    values |= {a: inside(p)[0] for a, p in kind.parameters.items() if p.kind == "WatermarkKey"}
    switches = {
        a: [v for v in inside(p) if not p.is_neutral(v)][1:4:2] or [inside(p)[-1]]
        for a, p in kind.parameters.items()
        if p.neutral is not dataclasses.MISSING and a not in values
    }
    combinations = itertools.product(*switches.values())
    return [s for c in combinations for s in valid(kind, {**dict(zip(switches, c, strict=True)), **values})]


def masks(seed, count, size=SIZE, share=0.8):
    """Packed bitmasks [count, size / 32] that allow about a share of the tokens, and token 1."""
    allowed = np.random.default_rng(seed).random((count, -(-size // 32) * 32)) < share
    allowed[:, 1] = True
    return np.packbits(allowed, axis=1, bitorder="little").view("<i4")


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
