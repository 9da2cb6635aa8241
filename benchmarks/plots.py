"""Plots the stored benchmark results as SVG files: one per question of docs/benchmarks.md. Deterministic.

Needs matplotlib (the extra ``plot``). Colours are distinguishable with colour blindness. The background is white, so
that the plots are readable on light and dark pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from page import sequences, size_of

Results = Mapping[str, Any]

STYLES: Mapping[str, tuple[str, str]] = {
    "nucleate": ("#d55e00", "o"),
    "llama.cpp": ("#0072b2", "s"),
    "torch": ("#009e73", "D"),
    "Transformers": ("#aa4499", "^"),
    "numpy max": ("#6e7781", "x"),
}
"""Colour and marker of each sampler."""
METHODS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#aa4499", "#009e73", "#6e7781")
INK, PALE = "#24292f", "#e4e7eb"
SETTINGS = {"svg.hashsalt": "nucleate", "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK}
GROWING = "T .7, top_p .9"
PENALIZED = {
    0: "top_k 40, top_p .95, min_p .05, T .8",
    64: "repetition over 64, the same",
    1024: "repetition over 1024, the same",
}
"""Pipelines that differ in the number of tokens that the penalty counts."""


def write(sampler: Results, engine: Results, gguf: Results, speculation: Results, folder: Path) -> None:
    """Write all plots to a folder."""
    with mpl.rc_context(SETTINGS):
        _save(_cost(sampler), folder / "benchmarks-cost.svg", "Microseconds per token by pipeline")
        _save(_growth(sampler), folder / "benchmarks-growth.svg", "Microseconds per token by size")
        _save(_throughput(engine, gguf), folder / "benchmarks-engine.svg", "Tokens per second")
        _save(_speculation(speculation), folder / "benchmarks-speculation.svg", "Speedup by speculative decoding")


def chosen(sampler: Results, **wanted: Any) -> list[Results]:
    """The cases with these values, in the order of the results."""
    return [case for case in sampler["cases"] if all(case[name] == value for name, value in wanted.items())]


def cases_of(engine: Results) -> list[str]:
    """The models of the engine's results."""
    return [name for name, value in engine.items() if isinstance(value, Mapping) and "tokens per second" in value]


def workloads_of(speculation: Results) -> list[str]:
    """The workloads of the results of speculation."""
    return [name for name, value in speculation.items() if isinstance(value, Mapping) and "plain" in value]


def _cost(sampler: Results) -> Any:
    size = size_of(sampler)
    cases = chosen(sampler, vocabulary=size, rows=1, logits="peaked")
    figure, axes = plt.subplots(figsize=(10, 0.36 * len(cases) + 1.9), facecolor="white", layout="constrained")
    for y, case in enumerate(cases):
        found = {name: case["microseconds"][name] for name in STYLES if name in case["microseconds"]}
        del found["numpy max"]
        axes.plot([min(found.values()), max(found.values())], [y, y], color=PALE, lw=5, solid_capstyle="round")
        for name, taken in found.items():
            _mark(axes, taken, y, name)
        place = (min(found.values()), y)  # next to the fastest mark, usually nucleate's
        style: dict[str, Any] = dict(color=STYLES["nucleate"][0], size=9, weight="bold", ha="right", va="center")
        axes.annotate(f"{found['nucleate']:.0f}", place, xytext=(-8, 0), textcoords="offset points", **style)
    floor = statistics.median(case["microseconds"]["numpy max"] for case in cases)
    axes.axvline(floor, color=STYLES["numpy max"][0], lw=1.3, ls=(0, (4, 3)), zorder=1)
    axes.text(floor * 1.05, len(cases) - 0.35, f"NumPy's max: {floor:.1f} µs", color="#6e7781", va="center", size=9)
    _frame(axes, f"Vocabulary of {size:,} tokens, peaked logits, one row, one thread")
    axes.set_xscale("log")
    axes.set_xlim(left=floor * 0.78, right=axes.get_xlim()[1] * 1.3)
    axes.set_ylim(len(cases), -0.6)
    axes.set_yticks(range(len(cases)), [case["chain"] for case in cases])
    axes.grid(axis="x", color=PALE, lw=0.8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("microseconds per token, logarithmic: further left is faster", color=INK)
    _legend(axes, list(STYLES)[:4])
    return figure


def _growth(sampler: Results) -> Any:
    size = size_of(sampler)
    panels: list[tuple[str, str, dict[int, Results]]] = [
        (
            f"Vocabulary ({GROWING})",
            "tokens in the vocabulary",
            {case["vocabulary"]: case for case in chosen(sampler, rows=1, logits="peaked", chain=GROWING)},
        ),
        (
            f"Rows ({GROWING})",
            "rows per call",
            {case["rows"]: case for case in chosen(sampler, vocabulary=size, logits="peaked", chain=GROWING)},
        ),
        (
            "History (llama.cpp's order, repetition)",
            "tokens that the penalty counts",
            {
                length: case
                for length, chain in PENALIZED.items()
                for case in chosen(sampler, vocabulary=size, rows=1, logits="peaked", chain=chain)
            },
        ),
    ]
    figure, all_axes = plt.subplots(1, 3, figsize=(12, 4.2), facecolor="white", layout="constrained", sharey=True)
    for axes, (title, label, cases) in zip(all_axes, panels, strict=True):
        places = list(cases) if 0 not in cases else list(range(len(cases)))
        for name, (colour, marker) in STYLES.items():
            points = [
                (place, case["microseconds"][name] / case["rows"])
                for place, case in zip(places, cases.values(), strict=True)
                if name in case["microseconds"]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, color=colour, lw=1.8, ms=6, label=name)
        _frame(axes, title)
        if 0 not in cases:
            axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        labels = [f"{value / 1000:.0f}k" if value >= 10_000 else f"{value:,}" for value in cases]
        axes.set_xticklabels(["" if label == "152k" else label for label in labels])  # too close to 128k
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color=PALE, lw=0.8)
        axes.set_xlabel(label, color=INK)
    all_axes[0].set_ylabel("microseconds per row, logarithmic", color=INK)
    _legend(all_axes[0], list(STYLES))
    return figure


