"""The speedup of a second thread for a batch of 256 rows, which exceeds the caches, and for reading the rows alone.

A process reads NUCLEATE_THREADS once, so each thread count runs in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from nucleate.cli.bench import CHAINS, logits, medians, sampler_call

ROWS = 256
SECONDS = 0.5
READING = "reading alone"
SHOWN = ("T .8", "T .8, top_k 40, min_p .05, top_p .95", "T .7, top_p .9", "top_k 1000")


def compare(sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """The time with two threads divided by that with one, by vocabulary size and pipeline."""
    one, two = (_measured(sizes, count) for count in ("1", "2"))
    return {size: {name: two[size][name] / one[size][name] for name in one[size]} for size in one}


def _measured(sizes: Sequence[int], count: str) -> dict[str, dict[str, float]]:
    script = [sys.executable, __file__, *map(str, sizes)]
    run = subprocess.run(  # noqa: S603
        script, env={**os.environ, "NUCLEATE_THREADS": count}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, dict[str, float]] = json.loads(run.stdout)
    return found


def reading(x_BV: NDArray[np.float32], pool: ThreadPoolExecutor, threads: int) -> Callable[[], object]:
    """NumPy's max over each row, with the same number of threads."""
    parts = np.array_split(x_BV, threads)
    return lambda: list(pool.map(lambda part: part.max(axis=1), parts))


def main() -> None:
    found, threads = {}, int(os.environ["NUCLEATE_THREADS"])
    with ThreadPoolExecutor(threads) as pool:
        for size in map(int, sys.argv[1:]):
            x_BV = logits("peaked", ROWS, size)
            calls = {READING: reading(x_BV, pool, threads)}
            calls.update((chain, sampler_call(x_BV, CHAINS[chain])) for chain in SHOWN)
            found[size] = {name: medians({name: call}, SECONDS)[name] for name, call in calls.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
