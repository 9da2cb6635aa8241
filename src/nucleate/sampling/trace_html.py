"""A trace as a static HTML table for notebooks: style attributes only, no script, colours for light and dark themes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from nucleate.parameters.converters import shown
from nucleate.sampling.trace_step import TraceStep

BARS = 5
"""How many of the likeliest tokens each stage shows."""
COLUMNS = ("Stage", "Kept", "Removed", "Removed mass", "Entropy (nats)", "Likeliest tokens", "Why")
CELL = "padding:0.35em 0.8em;vertical-align:top;border-top:1px solid rgba(128,128,128,0.35);text-align:"
BAR = "display:inline-block;height:0.7em;border-radius:2px;background:#4c8bf5;width:"
LONGEST = 8.0
"""Width of the bar of probability 1, in em."""


def trace_html(steps: Sequence[TraceStep], caption: str, text: Callable[[int], str] = str) -> str:
    """The steps of a trace as HTML. caption: below the table. text: formats a token id. All text is escaped."""
    head = _row("th", (escape(name) for name in COLUMNS))
    body = "".join(_row("td", _cells(step, text)) for step in steps)
    return (
        '<table style="border-collapse:collapse;color:inherit;background:none;font-size:0.9em">'
        '<caption style="caption-side:bottom;text-align:left;padding:0.5em 0.8em;color:inherit">'
        f"{escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    sides = ("left", "right", "right", "right", "right", "left", "left")
    styled = (f'<{tag}{scope} style="{CELL}{side}">{cell}</{tag}>' for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{''.join(styled)}</tr>"


def _cells(step: TraceStep, text: Callable[[int], str]) -> tuple[str, ...]:
    """The cells of one stage."""
    name = step.name if step.stage is None else shown(step.stage)
    removed = len(step.removed)
    return (
        f"<code>{escape(name)}</code>",
        f"{step.left:,}",
        f"{removed:,}" if removed else "",
        percent(step.removed_probability) if removed else "",
        f"{step.entropy:.4f}",
        "".join(_bar(text(token), step.probabilities[token]) for token in step.most_likely(BARS)),
        escape(step.why),
    )


def _bar(name: str, p: float) -> str:
    """One line: a bar, the probability and the token."""
    return (
        f'<div style="white-space:nowrap"><span aria-hidden="true" style="display:inline-block;width:{LONGEST}em">'
        f'<span style="{BAR}{max(p * LONGEST, 0.1):.2f}em"></span></span> '
        f'<span style="display:inline-block;width:5em;text-align:right">{percent(p)}</span> '
        f"<code>{escape(name)}</code></div>"
    )


def percent(p: float) -> str:
    """A probability in per cent; a small one is not shown as 0."""
    return f"{p:.2%}" if p >= 0.0001 or p == 0 else f"{100 * p:.0e}%"
