"""The cost of the reference backend and of the text stages, compared with NumPy's max over the same logits.

Run: make bench. Prints microseconds (minimum of several runs) and ratios. The reference backend defines the results and
is not optimised; these numbers are the baseline of the compiled backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.sampling import reference
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

CHAINS = {
    "greedy": nc.SamplingParams(temperature=0),
    "temperature": nc.SamplingParams(temperature=0.7),
    "top_k 40, top_p .95, min_p .05": nc.SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top_p .9": nc.SamplingParams(temperature=0.7, top_p=0.9),
}


def least(function: Callable[[], object], runs: int = 7) -> float:
    """The minimum time of several runs, in microseconds."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def sampling() -> None:
    print(f"{'vocabulary':>10}  {'pipeline':32}{'us/token':>12}{'x max':>9}")
    for size in (4096, 32000, 128256):
        logits_V = np.random.default_rng(0).normal(0, 2.5, size).astype(np.float32)
        logits_V[:16] += 12
        floor = least(logits_V.max)
        print(f"{size:>10}  {'numpy max':32}{floor:12.1f}{1:9.0f}")
        for name, params in CHAINS.items():
            stages = nc.explain(params).stages
            taken = least(lambda s=stages, x=logits_V: reference.draw(x, s, 1, 0))  # type: ignore[misc]
            print(f"{size:>10}  {name:32}{taken:12.1f}{taken / floor:9.0f}")


def text() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    ids = np.random.default_rng(0).integers(5, 4096, 20000).tolist()

    def push_all() -> None:
        detokenizer = Detokenizer(tokenizer)
        for token in ids:
            detokenizer.push(token)

    print(f"\ndetokenizer, byte-level BPE: {least(push_all, 3) / len(ids):.2f} us/token")


if __name__ == "__main__":
    sampling()
    text()
