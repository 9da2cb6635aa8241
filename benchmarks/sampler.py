"""What one token costs, through the public ``Sampler`` call, beside NumPy's max over the same row and the peers.

Run: python benchmarks/sampler.py [--quick] [--json FILE] [--markdown FILE]. All figures are medians of one run on one
thread; the contenders take turns, a few calls each, so that a slow moment of the machine hits all alike.
torch (topk, sort, multinomial) and Transformers' processors take part if they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("NUCLEATE_THREADS", "1")

import numpy as np

from nucleate.cli.bench import CHAINS, KINDS, logits, medians, ours

SIZES = (32_000, 128_256, 151_936, 256_000)
ROWS = (1, 8, 32)


def by_torch(x: np.ndarray, params: Mapping[str, Any]) -> Callable[[], object] | None:
    """What one writes by hand: topk or sort, softmax, cumsum, multinomial."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    rows = torch.from_numpy(x)
    if {"repetition_penalty", "top_n_sigma"} & params.keys():
        return None

    def run() -> object:
        if params.get("temperature") == 0:
            return rows.argmax(-1)
        scores = rows / params.get("temperature", 1.0)
        ids = None
        if k := params.get("top_k"):
            scores, ids = scores.topk(k)
        elif "top_p" in params:
            scores, ids = scores.sort(descending=True)
        p = scores.softmax(-1)
        if m := params.get("min_p"):
            p = p.where(p >= m * p.max(-1, keepdim=True).values, 0.0)
        if "top_p" in params:
            p = p.where(p.cumsum(-1) - p < params["top_p"], 0.0)
        drawn = p.multinomial(1)
        return drawn if ids is None else ids.gather(-1, drawn)

    return run


def by_transformers(x: np.ndarray, params: Mapping[str, Any]) -> Callable[[], object] | None:
    """Its processors, as generate runs them, and its draw."""
    try:
        import torch
        import transformers as hf
    except ImportError:
        return None
    rows, made = torch.from_numpy(x), hf.LogitsProcessorList()
    if params.get("temperature") == 0 or {"frequency_penalty", "top_n_sigma"} & params.keys():
        return None
    kinds = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    made.extend(kind(params[name]) for name, kind in kinds.items() if name in params)
    ids = torch.zeros((len(x), 1), dtype=torch.long)
    return lambda: torch.multinomial(made(ids, rows).softmax(-1), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one vocabulary, one row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case")
    asked = parser.parse_args()
    sizes, counts = ((128_256,), (1,)) if asked.quick else (SIZES, ROWS)
    cases = [(kind, size, 1) for size in sizes for kind in KINDS]
    cases += [("peaked", size, rows) for size in sizes for rows in counts if rows > 1]
    found = []
    for kind, size, rows in cases:
        x = logits(kind, rows, size)
        for chain, params in CHAINS.items():
            contenders = {"numpy max": lambda x=x: x.max(axis=1), "nucleate": ours(x, params)}
            for name, make in (("torch", by_torch), ("transformers", by_transformers)):
                if (run := make(x, params)) is not None:
                    contenders[name] = run
            times = medians(contenders, asked.seconds)
            found.append(dict(logits=kind, vocabulary=size, rows=rows, chain=chain, microseconds=times))
            ratios = " ".join(f"{n} {t:9.1f} us ({t / times['numpy max']:6.1f}x)" for n, t in times.items())
            print(f"{kind:8}{size:>8}{rows:>4}  {chain:44}{ratios}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if asked.markdown:
        asked.markdown.write_text(page(found), "utf-8")


def page(found: list[dict[str, Any]]) -> str:
    """The table of the docs: microseconds, and times NumPy's max, at one row."""
    names = ["numpy max", "nucleate", "torch", "transformers"]
    lines = [
        "# Benchmarks",
        "",
        "Made by `benchmarks/sampler.py`, which says how it measures: medians in microseconds per call, and how many",
        "times NumPy's max over the same logits that is, from one run on one thread of one machine.",
        "",
        "| logits | vocabulary | rows | chain | " + " | ".join(names) + " |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for case in found:
        times = case["microseconds"]
        cells = [f"{times[n]:.0f} ({times[n] / times['numpy max']:.1f}x)" if n in times else "" for n in names]
        lines.append(
            f"| {case['logits']} | {case['vocabulary']} | {case['rows']} | {case['chain']} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
