"""Simulates replicas with continuous batching: time to first token, goodput, dead replicas, routing by prefix.

A step of a replica takes ``base + row * decoding sequences + token * prompt tokens`` seconds. ``--measure`` fits these
three to the engine on this machine; the others are arithmetic for GPUs. Everything is seeded.

    python benchmarks/scale_simulation.py [--json FILE] [--measure] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from replica_model import Costs, Request, Served, simulate

EMBEDDED = Costs(base=2.2e-3, row=2.6e-4, token=1.6e-4)
"""Of the embedded model on two cores: replaced with --measure."""
GPU_8B = Costs(base=16e9 / 3.35e12, row=2048 * 131072 / 3.35e12, token=2 * 8e9 / (0.4 * 989e12))
"""Of a model of 8e9 parameters in 16 bits on an H100, by arithmetic: weights and the keys and values of 2,048 tokens
(131,072 bytes each: 32 layers, 8 heads of 128) read at 3.35 TB/s; prompts at 40 % of 989 TFLOP/s."""

LIMITS = 1.0, 0.05
"""Limits of a good answer: seconds to its first token, and between tokens."""
POLICIES: dict[str, tuple[str, dict[str, int]]] = {
    "round robin": ("round robin", {}),
    "fewest requests": ("shortest", {}),
    "prefix, 3 tried": ("prefix", {"tried": 3}),
    "prefix, all tried": ("prefix", {}),
    "prefix, all tried, room 16": ("prefix", {"room": 16}),
}
"""Ways to choose a replica. Ray Serve's consistent hashing tries 3 replicas unless it is told otherwise."""


@dataclass(frozen=True)
class Traffic:
    """Requests: a prefix of ``prefix`` tokens that others share, ``own`` tokens, ``output`` tokens (means; seconds)."""

    prefixes: int
    prefix: int
    own: int
    output: int

    def requests(self, rate: float, seconds: float, seed: int) -> list[Request]:
        """Poisson arrivals; prefixes with Zipf's frequencies; geometric lengths."""
        rng = np.random.default_rng(seed)
        count = rng.poisson(rate * seconds)
        arrivals = np.sort(rng.uniform(0, seconds, count))
        weights = 1 / np.arange(1, self.prefixes + 1)
        chosen = rng.choice(self.prefixes, count, p=weights / weights.sum())
        own, output = rng.geometric(1 / self.own, count), rng.geometric(1 / self.output, count)
        rows = zip(arrivals.tolist(), chosen.tolist(), own.tolist(), output.tolist(), strict=True)
        return [Request(at, key, self.prefix, mine, out) for at, key, mine, out in rows]

    def capacity(self, costs: Costs, rows: int) -> float:
        """Requests per second of one replica that always decodes ``rows`` sequences, if no prefix is cached."""
        step = costs.base + costs.row * rows
        return 1 / (self.output * step / rows + costs.token * (self.prefix + self.own))


