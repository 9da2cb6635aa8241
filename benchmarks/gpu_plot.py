"""Plots the GPU results: time as a multiple of the floor by number of rows, one panel per pipeline.

Run: python benchmarks/gpu_plot.py benchmarks/results/gpu.csv benchmarks/results/gpu.svg
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SIZE = 128_256
STYLES: Mapping[str, tuple[str, str]] = {
    "nucleate": ("#d55e00", "o"),
    "one read (amax)": ("#6e7781", "x"),
    "torch": ("#009e73", "D"),
    "FlashInfer": ("#0072b2", "s"),
    "vLLM Triton": ("#aa4499", "^"),
}
"""Colours that are distinguishable with colour blindness, and marker shapes."""
Line = Mapping[str, Any]


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write the plot for one vocabulary size. Deterministic."""
    shown = [line for line in lines if int(line["vocabulary"]) == SIZE and line.get("floor")]
    chains = list(dict.fromkeys(line["chain"] for line in shown))
    settings = {"svg.hashsalt": "nucleate", "font.family": "DejaVu Sans", "font.size": 9}
    with mpl.rc_context(settings):
        across = max(1, min(4, len(chains)))
        down = max(1, -(-len(chains) // across))
        size = 3.1 * across, 2.6 * down + 0.6
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, sharex=True, sharey=True)
        figure.set_layout_engine("constrained")
        for axes in grid.flat[len(chains) :]:
            axes.set_visible(False)
        for axes, chain in zip(grid.flat, chains, strict=False):
            panel(axes, chain, [line for line in shown if line["chain"] == chain])
        handles = {
            label: mark for axes in grid.flat for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, frameon=False)
        device = shown[0]["device"] if shown else ""
        figure.suptitle(f"{device}, {SIZE} logits a row, cold: times the floor (one read of the logits), by rows")
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": "Times the floor by rows"})
        plt.close(figure)


def panel(axes: Axes, chain: str, lines: Sequence[Line]) -> None:
    """Draw the panel of one pipeline."""
    axes.set_title(chain, size=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1.0, color="#24292f", lw=0.8, ls=(0, (4, 3)))
    axes.grid(color="#e4e7eb", lw=0.6)
    for name, (colour, marker) in STYLES.items():
        own = sorted(
            (int(one["rows"]), float(one["cold"]) / float(one["floor"])) for one in lines if one["contender"] == name
        )
        if own:
            axes.plot(*zip(*own, strict=True), marker=marker, color=colour, ms=5, lw=1.2, label=name)


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8", newline="") as file:
        draw(list(csv.DictReader(file)), Path(sys.argv[2]))
