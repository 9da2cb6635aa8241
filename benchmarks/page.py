"""Generates docs/benchmarks.md from the stored results: one plot and a short table per question.

Run: python benchmarks/page.py. It writes the page, the plots (if matplotlib is installed) and the table of README.md.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nucleate.cli.bench import CHAINS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sampler.json"
PEERS = ("llama.cpp", "torch", "Transformers")
CUTS = {"top_k", "top_p", "min_p", "top_n_sigma", "typical_p"}
TARGETS = {"llama.cpp": (5, set(CHAINS)), "Transformers": (50, {c for c in CHAINS if CUTS & CHAINS[c].keys()})}
"""Target ratios for one row (time of the peer / time of nucleate), and the pipelines that they apply to."""
SHOWN = ("greedy", "T .8", "T .8, top_k 40, min_p .05, top_p .95", "T .7, top_p .9", "top_k 1000", "mirostat v2")
"""Pipelines in the tables; the plot has all of them."""

Case = Mapping[str, Any]
Results = Mapping[str, Any]

TEMPLATE = ROOT / "benchmarks" / "page_template.txt"
ESTIMATED = {"sampler": 350, "engine": 270, "speculation": 220}
"""Seconds that `make bench-page` takes on two idle cores, for results that do not have their own."""


def page(sampler: Results) -> str:
    """Return the whole page. The results of the other benchmarks are read from their files."""
    engine, speculation = stored("engine"), stored("speculation")
    parts = {
        "minutes": round(sum(stored(name).get("seconds", ESTIMATED[name]) for name in ESTIMATED) / 60),
        "size": size_of(sampler),
        "longest": sampler.get("longest", 1.5),
        "fill": ", ".join(f"{fill:.0f} µs at V = {size}" for size, fill in sampler["fill"].items()) or "not measured",
        "cost": cost(sampler),
        "summary": summary(sampler),
        "missed": missed(sampler),
        "growth": growth(sampler),
        "threads": second_thread(sampler["two threads"]),
        "throughput": throughput(engine),
        "speculation": speedups(speculation),
        "sampler_machine": _machine(sampler),
        "engine_machine": _machine(engine),
        "speculation_machine": _machine(speculation),
    }
    return re.sub(r"\n{3,}", "\n\n", TEMPLATE.read_text("utf-8").format(**parts))


def stored(name: str) -> Results:
    """The stored results of a benchmark."""
    found: Results = json.loads((RESULTS.parent / f"{name}.json").read_text("utf-8"))
    return found


def cost(sampler: Results) -> str:
    """Return the table of the time per token."""
    lines = _head(["pipeline", "nucleate, µs", "times max", *(f"{peer}, µs" for peer in PEERS)])
    for case in _chosen(sampler, size_of(sampler)):
        times, own = case["microseconds"], case["microseconds"]["nucleate"]
        if case["chain"] in SHOWN:
            cells = [f"{times[peer]:.0f} ({times[peer] / own:.1f}x)" if peer in times else "" for peer in PEERS]
            lines.append(f"| {case['chain']} | {own:.1f} | {own / times['numpy max']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(sampler: Results) -> str:
    """Return a table of each peer's time as a multiple of nucleate's, and of the cells that reach the target."""
    names = ["time / nucleate's time", "logits", "cells", "minimum", "median", "maximum", "target", "reached by"]
    lines = _head(names)
    for peer in PEERS:
        target, chains = TARGETS.get(peer, (0, set()))
        for name, cases in _kinds(sampler["cases"]).items():
            ratios = [ratio for case in cases if (ratio := _ratio(case, peer))]
            compared = [ratio for case in cases if _has_target(case, chains) and (ratio := _ratio(case, peer))]
            if ratios:
                numbers = " | ".join(f"{of(ratios):.1f}" for of in (min, statistics.median, max))
                reached = f"{target}x | {sum(r >= target for r in compared)} of {len(compared)}" if compared else " | "
                lines.append(f"| {peer} | {name} | {len(ratios)} | {numbers} | {reached} |")
    return "\n".join(lines)


def misses(sampler: Results) -> list[str]:
    """Return a table of the cells that miss their target."""
    keys = ("chain", "logits", "vocabulary")
    lines = [
        f"| {peer} | {target}x | {' | '.join(str(case[key]) for key in keys)} | {ratio:.1f}x |"
        for peer, (target, chains) in TARGETS.items()
        for case in sampler["cases"]
        if _has_target(case, chains) and (ratio := _ratio(case, peer)) and ratio < target
    ]
    return [*_head(["sampler", "target", "pipeline", "logits", "V", "ratio"]), *lines] if lines else []


def missed(sampler: Results) -> str:
    """Return a sentence with the number of cells that miss their target, by pipeline."""
    counts = Counter(line.split(" | ")[2] for line in misses(sampler)[2:])
    shown = "; ".join(f"{chain} ({count})" for chain, count in counts.most_common())
    return f"Cells that missed their target, by pipeline: {shown}." if shown else ""


def growth(sampler: Results) -> str:
    """Return the table of nucleate's time by vocabulary and rows."""
    size = size_of(sampler)
    columns = [(each, 1) for each in dict.fromkeys(case["vocabulary"] for case in sampler["cases"])]
    counts = dict.fromkeys(case["rows"] for case in sampler["cases"] if case["vocabulary"] == size)
    columns += [(size, count) for count in counts if count > 1]
    lines = _head(
        ["nucleate, µs per row", *(f"{rows} rows" if rows > 1 else f"V = {each:,}" for each, rows in columns)]
    )
    for chain in SHOWN:
        found = [_chosen(sampler, *column, chain) for column in columns]
        cells = [f"{cases[0]['microseconds']['nucleate'] / cases[0]['rows']:.1f}" if cases else "" for cases in found]
        if any(cells):
            lines.append(f"| {chain} | {' | '.join(cells)} |")
    return "\n".join(lines)


