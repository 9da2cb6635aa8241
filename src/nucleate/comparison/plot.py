"""Plots the trade-off of two metrics: one point with its intervals per setting, and the curve of the best ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from nucleate.comparison.intervals import Estimate
from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError

FORMATS = (".png", ".svg", ".pdf")
LABELS: Mapping[str, str] = {
    "log_likelihood": "mean log-likelihood per token at T = 1 (nats)",
    "entropy": "entropy per step of the model (nats)",
    "sampled_entropy": "entropy per step of the sampled distribution (nats)",
    "length": "length (tokens)",
    "self_bleu": "self-BLEU",
}
POINT, CURVE, INK = "#0072b2", "#d55e00", "#24292f"


def check_plot(path: str | Path) -> None:
    """Raise ParameterError for an unknown file type, and without matplotlib."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ParameterError("plot", f"plot must be a file name that ends with {', '.join(FORMATS)}, got {str(path)!r}")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        why = "plot needs matplotlib, which is not installed"
        raise ParameterError("plot", f"{why}: {install_extra('plot')}, or write a CSV file") from None


def draw(points: Mapping[str, Mapping[str, Estimate]], frontier: Collection[str], x: str, y: str, path: Path) -> None:
    """Write the plot. points: the estimates of each setting. frontier: the settings on the curve. x, y: metrics.

    The same arguments give the same SVG file.
    """
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [name for name, own in points.items() if not (math.isnan(own[x].mean) or math.isnan(own[y].mean))]
    with mpl.rc_context({"svg.hashsalt": "nucleate", "font.size": 10, "text.color": INK}):
        figure = Figure(figsize=(7.5, 5.0), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        curve = sorted((points[name][x].mean, points[name][y].mean) for name in known if name in frontier)
        axes.plot(*zip(*curve, strict=True), color=CURVE, lw=1.2, zorder=1) if curve else None
        for name in known:
            own = points[name]
            bars = _bars(own[y]), _bars(own[x])
            axes.errorbar(own[x].mean, own[y].mean, *bars, fmt="o", color=POINT, ms=5, elinewidth=0.8, zorder=2)
            axes.annotate(name, (own[x].mean, own[y].mean), xytext=(6, 5), textcoords="offset points", size=8)
        axes.set_xlabel(LABELS.get(x, x.replace("_", "-")))
        axes.set_ylabel(LABELS.get(y, y.replace("_", "-")))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _bars(value: Estimate) -> list[list[float]] | None:
    """The lengths of the error bars, if there is an interval."""
    return None if math.isnan(value.low) else [[value.mean - value.low], [value.high - value.mean]]