def summary(served: Sequence[Served], first: float, between: float) -> dict[str, float]:
    """Percentiles, and the share of requests within both limits (goodput). first, between: seconds."""
    done = [one for one in served if not one.lost]
    ttft = sorted(one.first - one.request.arrival for one in done)
    gaps = sorted((one.end - one.first) / max(1, one.request.output - 1) for one in done)
    good = sum(
        one.first - one.request.arrival <= first and (one.end - one.first) / max(1, one.request.output - 1) <= between
        for one in done
    )
    return {
        "requests": len(served),
        "first token p50": ttft[len(ttft) // 2],
        "first token p99": ttft[int(len(ttft) * 0.99)],
        "between tokens p50": gaps[len(gaps) // 2],
        "goodput": good / len(served),
        "lost": sum(one.lost for one in served) / len(served),
        "prefix hits": sum(one.hit for one in served) / len(served),
    }


def measure() -> dict[str, Any]:
    """Fit the costs to the engine with the embedded model: to the fastest step of each kind."""
    import nucleate as nc

    nc.warm()
    llm = nc.LLM()
    rng, rows = random.Random(0), list[tuple[int, int, float]]()  # decoding, prompt tokens, seconds
    engine = llm.new_engine(max_num_seqs=64, max_num_batched_tokens=256)
    seen: set[str] = set()
    params = nc.SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    for count in (1, 4, 16, 64, 32, 8) * 3:
        for _ in range(count):
            engine.add(nc.Request([rng.randrange(8, 4000) for _ in range(48)], params))
        while len(engine):
            before, start = engine.stats.computed_tokens, perf_counter()
            outputs = engine.step()
            seconds = perf_counter() - start
            decoding = sum(output.request_id in seen for output in outputs)
            seen |= {output.request_id for output in outputs}
            rows.append((decoding, engine.stats.computed_tokens - before - decoding, seconds))
    fastest: dict[tuple[int, int], float] = {}
    for decoding, tokens, seconds in rows[20:]:
        fastest[decoding, tokens] = min(seconds, fastest.get((decoding, tokens), seconds))
    table = np.array([(1.0, *step) for step in fastest])
    times = np.array([*fastest.values()])
    fit, *_ = np.linalg.lstsq(table / times[:, None], np.ones(len(table)), rcond=None)  # relative errors count
    errors = np.abs(table @ fit / times - 1)
    costs = dict(zip(("base", "row", "token"), fit.tolist(), strict=True))
    return {"costs": costs, "median error": float(np.median(errors)), "kinds of steps": len(table)}


def load_curve(costs: Costs, traffic: Traffic, replicas: int, seconds: float, limits: tuple[float, float]) -> Any:
    """Loads from half of the capacity on."""
    full = traffic.capacity(costs, 64) * replicas
    found = {}
    for load in (0.5, 0.8, 1.0, 1.2, 1.4, 1.6):
        requests = traffic.requests(load * full, seconds, 1)
        found[f"{load:g}"] = summary(simulate(costs, requests, replicas, "shortest"), *limits)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    measured = measure() if arguments.measure else None
    embedded = EMBEDDED if measured is None else Costs(**{k: max(0.0, v) for k, v in measured["costs"].items()})
    scale = 0.2 if arguments.quick else 1.0
    small, chat = Traffic(1, 0, 96, 80), Traffic(400, 1500, 200, 200)
    results: dict[str, Any] = {"measured": measured, "costs": {"embedded": embedded._asdict(), "8B": GPU_8B._asdict()}}
    results["load"] = {
        "embedded, 1 replica": load_curve(embedded, small, 1, 400 * scale, LIMITS),
        "8B, 8 replicas": load_curve(GPU_8B, chat, 8, 100 * scale, LIMITS),
    }
    rate = chat.capacity(GPU_8B, 64)
    results["routing"] = {}
    for replicas, seconds in ((8, 100), (64, 20)):
        for load in (0.8, 1.2):
            requests = chat.requests(load * rate * replicas, seconds * scale, 2)
            results["routing"][f"{replicas} replicas, load {load:g}"] = {
                name: summary(simulate(GPU_8B, requests, replicas, policy, **how), *LIMITS)
                for name, (policy, how) in POLICIES.items()
            }
    results["dead replica"] = {}
    for replicas, seconds in ((2, 300), (8, 100), (64, 20)):
        requests = chat.requests(0.7 * rate * replicas, seconds * scale, 3)
        served = simulate(GPU_8B, requests, replicas, "prefix", dies=(seconds * scale / 3, 30.0))
        results["dead replica"][f"{replicas} replicas"] = summary(served, *LIMITS)
    if not arguments.quick:
        served = simulate(GPU_8B, chat.requests(0.7 * rate * 1000, 4, 4), 1000, "prefix")
        results["1000 replicas, prefix"] = summary(served, *LIMITS)
    _show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def _show(results: Any, name: str = "") -> None:
    if "goodput" in results:
        values = "  ".join(f"{key} {value:.3g}" for key, value in results.items())
        print(f"{name}: {values}")
        return
    for key, value in results.items():
        if isinstance(value, dict):
            _show(value, f"{name}, {key}" if name else key)


if __name__ == "__main__":
    main()
