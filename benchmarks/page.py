"""docs/benchmarks.md from the results: how it was measured, what came out, a plot, tables.

Run: python benchmarks/page.py [RESULTS [FOLDER]] writes the page, and the plot if matplotlib is installed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nucleate.cli.bench import CHAINS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sampler.json"
PEERS = ("llama.cpp", "torch", "Transformers")
CUTS = {"top_k", "top_p", "min_p", "top_n_sigma", "typical_p"}
TARGETS = {"llama.cpp": (5, set(CHAINS)), "Transformers": (50, {c for c in CHAINS if CUTS & CHAINS[c].keys()})}
"""How many times as long as nucleate a peer should take for one row, and in which chains."""

Case = Mapping[str, Any]
Results = Mapping[str, Any]

HOW = """\
# Benchmarks

Made by [`benchmarks/sampler.py`](../benchmarks/sampler.py) from one run of it; do not edit.

{machine}. {versions}.

- Microseconds per row, medians, on one thread. The contenders take turns within each cell, a few calls each, so that
  ratios are of the same moments. *max* is NumPy's max over the same scores, the floor: any sampler reads them once.
- nucleate is called as one uses it, `Sampler(V)(logits)`, which checks the scores, draws, and keeps histories and
  seeds. The peers do less around it. llama.cpp is called through its C functions; the array of candidates, which its
  users fill in for every token, is filled in by a loop in C ({fill}, part of its figures). torch is what one writes by
  hand, with no check. Transformers are its logits processors and torch's draw, without the loop around them.
- An empty cell is a chain that a peer does not have (Transformers searches greedily with torch's argmax), or that would
  take it more than 1.5 seconds.
- A chain is named by its stages in their order, since another order is another distribution; *the same* is the chain
  above. Penalties look back on as many random tokens as the name says.
- *peaked* logits are noise (standard deviation 2.5) with a head that has nine tenths of the chance, *flat* ones are
  noise alone, *shifted* ones are peaked and 50 higher, *ties* are noise rounded to whole numbers.
- Before anything is measured, the tokens of every contender in every chain are checked to have a chance at all."""


def page(results: Results) -> str:
    """The whole page."""
    fill = ", ".join(f"{fill:.0f} µs at V = {size}" for size, fill in results["fill"].items())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [HOW.format(machine=results["machine"], versions=versions, fill=fill or "not measured")]
    parts += ["## In short", summary(results)]
    if missed := misses(results):
        parts += [_folded(f"Where a target is missed: {len(missed) - 2} cells", missed)]
    parts += ["![Microseconds per token by chain, for each contender](benchmarks.svg)"]
    parts += [vocabulary(results, size) for size in _values(results["cases"], "vocabulary")]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """How many times as long as nucleate each peer takes, and in how many cells that reaches its target."""
    lines = _head(["times as long as nucleate", "logits", "cells", "least", "median", "most", "target", "reached in"])
    for peer in PEERS:
        target, chains = TARGETS.get(peer, (0, set()))
        for name, cases in _kinds(results["cases"]).items():
            ratios = [ratio for case in cases if (ratio := _ratio(case, peer))]
            aimed = [ratio for case in cases if _aimed(case, chains) and (ratio := _ratio(case, peer))]
            if ratios:
                numbers = " | ".join(f"{of(ratios):.1f}" for of in (min, statistics.median, max))
                reached = f"{target}x | {sum(r >= target for r in aimed)} of {len(aimed)}" if aimed else " | "
                lines.append(f"| {peer} | {name} | {len(ratios)} | {numbers} | {reached} |")
    parts = ["\n".join(lines), "The targets are about one row; that for Transformers about chains that truncate."]
    if two := results["two threads"]:
        parts.append("\n".join(second_thread(two)))
    return "\n\n".join(parts)


def second_thread(two: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table of what a second thread brings."""
    names = list(next(iter(two.values())))
    return [
        "256 rows on two threads, rows per second as times of those on one, each in its own process; reading alone",
        "is NumPy's max, on as many:",
        "",
        f"| V | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {size} | {' | '.join(f'{1 / by[name]:.2f}' for name in names)} |" for size, by in two.items()),
    ]