def second_thread(two: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the speedup by a second thread."""
    if not two:
        return ""
    names = list(next(iter(two.values())))
    lines = [
        "Throughput (rows per second) of 256 rows on two threads, as a multiple of one thread. Each is measured in",
        "its own process. *reading alone* is NumPy's max on the same number of threads.",
        "",
        *_head(["V", *names]),
        *(f"| {int(size):,} | {' | '.join(f'{1 / by[name]:.2f}' for name in names)} |" for size, by in two.items()),
    ]
    return "\n".join(lines)


def throughput(engine: Results) -> str:
    """Return the table of the engine's tokens per second, and its overhead."""
    models = [name for name, value in engine.items() if isinstance(value, Mapping) and "tokens per second" in value]
    lines = _head(["tokens per second", *models])
    for name in engine[models[0]]["tokens per second"]:
        cells = [f"{engine[model]['tokens per second'][name]:.0f}" for model in models]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for kind in engine[models[0]]["outside the forward"]:
        found = [engine[model]["outside the forward"][kind] for model in models]
        cells = [f"{each['microseconds per token']:.0f} µs, {each['share']:.0%}" for each in found]
        lines.append(f"| engine overhead per token, 32 sequences, {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speedups(speculation: Results) -> str:
    """Return the table of speedups and acceptance lengths, by workload and method."""
    workloads = {name: found for name, found in speculation.items() if isinstance(found, Mapping) and "plain" in found}
    methods = [name for name in next(iter(workloads.values())) if name != "plain"]
    lines = _head(["speedup (mean acceptance length)", *methods])
    for name, found in workloads.items():
        cells = [f"{found[method]['ratio']:.2f} ({found[method]['tau']:.1f})" for method in methods]
        lines.append(f"| {sequences(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sequences(workload: str) -> str:
    """The name of a workload of the results of speculation, as pages show it."""
    return workload.replace("1 at once", "1 sequence").replace("at once", "sequences")


def size_of(sampler: Results) -> int:
    """The vocabulary size of tables of one size: 128,256 if it was measured."""
    sizes = [case["vocabulary"] for case in sampler["cases"]]
    return 128_256 if 128_256 in sizes else int(sizes[0])


def write(sampler: Results) -> None:
    """Write the page and the table of README.md and, with matplotlib, the plots."""
    import readme_table

    (ROOT / "docs" / "benchmarks.md").write_text(page(sampler), "utf-8")
    readme_table.write()
    try:
        import plots
    except ImportError:
        print("no plots: matplotlib is not installed (pip install -c constraints.txt -e '.[plot]')", file=sys.stderr)
    else:
        plots.write(sampler, stored("engine"), stored("gguf"), stored("speculation"), ROOT / "docs" / "pictures")


def _chosen(sampler: Results, size: int, rows: int = 1, chain: str | None = None) -> list[Case]:
    """The cases of peaked logits with this size, by pipeline."""
    cases = [case for case in sampler["cases"] if (case["vocabulary"], case["rows"]) == (size, rows)]
    return [case for case in cases if case["logits"] == "peaked" and chain in (None, case["chain"])]


def _machine(results: Results) -> str:
    """The machine and the versions of results."""
    versions = ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items())
    found = "; ".join(filter(None, [results["machine"], versions, results.get("note")]))
    return f"{found}."


def _kinds(cases: Sequence[Case]) -> dict[str, list[Case]]:
    kinds = {
        "peaked, one row": [c for c in cases if c["rows"] == 1 and c["logits"] == "peaked"],
        "other logits, one row": [c for c in cases if c["rows"] == 1 and c["logits"] != "peaked"],
        "peaked, more rows": [c for c in cases if c["rows"] > 1],
    }
    return {name: found for name, found in kinds.items() if found}


def _has_target(case: Case, chains: set[str]) -> bool:
    return case["rows"] == 1 and case["chain"] in chains


def _ratio(case: Case, peer: str) -> float | None:
    times = case["microseconds"]
    return times[peer] / times["nucleate"] if peer in times else None


def _head(names: Iterable[str]) -> list[str]:
    names = list(names)
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


if __name__ == "__main__":
    write(stored("sampler"))
