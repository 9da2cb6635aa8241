"""Writes the measurements in README.md: the table between its two comments, from the stored results.

`python benchmarks/page.py` writes it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- Measurements, from make bench-page -->\n", "<!-- End of the measurements -->\n"


def table() -> str:
    """Return the rows of the table, as Markdown."""
    sampler, engine, gguf = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
        for name in ("sampler", "engine", "gguf")
    )
    lines = ["| on two CPU cores | nucleate | the other | source |", "|---|---|---|---|"]
    for peer, name in (("llama.cpp", "llama.cpp's samplers"), ("Transformers", "Transformers' logits processors")):
        ratios = [
            case["microseconds"][peer] / case["microseconds"]["nucleate"]
            for case in sampler["cases"]
            if peer in case["microseconds"] and case["rows"] == 1 and case["logits"] == "peaked"
        ]
        shown = f"{statistics.median(ratios):.0f} times as long ({min(ratios):.0f} to {max(ratios):.0f})"
        lines.append(f"| time to sample a token, {name} | 1 | {shown} | {_source('sampling-one-token', 'sampler')} |")
    speeds = engine["llama 512 x 8"]["tokens per second"]
    best = max(speed for name, speed in speeds.items() if name.startswith("generate"))
    lines.append(
        "| tokens/s of 64 requests of mixed lengths, small Llama, Transformers' `generate` (its best batch size)"
        f" | {speeds['nucleate']:.0f} | {best:.0f} | {_source('engine-throughput', 'engine')} |"
    )
    own, other = gguf["nucleate, greedy"], gguf["llama.cpp, batched pattern, greedy"]
    for count, what in (("1", "1 sequence"), ("32", "32 sequences")):
        pair = f"{own[count]['tokens_per_second']:.0f} | {other[count]['tokens_per_second']:.0f}"
        lines.append(f"| tokens/s of a GGUF model, {what}, llama.cpp alone | {pair} | {_source('gguf', 'gguf')} |")
    own, other = gguf["nucleate serve"]["32"], gguf["llama_cpp.server"]["32"]
    pair = f"{own['tokens_per_second']:.0f} | {other['tokens_per_second']:.0f}"
    lines.append(f"| the same over HTTP, 32 clients, `llama_cpp.server` | {pair} | {_source('gguf', 'gguf')} |")
    return "\n".join(lines) + "\n"


def _source(anchor: str, results: str) -> str:
    page = "docs/gguf.md#performance" if anchor == "gguf" else f"docs/benchmarks.md#{anchor}"
    return f"[page]({page}), [results](benchmarks/results/{results}.json)"


def with_table(text: str) -> str:
    """Return a text with the table between its two comments."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("README.md does not have the comments around its measurements")
    return before + BEGIN + table() + END + after


def write() -> None:
    """Write the table to README.md."""
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
