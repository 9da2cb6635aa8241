"""Time per step with and without guidance, side by side, and the time to combine two rows of logits.

``python benchmarks/guidance.py``: the embedded model; requests of 48 tokens that run together, medians of 7 turns.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.sampling.companion import combine
from nucleate.sampling.stages import Contrastive, Guidance

TURNS, TOKENS = 7, 48
SIZES = (4096, 32_000, 128_256)


def seconds_per_step(engine: Engine, prompt: list[int], count: int, **fields: Any) -> float:
    """Run requests together, and return the seconds per token of each of them."""
    shared = {"temperature": 0.8, "top_p": 0.95, "max_tokens": TOKENS, "ignore_eos": True}
    for seed in range(count):
        engine.add(nc.Request(prompt, nc.SamplingParams(seed=seed, **shared, **fields)))
    begin = perf_counter()
    while len(engine):
        engine.step()
    return (perf_counter() - begin) / TOKENS


def engines() -> None:
    """Print the time per step."""
    llm = nc.LLM()
    prompt, negative = llm.encode("Once upon a time, a little fox"), llm.encode("A sad story about")
    guided = {"guidance_scale": 1.5, "negative_prompt": negative}
    for count in (1, 4, 16):
        engine = llm.new_engine(max_num_seqs=64)
        settings: list[tuple[str, int, dict[str, Any]]] = [
            ("plain", count, {}),
            ("guided", count, guided),
            ("plain, twice as many", 2 * count, {}),
        ]
        times: dict[str, list[float]] = {name: [] for name, _, _ in settings}
        for turn in range(TURNS + 1):
            for name, requests, fields in settings:
                seconds = seconds_per_step(engine, prompt, requests, **fields)
                if turn:  # the first one warms up
                    times[name].append(1e3 * seconds)
        print(f"{count:3} requests: " + ", ".join(f"{name} {median(each):.2f} ms" for name, each in times.items()))


def rows() -> None:
    """Print the time to combine two rows."""
    for size in SIZES:
        x_V, other_V = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
        for stage in (Guidance(2.0), Contrastive(1.0)):
            times = []
            for _ in range(60):
                begin = perf_counter()
                combine(stage, x_V, other_V)
                times.append(1e3 * (perf_counter() - begin))
            print(f"V={size}: {stage.name} {median(times):.3f} ms")


if __name__ == "__main__":
    nc.warm()
    engines()
    rows()
