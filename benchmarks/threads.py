"""What a second thread brings to a batch of 256 rows.

A process reads NUCLEATE_THREADS once, so each count has one of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from nucleate.cli.bench import CHAINS, logits, medians, ours

ROWS = 256
SECONDS = 0.2


def compare(sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """The time on two threads, over that on one, by vocabulary and chain."""
    one, two = (_measured(sizes, count) for count in ("1", "2"))
    return {size: {chain: two[size][chain] / one[size][chain] for chain in CHAINS} for size in one}


def _measured(sizes: Sequence[int], count: str) -> dict[str, dict[str, float]]:
    script = [sys.executable, __file__, *map(str, sizes)]
    run = subprocess.run(  # noqa: S603  # it runs itself
        script, env={**os.environ, "NUCLEATE_THREADS": count}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, dict[str, float]] = json.loads(run.stdout)
    return found


def main() -> None:
    found = {}
    for size in map(int, sys.argv[1:]):
        x_BV = logits("peaked", ROWS, size)
        found[size] = {
            chain: medians({"nucleate": ours(x_BV, params)}, SECONDS)["nucleate"] for chain, params in CHAINS.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