def misses(results: Results) -> list[str]:
    """A table of the cells that miss their target."""
    keys = ("chain", "logits", "vocabulary")
    lines = [
        f"| {peer} | {target}x | {' | '.join(str(case[key]) for key in keys)} | {ratio:.1f}x |"
        for peer, (target, chains) in TARGETS.items()
        for case in results["cases"]
        if _aimed(case, chains) and (ratio := _ratio(case, peer)) and ratio < target
    ]
    return [*_head(["", "target", "chain", "logits", "V", "reached"]), *lines] if lines else []


def vocabulary(results: Results, size: int) -> str:
    """The tables of one vocabulary: peaked logits, one row; then all else, folded away."""
    found = {(c["logits"], c["rows"], c["chain"]): c for c in results["cases"] if c["vocabulary"] == size}
    chains = [chain for chain in CHAINS if ("peaked", 1, chain) in found]
    floor = statistics.median(found["peaked", 1, chain]["microseconds"]["numpy max"] for chain in chains)
    lines = _head(["chain", "nucleate, µs", "x max", *(f"{peer}, µs" for peer in PEERS)])
    for chain in chains:
        times = found["peaked", 1, chain]["microseconds"]
        own = times["nucleate"]
        cells = [f"{times[peer]:.0f} ({times[peer] / own:.1f}x)" if peer in times else "" for peer in PEERS]
        lines.append(f"| {chain} | {own:.1f} | {own / times['numpy max']:.1f} | {' | '.join(cells)} |")
    others = [(kind, rows) for kind, rows in dict.fromkeys(key[:2] for key in found) if (kind, rows) != ("peaked", 1)]
    more = _head(["chain", *(kind if rows == 1 else f"{rows} rows" for kind, rows in others)])
    for chain in chains:
        cells = [_short(found[kind, rows, chain]) if (kind, rows, chain) in found else "" for kind, rows in others]
        more.append(f"| {chain} | {' | '.join(cells)} |")
    legend = f"nucleate's microseconds per row: times that of {', '.join(PEERS)}"
    parts = [f"## V = {size}", f"Peaked logits, one row; max takes {floor:.1f} µs.", "\n".join(lines)]
    if others:
        parts.append(_folded(f"Other logits, more rows ({legend})", more))
    return "\n\n".join(parts)


def write(results: Results, folder: Path) -> None:
    """The page and, with matplotlib, the plot."""
    (folder / "benchmarks.md").write_text(page(results), "utf-8")
    try:
        import plot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -c constraints.txt -e '.[bench]')")
    else:
        plot.draw(results, folder / "benchmarks.svg")


def _short(case: Case) -> str:
    own = case["microseconds"]["nucleate"] / case["rows"]
    ratios = [f"{ratio:.0f}x" if (ratio := _ratio(case, peer)) else "-" for peer in PEERS]
    return f"{own:.0f}: {', '.join(ratios)}"


def _kinds(cases: Sequence[Case]) -> dict[str, list[Case]]:
    kinds = {
        "peaked, one row": [c for c in cases if c["rows"] == 1 and c["logits"] == "peaked"],
        "other logits, one row": [c for c in cases if c["rows"] == 1 and c["logits"] != "peaked"],
        "peaked, more rows": [c for c in cases if c["rows"] > 1],
    }
    return {name: found for name, found in kinds.items() if found}


def _aimed(case: Case, chains: set[str]) -> bool:
    return case["rows"] == 1 and case["chain"] in chains


def _ratio(case: Case, peer: str) -> float | None:
    times = case["microseconds"]
    return times[peer] / times["nucleate"] if peer in times else None


def _values(cases: Iterable[Case], name: str) -> list[Any]:
    return list(dict.fromkeys(case[name] for case in cases))


def _head(names: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def _folded(title: str, lines: Sequence[str]) -> str:
    return f"<details><summary>{title}</summary>\n\n" + "\n".join(lines) + "\n\n</details>"


if __name__ == "__main__":
    asked = [Path(argument) for argument in sys.argv[1:]]
    write(json.loads((asked[0] if asked else RESULTS).read_text("utf-8")), asked[1] if asked[1:] else ROOT / "docs")
