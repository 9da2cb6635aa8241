"""Measures watermarks: detection power by length and temperature, false alarms, and time per token.

Writes benchmarks/results/watermarks.json and docs/watermarks.svg. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.sampling.stages import Gumbel, Kgw, Temperature, TopP
from nucleate.watermark import GumbelWatermark, SynthId, WatermarkKey, detect

ROOT = Path(__file__).parents[1]
RESULTS, PLOT = ROOT / "benchmarks" / "results" / "watermarks.json", ROOT / "docs" / "watermarks.svg"
SIZE = 128_256
LEVEL = 1e-3
"""The false-alarm probability at which power is measured."""
LENGTHS = (10, 15, 20, 30, 40, 60, 80, 120, 160, 200)
TEMPERATURES = (0.5, 0.7, 1.0)
PROMPTS = (
    "Once upon a time",
    "The little dog",
    "One day, a girl named Lily",
    "Tom and his friend",
    "In the big forest",
    "The sun was hot and",
    "Mom said",
    "There was a boat",
)
KINDS: Mapping[str, str] = {
    "KGW": "kgw",
    "KGW, self-hash": "kgw(context=4, self_hash=True)",
    "Gumbel": "gumbel",
    "SynthID": "synthid",
}
"""The watermarks by their names in the plot."""


def stage(text: str, key: WatermarkKey) -> Any:
    return nc.watermark.read_watermark(text, key)


def texts(llm: nc.LLM, watermark: str, temperature: float, count: int) -> Iterator[tuple[WatermarkKey, list[int]]]:
    """Outputs with a new key each. A key marks all outputs of an engine, so each needs an engine."""
    for number in range(count):
        key = WatermarkKey(f"benchmark {watermark} {number}".ljust(16).encode())
        engine = llm.new_engine(watermark=stage(watermark, key), max_num_seqs=1)
        params = nc.SamplingParams(temperature=temperature, seed=number, max_tokens=max(LENGTHS), ignore_eos=True)
        engine.add(nc.Request(llm.encode(PROMPTS[number % len(PROMPTS)]), params))
        ids: list[int] = []
        while len(engine):
            for output in engine.step():
                ids += output.chunk.token_ids
        yield key, ids


def power(llm: nc.LLM, count: int) -> list[dict[str, Any]]:
    """The share of texts found at LEVEL, by watermark, temperature and length."""
    found = []
    for name, watermark in KINDS.items():
        for temperature in TEMPERATURES:
            hits = np.zeros(len(LENGTHS))
            for key, ids in texts(llm, watermark, temperature, count):
                hits += [detect(ids[:length], key, watermark).p_value <= LEVEL for length in LENGTHS]
            found.append({"kind": name, "temperature": temperature, "power": (hits / count).round(4).tolist()})
            print(found[-1], flush=True)
    return found


def false_alarms(llm: nc.LLM, count: int, length: int = 100) -> dict[str, dict[str, float]]:
    """The share of p-values up to a level in text of the model without a watermark, with a new key for each text."""
    params = [nc.SamplingParams(seed=seed, max_tokens=length, ignore_eos=True) for seed in range(64)]
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(64)], params)
    ids = [one.outputs[0].token_ids for one in outputs]
    found = {}
    for name, watermark in KINDS.items():
        p = [
            detect(ids[i % 64], WatermarkKey(f"false alarm {i}".ljust(16).encode()), watermark).p_value
            for i in range(count)
        ]
        found[name] = {f"{level:g}": float(np.mean(np.array(p) <= level)) for level in (1e-1, 1e-2, 1e-3)}
        print(name, found[name], flush=True)
    return found


def pipelines(key: WatermarkKey) -> dict[str, Sequence[Any]]:
    """Those that are timed: temperature and top-p, without and with each watermark."""
    base = Temperature(0.8), TopP(0.9)
    return {
        "none": (*base, Gumbel(1)),
        "KGW": (Kgw(key=key), *base, Gumbel(1)),
        "KGW, self-hash": (Kgw(context=4, self_hash=True, key=key), *base, Gumbel(1)),
        "Gumbel": (*base, GumbelWatermark(seed=1, key=key)),
        "SynthID": (*base, SynthId(key=key), Gumbel(1)),
    }


def times(rounds: int = 12, steps: int = 40) -> dict[str, float]:
    """Microseconds per token, one row of peaked logits, V = 128,256: the lowest median of several rounds in turn."""
    nc.warm()
    numbers = np.random.default_rng(0)
    logits = numbers.normal(0, 2, (16, SIZE)).astype(np.float32)
    for row in logits:
        row[numbers.integers(0, SIZE, 50)] += np.linspace(4, 14, 50, dtype=np.float32)
    samplers = {}
    for name, pipeline in pipelines(WatermarkKey(b"a key of a benchmark")).items():
        samplers[name] = nc.Sampler(SIZE, backend="cpu")
        samplers[name].add(tuple(pipeline))
    found: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            taken = []
            for step in range(steps):
                row = logits[step % 16][None]
                begin = time.perf_counter()
                sampler(row)
                taken.append(time.perf_counter() - begin)
            found[name].append(statistics.median(taken))
    best = {name: round(min(medians) * 1e6, 1) for name, medians in found.items()}
    print(best, flush=True)
    return best


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the plot: power by length, one panel per temperature. Deterministic."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    styles = dict(zip(KINDS, [("#0072b2", "s"), ("#56b4e9", "D"), ("#d55e00", "o"), ("#009e73", "^")], strict=True))
    settings = {"svg.hashsalt": "nucleate", "font.family": "DejaVu Sans", "font.size": 10, "text.color": "#24292f"}
    with mpl.rc_context(settings):
        figure, panels = plt.subplots(
            1, len(TEMPERATURES), figsize=(10, 3.4), sharey=True, facecolor="white", layout="constrained"
        )
        for axes, temperature in zip(panels, TEMPERATURES, strict=True):
            for one in results["power"]:
                if one["temperature"] == temperature:
                    colour, marker = styles[one["kind"]]
                    axes.plot(LENGTHS, one["power"], marker=marker, ms=5, color=colour, label=one["kind"])
            axes.set_title(f"temperature {temperature}", size=10)
            axes.set_xlabel("tokens")
            axes.set_ylim(-0.02, 1.02)
            axes.grid(color="#e4e7eb")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(f"found with p ≤ {LEVEL:g}")
        panels[0].legend(frameon=False, fontsize=9)
        figure.savefig(path, metadata={"Date": None, "Title": "Detection power of watermarks"})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=60, help="texts per watermark and temperature (default: 60)")
    parser.add_argument("--keys", type=int, default=20_000, help="keys per false-alarm figure (default: 20000)")
    parser.add_argument("--only", choices=("power", "false_alarms", "microseconds", "plot"), help="measure only this")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    llm = nc.LLM()
    parts = {
        "power": lambda: power(llm, arguments.texts),
        "false_alarms": lambda: false_alarms(llm, arguments.keys),
        "microseconds": times,
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            results[name] = measure()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    draw(results, PLOT)


if __name__ == "__main__":
    main()
