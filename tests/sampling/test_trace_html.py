"""The table of a trace for notebooks: well-formed, complete, without script, and with all text escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling.stage import Floor, RowStats
from nucleate.sampling.stages import Gumbel, Suppress
from nucleate.sampling.trace import percent, trace_html

PARAMS = nc.SamplingParams(seed=3, temperature=0.8, top_k=20, top_p=0.9, logit_bias={3: 5.0})


class Table(HTMLParser):
    """The tags and the text of each cell; fails if a tag is not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.cells: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data


def test_the_table_has_the_numbers_of_each_step() -> None:
    trace = nc.trace(np.random.default_rng(1).normal(size=500) * 3, PARAMS)
    table = Table(trace._repr_html_())
    head, *rows = table.cells
    assert head == ["Stage", "Kept", "Removed", "Removed mass", "Entropy (nats)", "Likeliest tokens", "Why"]
    assert len(rows) == len(trace.steps) == 6
    for row, step in zip(rows, trace.steps, strict=True):
        assert row[0] == ("logits" if step.stage is None else repr(step.stage))
        assert row[1:5] == [
            f"{step.left:,}",
            f"{len(step.removed):,}" if len(step.removed) else "",
            percent(step.removed_probability) if len(step.removed) else "",
            f"{step.entropy:.4f}",
        ]
        bars = [[percent(step.probabilities[i]), str(i)] for i in step.most_likely(5)]
        assert row[5].split() == [word for bar in bars for word in bar]
        assert row[6] == step.why
    assert f"token {trace.token_id} (seed 3, step 0)</caption>" in trace._repr_html_()


def test_there_is_no_script_no_class_and_no_address() -> None:
    table = Table(nc.trace(np.zeros(50), PARAMS)._repr_html_())
    assert set(table.tags) <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div", "span", "code"}
    assert table.attributes == {"style", "scope", "aria-hidden"}


def test_all_text_is_escaped() -> None:
    class Evil(Floor):
        def floor(self, row: RowStats) -> float:
            return -1.0

        def __repr__(self) -> str:
            return "<img src=x onerror=alert(1)>"

    trace = nc.trace([0.0, 1.0], (Evil(), Gumbel(1)))
    html = trace_html(trace.steps, "<script>1</script>", lambda token: f"</code><b>{token}&amp;")
    table = Table(html)
    assert not {"img", "script", "b"} & set(table.tags)
    assert table.cells[2][0] == "<img src=x onerror=alert(1)>"
    assert "</code><b>1&amp;" in table.cells[1][5]


def test_bars_are_as_long_as_the_probability() -> None:
    html = nc.trace(np.log([0.75, 0.25]), (Gumbel(1),))._repr_html_()
    widths = [float(width) for width in re.findall(r"#4c8bf5;width:([\d.]+)em", html)]
    assert widths == [6.0, 2.0, 8.0]


def test_an_error_is_shown_with_the_steps_before_it() -> None:
    html = nc.trace([0.0, 1.0], (Suppress((0, 1)), Gumbel(1)))._repr_html_()
    assert "error: every token is at -inf after suppress" in html
    assert len(Table(html).cells) == 2
    assert "error: NaN at token 0" in nc.trace([np.nan, 1.0], ())._repr_html_()


@pytest.mark.parametrize(("p", "text"), [(0.5, "50.00%"), (1.0, "100.00%"), (0.0, "0.00%"), (3e-7, "3e-05%")])
def test_small_probabilities_are_not_shown_as_zero(p: float, text: str) -> None:
    assert percent(p) == text
