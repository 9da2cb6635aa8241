"""Measures how long the inspector takes to answer a move of a slider, and 1,000 draws of one step. Prints a table.

A move is answered with a trace, its view and JSON, on one thread. Takes ten seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.inspector.draws import draw_counts, draws_view
from nucleate.inspector.trace_view import trace_view
from nucleate.sampling.stages import Gumbel, MinP, Repetition, Temperature, TopK, TopP, Typical

SIZES = (4_096, 32_000, 128_256)
BUDGETS = {4_096: 50, 128_256: 150}
"""Milliseconds for the answer to a move, by size of the vocabulary."""
ROUNDS = 7
SEED = 1
PIPELINES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "6 stages": (3.0, (Repetition(1.1), Temperature(0.8), TopK(50), TopP(0.95), MinP(0.05), Gumbel(SEED))),
    "6 stages, flat row": (0.01, (Repetition(1.1), Temperature(0.8), TopK(0), TopP(0.95), MinP(0.05), Gumbel(SEED))),
    "temperature, flat row": (0.01, (Temperature(0.9), Gumbel(SEED))),
    "typical": (3.0, (Typical(0.9), Gumbel(SEED))),
    "typical, flat row": (0.01, (Typical(0.9), Gumbel(SEED))),
}
"""The standard deviation of the logits, and the pipeline."""


class Case:
    """One row, and what the inspector does with it."""

    def __init__(self, size: int, deviation: float, stages: tuple[Any, ...]) -> None:
        random = np.random.default_rng(0)
        self.logits = (random.normal(size=size) * deviation).astype(np.float32)
        self.prompt, self.stages = random.integers(0, size, 300).tolist(), stages

    def trace(self) -> nc.Trace:
        return nc.trace(self.logits, self.stages, prompt_ids=self.prompt)

    def view(self) -> dict[str, Any]:
        return trace_view(self.trace(), str)

    def answer(self) -> str:
        return json.dumps(self.view(), allow_nan=False)

    def draws(self) -> str:
        counts = draw_counts(self.logits, self.stages, prompt_ids=self.prompt, count=1_000, seconds=60)
        return json.dumps(draws_view(counts, str), allow_nan=False)


def milliseconds(action: Callable[[], object]) -> float:
    """The median time."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def main() -> None:
    print(f"{'vocabulary':>10}  {'pipeline':22}  {'trace':>6}  {'+ view':>6}  {'+ JSON':>6}  {'1,000 draws':>11}  (ms)")
    for size in SIZES:
        for name, (deviation, stages) in PIPELINES.items():
            case = Case(size, deviation, stages)
            times = [milliseconds(action) for action in (case.trace, case.view, case.answer, case.draws)]
            trace, view, answer, draws = (f"{each:.1f}" for each in times)
            late = "  over budget" if times[2] > BUDGETS.get(size, np.inf) else ""
            print(f"{size:>10,}  {name:22}  {trace:>6}  {view:>6}  {answer:>6}  {draws:>11}{late}")


if __name__ == "__main__":
    main()
