"""The result of a comparison: metrics per setting with bootstrap intervals, their trade-off, and its plot.

docs/compare.md defines the metrics; n-grams are over token ids. An undefined metric, as for short texts, is NaN.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError, unknown

Tokens = Sequence[int]

MAX_ORDER = 4
"""BLEU counts n-grams of 1 to this many tokens."""
NO_MATCH = 0.1
"""Matches of an order without any, so that the geometric mean is not 0 (smoothing method 1 of Chen and Cherry 2014)."""


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct(texts: Iterable[Tokens], n: int) -> float:
    """The number of different n-grams of some texts over the number of all (Li et al., arXiv 1510.03055)."""
    found = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else math.nan


def repetition(text: Tokens, n: int) -> float:
    """The part of the n-grams of a text that occurred in it before (seq-rep-n; Welleck et al., arXiv 1908.04319)."""
    return 1.0 - distinct([text], n)


def self_bleu(texts: Sequence[Tokens]) -> float:
    """The mean BLEU-4 of each text with all others as references (Zhu et al., arXiv 1802.01886)."""
    texts = [text for text in texts if text]
    if len(texts) < 2:
        return math.nan
    logs = [0.0] * len(texts)
    for n in range(1, MAX_ORDER + 1):
        counts = [Counter(ngrams(text, n)) for text in texts]
        for i, own in enumerate(counts):
            others = [*counts[:i], *counts[i + 1 :]]
            matches = sum(min(count, max(other.get(gram, 0) for other in others)) for gram, count in own.items())
            logs[i] += math.log((matches or NO_MATCH) / max(own.total(), 1)) / MAX_ORDER
    lengths = sorted(map(len, texts))
    return sum(math.exp(one) * _brevity(len(text), lengths) for one, text in zip(logs, texts, strict=True)) / len(texts)


def _brevity(length: int, lengths: Sequence[int]) -> float:
    """The brevity penalty, by the length of another text that is closest; of two, the shorter one."""
    others = [*lengths]
    others.remove(length)
    closest = min(others, key=lambda other: (abs(other - length), other))
    return 1.0 if length > closest else math.exp(1.0 - closest / length)


RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean, and the bounds of its 95 % interval; NaN if unknown."""

    mean: float
    low: float
    high: float


def estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean over prompts of the mean of each, with a percentile bootstrap over prompts.

    groups: the values of each prompt; a metric of all outputs together has one. NaN values are left out. With a single
    prompt, the bootstrap is over its values.
    """
    known = [[value for value in group if value == value] for group in groups]  # noqa: PLR0124  # not NaN
    means = [float(np.mean(group)) for group in known if group]
    if not means:
        return Estimate(np.nan, np.nan, np.nan)
    mean, units = float(np.mean(means)), means if len(means) > 1 else next(filter(None, known))
    if len(units) < 2:
        return Estimate(mean, np.nan, np.nan)
    index_BU = np.random.default_rng(0).integers(0, len(units), (RESAMPLES, len(units)))  # the same for all settings
    means_B = np.asarray(units)[index_BU].mean(axis=1)
    low, high = np.quantile(means_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))


@dataclass(frozen=True)
class OutputResult:
    """The result of one output."""

    setting: str
    prompt: int  #: its index
    seed: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    ends: int  #: 1 if the last token is an end-of-sequence token
    log_likelihood: float | None  #: the mean per token, of the unmodified model at temperature 1; None without tokens
    entropy: float | None  #: the mean per step, of the unmodified model
    sampled_entropy: float | None  #: the mean of -log of the probability with which each token was sampled

    @property
    def key(self) -> tuple[str, int, int]:
        return self.setting, self.prompt, self.seed


Group = Sequence[OutputResult]
"""The outputs of one setting for one prompt."""


def _texts(group: Group) -> list[Tokens]:
    """The token ids without end-of-sequence tokens."""
    return [one.token_ids[: len(one.token_ids) - one.ends] for one in group]


def _field(name: str, group: Group) -> list[float]:
    return [math.nan if (value := getattr(one, name)) is None else value for one in group]


METRICS: Mapping[str, Callable[[Group], list[float]]] = {
    "distinct_1": lambda group: [distinct(_texts(group), 1)],
    "distinct_2": lambda group: [distinct(_texts(group), 2)],
    "distinct_3": lambda group: [distinct(_texts(group), 3)],
    "self_bleu": lambda group: [self_bleu(_texts(group))],
    "log_likelihood": partial(_field, "log_likelihood"),
    "rep_2": lambda group: [repetition(text, 2) for text in _texts(group)],
    "rep_3": lambda group: [repetition(text, 3) for text in _texts(group)],
    "seq_rep_4": lambda group: [repetition(text, 4) for text in _texts(group)],
    "length": lambda group: [float(len(one.token_ids)) for one in group],
    "entropy": partial(_field, "entropy"),
    "sampled_entropy": partial(_field, "sampled_entropy"),
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

        def gain(own: Mapping[str, Estimate], metric: str) -> float:
            mean = own[metric].mean
            return -math.inf if math.isnan(mean) else -mean if metric in LOWER_IS_BETTER else mean

        points = {name: (gain(own, self.x), gain(own, self.y)) for name, own in self.estimates.items()}
        return {
            name
            for name, (x, y) in points.items()
            if not any((x, y) != other and x <= other[0] and y <= other[1] for other in points.values())
        }

    def __str__(self) -> str:
        best = self.frontier()
        lines = [("setting", *METRICS)]
        lines += [
            (f"{name} *" if name in best else name, *(_cell(own[metric]) for metric in METRICS))
            for name, own in self.estimates.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([one.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for one, *rest in lines]
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
        """Write the trade-off of x and y as PNG, SVG or PDF. Needs matplotlib; raises ParameterError without it.

        The same comparison gives the same SVG file.
        """
        check_plot(path)
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        points = {name: (own[self.x], own[self.y]) for name, own in self.estimates.items()}
        points = {name: (x, y) for name, (x, y) in points.items() if not (math.isnan(x.mean) or math.isnan(y.mean))}
        frontier = self.frontier()
        with mpl.rc_context({"svg.hashsalt": "nucleate", "font.size": 10, "text.color": INK}):
            figure = Figure(figsize=(7.5, 5.0), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            curve = sorted((x.mean, y.mean) for name, (x, y) in points.items() if name in frontier)
            axes.plot(*zip(*curve, strict=True), color=CURVE, lw=1.2, zorder=1) if curve else None
            for name, (x, y) in points.items():
                bars = _bars(y), _bars(x)
                axes.errorbar(x.mean, y.mean, *bars, fmt="o", color=POINT, ms=5, elinewidth=0.8, zorder=2)
                axes.annotate(name, (x.mean, y.mean), xytext=(6, 5), textcoords="offset points", size=8)
            axes.set_xlabel(LABELS.get(self.x, self.x.replace("_", "-")))
            axes.set_ylabel(LABELS.get(self.y, self.y.replace("_", "-")))
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(path, metadata={"Date": None} if Path(path).suffix.lower() == ".svg" else None)


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


def _bars(value: Estimate) -> list[list[float]] | None:
    """The lengths of the error bars, if there is an interval."""
    return None if math.isnan(value.low) else [[value.mean - value.low], [value.high - value.mean]]
