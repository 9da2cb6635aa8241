"""Plots the benchmarks: microseconds per token by pipeline, on a logarithmic scale, one mark per contender."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

SIZE = 128_256
STYLES: Mapping[str, tuple[str, str]] = {
    "nucleate": ("#d55e00", "o"),
    "llama.cpp": ("#0072b2", "s"),
    "torch": ("#009e73", "D"),
    "Transformers": ("#aa4499", "^"),
}
"""Colours that are distinguishable with colour blindness, and marker shapes."""
INK, PALE, FLOOR = "#24292f", "#e4e7eb", "#6e7781"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the plot for peaked logits and one row. Deterministic."""
    cases = [c for c in results["cases"] if (c["vocabulary"], c["rows"], c["logits"]) == (SIZE, 1, "peaked")]
    settings = {"svg.hashsalt": "nucleate", "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(10, 0.36 * len(cases) + 1.9), facecolor="white", layout="constrained")
        for y, case in enumerate(cases):
            chain(axes, y, case["microseconds"])
        floor = statistics.median(case["microseconds"]["numpy max"] for case in cases)
        axes.axvline(floor, color=FLOOR, lw=1.3, ls=(0, (4, 3)), zorder=1)
        axes.text(floor * 1.05, len(cases) - 0.35, f"NumPy's max: {floor:.1f} µs", color=FLOOR, va="center", size=9)
        frame(axes, [case["chain"] for case in cases], floor)
        figure.savefig(path, metadata={"Date": None, "Title": "Microseconds per token by pipeline"})
        plt.close(figure)


def chain(axes: Axes, y: int, times: Mapping[str, float]) -> None:
    """Draw one pipeline: a mark per contender, and nucleate's time as text."""
    found = {name: times[name] for name in STYLES if name in times}
    axes.plot([min(found.values()), max(found.values())], [y, y], color=PALE, lw=5, solid_capstyle="round", zorder=1)
    for name, taken in found.items():
        colour, marker = STYLES[name]
        own = name == "nucleate"
        axes.plot(taken, y, marker, color=colour, ms=9 if own else 7, mec="white", mew=0.8, zorder=4 if own else 3)
    own = found["nucleate"]  # next to the fastest mark, usually nucleate's
    axes.annotate(
        f"{own:.0f}",
        (min(found.values()), y),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=STYLES["nucleate"][0],
        size=9,
        weight="bold",
    )


def frame(axes: Axes, chains: list[str], floor: float) -> None:
    """Draw scales, names and the legend."""
    axes.set_xscale("log")
    axes.set_xlim(left=floor * 0.78, right=axes.get_xlim()[1] * 1.3)
    axes.set_ylim(len(chains), -0.6)
    axes.set_yticks(range(len(chains)), chains)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("microseconds per token, logarithmic: further left is faster", color=INK)
    axes.set_title(
        f"Vocabulary of {SIZE:,} tokens, one row, one thread", loc="left", weight="bold", size=13, color=INK, pad=30
    )
    for name, (colour, marker) in STYLES.items():
        axes.plot([], [], marker, color=colour, ms=8, mec="white", label=name)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False, handletextpad=0.1, columnspacing=1.4
    )
