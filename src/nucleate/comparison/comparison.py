"""The result of a comparison: metrics per setting with intervals, their trade-off, and its plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nucleate.comparison import metrics
from nucleate.comparison.metrics import Estimate, estimate
from nucleate.comparison.results_file import OutputResult
from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError, unknown

Group = Sequence[OutputResult]
"""The outputs of one setting for one prompt."""


def _texts(group: Group) -> list[tuple[int, ...]]:
    """The token ids without end-of-sequence tokens."""
    return [one.token_ids[: len(one.token_ids) - one.ends] for one in group]


def _together(metric: Callable[[list[tuple[int, ...]]], float]) -> Callable[[Group], list[float]]:
    return lambda group: [metric(_texts(group))]


def _each(metric: Callable[[tuple[int, ...]], float]) -> Callable[[Group], list[float]]:
    return lambda group: [metric(text) for text in _texts(group)]


def _field(name: str) -> Callable[[Group], list[float]]:
    def values(group: Group) -> list[float]:
        return [math.nan if (value := getattr(one, name)) is None else value for one in group]

    return values


METRICS: Mapping[str, Callable[[Group], list[float]]] = {
    "distinct_1": _together(lambda texts: metrics.distinct(texts, 1)),
    "distinct_2": _together(lambda texts: metrics.distinct(texts, 2)),
    "distinct_3": _together(lambda texts: metrics.distinct(texts, 3)),
    "self_bleu": _together(metrics.self_bleu),
    "log_likelihood": _field("log_likelihood"),
    "rep_2": _each(lambda text: metrics.repetition(text, 2)),
    "rep_3": _each(lambda text: metrics.repetition(text, 3)),
    "seq_rep_4": _each(lambda text: metrics.repetition(text, 4)),
    "length": lambda group: [float(len(one.token_ids)) for one in group],
    "entropy": _field("entropy"),
    "sampled_entropy": _field("sampled_entropy"),
}
"""The metrics: the values of the outputs for one prompt."""
LOWER_IS_BETTER = {"self_bleu", "rep_2", "rep_3", "seq_rep_4"}
QUALITY, DIVERSITY = "log_likelihood", "distinct_2"
"""The axes of the trade-off by default."""


@dataclass(frozen=True)
class Comparison:
    """The metrics of all settings: ``estimates[setting][metric]``. Print it, or use ``to_csv`` and ``plot``."""

    estimates: Mapping[str, Mapping[str, Estimate]]
    results: tuple[OutputResult, ...]  #: all outputs
    x: str = QUALITY  #: the horizontal axis of the trade-off
    y: str = DIVERSITY

    def __post_init__(self) -> None:
        check_metrics(self.x, self.y)

    @classmethod
    def from_results(cls, settings: Sequence[str], results: Sequence[OutputResult], x: str, y: str) -> Comparison:
        """Compute the metrics of results. x, y: the metrics of the trade-off curve."""
        found = {}
        for name in settings:
            groups: dict[int, list[OutputResult]] = {}
            for one in results:
                if one.setting == name:
                    groups.setdefault(one.prompt, []).append(one)
            found[name] = {metric: estimate([*map(values, groups.values())]) for metric, values in METRICS.items()}
        return cls(found, tuple(results), x, y)

    def frontier(self) -> set[str]:
        """The settings on the trade-off curve: no other one is at least as good in x and y, and better in one."""
        points = {name: tuple(self._gain(name, metric) for metric in (self.x, self.y)) for name in self.estimates}
        return {
            name
            for name, own in points.items()
            if not any(
                own != other and all(a <= b for a, b in zip(own, other, strict=True)) for other in points.values()
            )
        }

    def _gain(self, name: str, metric: str) -> float:
        """The mean of a metric, negative if lower is better."""
        mean = self.estimates[name][metric].mean
        if math.isnan(mean):
            return -math.inf
        return -mean if metric in LOWER_IS_BETTER else mean

    def __str__(self) -> str:
        best = self.frontier()
        lines = [("setting", *METRICS)]
        lines += [
            (f"{name} *" if name in best else name, *(_cell(own[metric]) for metric in METRICS))
            for name, own in self.estimates.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        return "\n".join([*table, f"* on the trade-off curve of {self.x} and {self.y}"])

    def __repr__(self) -> str:  # what an interactive session shows
        return str(self)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per setting: each metric, and the bounds of its interval (``NAME_low``, ``NAME_high``)."""
        best = self.frontier()
        for name, own in self.estimates.items():
            row: dict[str, Any] = {"setting": name, "outputs": sum(one.setting == name for one in self.results)}
            row["on_curve"] = name in best
            for metric, (mean, low, high) in own.items():
                values = {metric: mean, f"{metric}_low": low, f"{metric}_high": high}
                row |= {column: None if math.isnan(value) else value for column, value in values.items()}
            yield row

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to a CSV file."""
        rows = [*self.rows()]
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)

    def plot(self, path: str | Path) -> None:
        """Write the trade-off of x and y as PNG, SVG or PDF. Needs matplotlib; raises ParameterError without it."""
        from nucleate.comparison.comparison import draw

        draw(self.estimates, self.frontier(), self.x, self.y, Path(path))


def check_metrics(*names: str) -> None:
    """Raise ParameterError for an unknown metric."""
    for name in names:
        if name not in METRICS:
            raise unknown(name, METRICS, "metric")


def _cell(value: Estimate) -> str:
    """A mean, and half the width of its interval."""
    if math.isnan(value.mean):
        return "-"
    half = "" if math.isnan(value.low) else f"±{(value.high - value.low) / 2:.2g}"
    return f"{value.mean:.3g}{half}"


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