def _throughput(engine: Results, gguf: Results) -> Any:
    names = cases_of(engine)
    figure, all_axes = plt.subplots(
        1, len(names) + 1, figsize=(4 * len(names) + 4, 3.8), facecolor="white", layout="constrained"
    )
    for axes, name in zip(all_axes, names, strict=False):
        speeds = engine[name]["tokens per second"]
        colours = [STYLES["nucleate" if each.startswith("nucleate") else "Transformers"][0] for each in speeds]
        axes.barh(range(len(speeds)), list(speeds.values()), color=colours, height=0.65)
        for y, speed in enumerate(speeds.values()):
            axes.text(speed, y, f" {speed:,.0f}", va="center", size=9, color=INK)
        _frame(axes, {"embedded": "Embedded model, NumPy"}.get(name, f"Random {name}, torch".replace("llama", "Llama")))
        axes.set_xlim(right=max(speeds.values()) * 1.2)
        axes.set_yticks(range(len(speeds)), list(speeds))
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second", color=INK)
    axes = all_axes[-1]
    lines = {
        "nucleate": ("nucleate, greedy", "nucleate", "-"),
        "llama.cpp's example batched": ("llama.cpp, batched pattern, greedy", "llama.cpp", "-"),
        "nucleate serve": ("nucleate serve", "nucleate", "--"),
        "llama_cpp.server": ("llama_cpp.server", "llama.cpp", "--"),
    }
    for label, (name, style, dashes) in lines.items():
        points = {int(count): each["tokens_per_second"] for count, each in gguf[name].items()}
        colour, marker = STYLES[style]
        places = range(len(points))
        axes.plot(places, list(points.values()), dashes, marker=marker, color=colour, lw=1.8, ms=6, label=label)
        axes.set_xticks(places, [str(count) for count in points])
    _frame(axes, "GGUF model, llama.cpp")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.45)
    axes.set_xlabel("sequences or clients at once", color=INK)
    axes.set_ylabel("tokens per second", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _speculation(speculation: Results) -> Any:
    workloads = workloads_of(speculation)
    methods = [name for name in speculation[workloads[0]] if name != "plain"]
    figure, axes = plt.subplots(figsize=(10, 5.4), facecolor="white", layout="constrained")
    for y, workload in enumerate(workloads):
        ratios = [speculation[workload][method]["ratio"] for method in methods]
        axes.plot([min(*ratios, 1), max(*ratios, 1)], [y, y], color=PALE, lw=5, solid_capstyle="round", zorder=1)
    for index, method in enumerate(methods):
        ratios = [speculation[workload][method]["ratio"] for workload in workloads]
        colour, marker = METHODS[index], "osD^vPX"[index]
        style: dict[str, Any] = dict(color=colour, ms=8, mec="white", mew=0.8, ls="none", zorder=3)
        axes.plot(ratios, range(len(workloads)), marker=marker, label=method, **style)
    axes.axvline(1, color=INK, lw=1)
    _frame(axes, "Embedded model: speed relative to no speculation")
    axes.set_yticks(range(len(workloads)), [sequences(workload) for workload in workloads])
    axes.invert_yaxis()
    axes.grid(axis="x", color=PALE, lw=0.8)
    axes.set_xlabel("times as fast as without speculation", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _mark(axes: Axes, x: float, y: float, name: str) -> None:
    colour, marker = STYLES[name]
    own = name == "nucleate"
    axes.plot(x, y, marker, color=colour, ms=9 if own else 7, mec="white", mew=0.8, zorder=4 if own else 3)


def _frame(axes: Axes, title: str) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", weight="bold", size=11, color=INK, pad=26 if "thread" in title else 8)


def _legend(axes: Axes, names: Sequence[str]) -> None:
    handles = [
        axes.plot([], [], STYLES[name][1], color=STYLES[name][0], ms=8, mew=1 if name == "numpy max" else 0)[0]
        for name in names
    ]
    if len(names) == len(STYLES):
        axes.legend(handles, names, frameon=False, fontsize=9, loc="upper left")
        axes.set_ylim(top=axes.get_ylim()[1] * 30)
    else:
        place: dict[str, Any] = dict(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, handletextpad=0.1)
        axes.legend(handles, names, frameon=False, columnspacing=1.4, **place)


def _save(figure: Any, path: Path, title: str) -> None:
    figure.savefig(path, metadata={"Date": None, "Title": title})
    plt.close(figure)
