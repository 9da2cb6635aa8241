"""Examples of the stages for property tests: nothing to add for a new stage."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from nucleate.plugins import stage_check
from nucleate.plugins.stage_check import SIZE, inside, valid
from nucleate.sampling.stage import Ceiling, Combine, Draw, Floor, Prefix, Scale, Shift, Tap, Transform
from nucleate.sampling.stages import STAGES

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
