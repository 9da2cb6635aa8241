"""Measures what each stage adds to the time of a token: a pipeline with the stage and without it, in turns.

``python benchmarks/stages.py [--json FILE]``: five minutes. One row of logits, V = 128,256, one thread, the public call
of a ``Sampler``. The calls take turns through a batch of 32 different rows: as those that a model has just computed,
they are in the last level of the cache, not in a core's own. Stages that count tokens have a history of 256 random
tokens. The pages of the stages show the medians for peaked logits.

A *read* is the time of NumPy's max of such a row, measured in the same turns. The reads of a stage are the time of a
token with it (for all but draws: and a Gumbel draw), divided by that. For stages that combine two rows, a read is that
of both. The target is at most 20 reads, for each stage on logits that are peaked, flat and real.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from sampler import machine

import nucleate as nc
from nucleate.cli.bench import logits, medians, recreate_every
from nucleate.sampling import stages
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Combine, Draw, Pipeline, Scale, Stage, Transform
from nucleate.sampling.watermark_key import WatermarkKey

SIZE, HISTORY, SECONDS = 128_256, 256, 0.5
ROWS = 32
"""Rows in a batch: 16 MB."""
MAX_READS = 20
"""Target: reads of the row per token, at most."""
TOP_K, MIN_P = stages.TopK(40), stages.MinP(0.05)
"""Before a Transform, and before a Scale that changes the order (adaptive-p, as its authors advise): both compute a
score of each surviving token."""
KEY = WatermarkKey(b"a key for the benchmark")
NUMBERS = np.random.default_rng(1)
IDS = tuple(NUMBERS.integers(0, SIZE, 100).tolist())
PAST = NUMBERS.integers(0, SIZE, HISTORY).tolist()

MEASURED: tuple[Stage, ...] = (
    *(
        stages.Guidance(1.5, (0,)),
        stages.Contrastive(0.5),
        stages.Kgw(key=KEY),
        stages.LogitBias(dict.fromkeys(IDS, 1.0)),
    ),
    *(stages.EncoderRepetition(1.2), stages.Repetition(1.1), stages.Frequency(0.1), stages.Presence(0.1)),
    *(stages.Dry(0.8, breakers=()), stages.NoRepeatNgram(3), stages.MinTokens(1000, ends=(0, 1))),
    *(stages.BadWords(tuple((token,) for token in IDS)), stages.Suppress(IDS), stages.Allowed(IDS), stages.Mask()),
    *(stages.Temperature(0.8), stages.DynamicTemperature(0.5, 1.5), stages.Quadratic(0.3), stages.TopNSigma(1.0)),
    *(
        stages.TopK(40),
        stages.Typical(0.95),
        stages.MinP(0.05),
        stages.TopA(0.2),
        stages.Epsilon(3e-4),
        stages.Eta(3e-4),
    ),
    *(stages.PLess(True), stages.TopH(0.4), stages.Mirostat(5.0), stages.MirostatV1(5.0), stages.TopP(0.9)),
    *(stages.Xtc(0.5), stages.AdaptiveP(0.5), stages.SynthId(key=KEY), stages.Logprobs(20)),
    *(stages.Greedy(), stages.Categorical(seed=1), stages.Gumbel(seed=1), stages.GumbelWatermark(seed=1, key=KEY)),
)
"""Each stage with common values of its parameters."""


def call(pipeline: Pipeline, x_BV: Any, **arguments: Any) -> Any:
    """Return a function that samples one token from the next row."""

    def make() -> Any:
        sampler, rows = Sampler(SIZE, backend="cpu"), cycle(x_BV[:, None])
        sampler.add(pipeline, PAST, output_ids=PAST)
        return lambda: sampler(next(rows), **arguments).token_ids

    return recreate_every(make)


def read(x_BV: Any) -> Any:
    """Return a function that reads the next row."""
    rows = cycle(x_BV[:, None])
    return lambda: next(rows).max(axis=1)


def real() -> Any:
    """Logits float32 [ROWS, SIZE] with the distribution of those of the embedded model, in random order."""
    llm = nc.LLM()
    ids = llm.tokenizer.encode("Once upon a time there was a little girl. She had a red")
    x_N = np.sort(np.asarray(llm.model.begin().forward(ids), np.float64))
    x_V = np.interp(np.linspace(0, len(x_N) - 1, SIZE), np.arange(len(x_N)), x_N).astype(np.float32)
    return NUMBERS.permuted(np.tile(x_V, (ROWS, 1)), axis=1)


def reads(stage: Stage, times: dict[str, float]) -> float:
    """Return the time of a token with a stage, in reads of the row."""
    rows = 2 if isinstance(stage, Combine) else 1
    return round(times["with"] / (rows * times["numpy max"]), 1)


def before(stage: Stage) -> tuple[Stage, ...]:
    """Return the stages that a stage is used after."""
    if isinstance(stage, Transform):
        return (TOP_K,)
    return (MIN_P,) if isinstance(stage, Scale) and not stage.monotone else ()


def measure(stage: Stage, x_BV: Any) -> dict[str, float]:
    """Return the median microseconds of a token with the stage, and without it, and of NumPy's max."""
    if isinstance(stage, Draw):
        return medians({"with": call((stage,), x_BV), "numpy max": read(x_BV)}, SECONDS)
    more: dict[str, Any] = {"companion": x_BV[:1, ::-1].copy()} if isinstance(stage, Combine) else {}
    if isinstance(stage, stages.Mask):
        more["mask"] = np.full((1, -(-SIZE // 32)), 0x55555555, np.int32)
    rest = stages.Gumbel(seed=1)
    first = before(stage)
    calls = {"with": call((*first, stage, rest), x_BV, **more), "without": call((*first, rest), x_BV)}
    calls["numpy max"] = read(x_BV)
    return medians(calls, SECONDS)


def main() -> None:
    """Measure all stages, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    path, os.environ["NUCLEATE_THREADS"] = parser.parse_args().json, "1"
    rows = {**{kind: logits(kind, ROWS, SIZE) for kind in ("peaked", "flat")}, "real": real()}
    found: dict[str, Any] = {}
    missed = []
    for stage in MEASURED:
        measured = {kind: measure(stage, x_BV) for kind, x_BV in rows.items()}
        times = {name: round(us, 1) for name, us in measured["peaked"].items()}
        cost = {kind: reads(stage, one) for kind, one in measured.items()}
        missed += [f"{stage.name} on {kind} logits ({one})" for kind, one in cost.items() if one > MAX_READS]
        shown = f"{stage!r:.60}" + "".join(f" after {first!r}" for first in before(stage))
        found[stage.name] = {"stage": shown, "microseconds": times, "reads": cost}
        print(f"{stage.name:22}", times, "reads:", cost, flush=True)
    print(f"more than {MAX_READS} reads: {len(missed)} of {3 * len(MEASURED)} cells: {', '.join(missed)}")
    if path is not None:
        about = {"machine": machine(), "nucleate": nc.__version__, "vocabulary": SIZE, "history": HISTORY}
        results = {**about, "stages": found}
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
