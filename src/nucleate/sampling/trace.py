"""trace: shows the effect of every stage on rows of logits, with the reason; as text, or as a table for notebooks.

The table is static HTML: style attributes only, no script, colours for light and dark themes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import compiled
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.sampling import noise, reference
from nucleate.sampling.functional import Batch
from nucleate.sampling.host_batch import row_path
from nucleate.sampling.inputs import per_row
from nucleate.sampling.pipeline import Params
from nucleate.sampling.reference import Selection, Survivors, select
from nucleate.sampling.single_row import SingleRow, single_rows
from nucleate.sampling.stage import Stage, shape_of
from nucleate.sampling.trace_reasons import Distribution, StageChange, why, why_selected


@dataclass(frozen=True, eq=False)
class TraceStep:
    """The effect of one stage. Arrays of token ids are in ascending order."""

    change: StageChange  #: the surviving tokens before and after it
    why: str  #: the reason, with the deciding numbers

    def __repr__(self) -> str:  # what an interactive session shows
        return f"TraceStep({self.name}: {self.left} left, {self.why})"

    @property
    def stage(self) -> Stage | None:
        """The stage; None for the logits."""
        return self.change.stage

    @property
    def name(self) -> str:
        """The name of the stage; "logits" for the logits."""
        return "logits" if self.stage is None else self.stage.name

    @cached_property
    def touched(self) -> NDArray[np.int64]:
        """Surviving tokens whose score it changed."""
        return np.sort(self.change.before.kept.ids_N[self.change.is_touched])

    @cached_property
    def removed(self) -> NDArray[np.int64]:
        """Tokens that it removed."""
        return np.sort(self.change.before.kept.ids_N[self.change.is_removed])

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """[V] after it, -inf for removed tokens."""
        return self.change.after.spread(self.change.after.kept.x_N, -np.inf)

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """[V] after it."""
        return self.change.after.spread(self.change.after.probabilities, 0.0)

    @property
    def entropy(self) -> float:
        """Of the distribution after it, in nats."""
        return self.change.after.entropy

    @property
    def removed_probability(self) -> float:
        """The probability, before it, of the tokens that it removed."""
        return self.change.removed_probability

    @property
    def kl(self) -> float:
        """The Kullback-Leibler divergence of the distribution after it from the one before it, in nats."""
        return self.change.kl

    @property
    def left(self) -> int:
        """Number of surviving tokens."""
        return len(self.change.after.kept.ids_N)

    def most_likely(self, n: int) -> list[int]:
        """The n most likely tokens, in rank order."""
        ids: list[int] = self.change.after.kept.ids_N[: max(n, 0)].tolist()
        return ids


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


@dataclass(frozen=True, eq=False)
class Trace:
    """The effect of every stage of a pipeline on one row. Print it, read ``steps``, or use ``to_json``."""

    steps: tuple[TraceStep, ...]  #: the logits, then one per stage
    token_id: int | None  #: the sampled token; None if no token survived
    error: str | None  #: the reason, if there is no token
    seed: int
    step: int
    draw: Selection | None = None  #: the numbers of the draw; None without a token, and if a secret key decides

    def __str__(self) -> str:
        return f"{self.table()}\n{self._result}"

    def __repr__(self) -> str:  # what an interactive session shows
        return str(self)

    @property
    def _result(self) -> str:
        end = f"token {self.token_id}" if self.error is None else f"error: {self.error}"
        return f"{end} (seed {self.seed}, step {self.step})"

    @with_suggestions
    def table(self, text: Callable[[int], str] = str) -> str:
        """One line per stage. text: formats a token id."""
        rows = [("stage", "left", "touched", "removed", "entropy", "best", "p", "why")]
        for step in self.steps:
            [best] = step.most_likely(1)
            name = step.name if step.stage is None else _cut(shown(step.stage), 34)
            counts = (f"{step.left}", f"{len(step.touched)}", f"{len(step.removed)}")
            chance = f"{step.probabilities[best]:.4f}"
            rows.append((name, *counts, f"{step.entropy:.4f}", _cut(text(best), 20), chance, step.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        formats = [f"{side}{width}" for side, width in zip("<>>>><><", widths, strict=True)]
        return "\n".join("  ".join(map(format, row, formats)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return trace_html(self.steps, self._result)

    @with_suggestions
    def to_json(self, top: int = 20) -> str:
        """The trace as JSON, with the ``top`` most likely tokens after each stage as [id, score, probability]."""
        steps = [
            {
                "stage": step.name,
                "shape": "" if step.stage is None else shape_of(step.stage).lower(),
                "repr": "" if step.stage is None else repr(step.stage),
                "why": step.why,
                "left": step.left,
                "entropy": step.entropy,
                "touched": step.touched[:top].tolist(),
                "touched_count": len(step.touched),
                "removed": step.removed[:top].tolist(),
                "removed_count": len(step.removed),
                "top": [[i, float(step.scores[i]), float(step.probabilities[i])] for i in step.most_likely(top)],
            }
            for step in self.steps
        ]
        end = {"token_id": self.token_id, "error": self.error, "seed": self.seed, "step": self.step}
        return json.dumps({**end, "steps": steps}, allow_nan=False)


@with_suggestions
def trace(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Any] | None = None,
    output_ids: Sequence[Any] | None = None,
    mask: Any = None,
    companion: Any = None,
    seed: int | Sequence[int] | None = None,
    backend: str = "reference",
) -> Any:
    """Show the effect of each stage: tokens changed and removed, the reason, and the resulting distribution.

    logits_BV: float [V], for one ``Trace``, or [B, V], for a list with one per row. Other arguments as in ``sample``.
    seed: of the draw and of XTC, one for all rows or one per row; None: that of ``params``, or a random one. backend:
    as in ``sample``, but "cpu" and "auto" may be slower than the reference here.

    The token is the one that ``sample`` returns. All given stages are shown, also those that cannot change the result.
    ``error`` reports logits that are NaN, +inf or all -inf, and a stage that removes all tokens.
    """
    batch = Batch(logits_BV, params, prompt_ids, output_ids, mask, companion, backend)
    seeds = batch.seeds if seed is None else per_row(seed, len(batch), "seed")
    fast = compiled(backend, batch.logits.shape[1])
    traces = [
        _trace(row, noise.fresh_seed() if own is None else own, fast=fast)
        for row, own in zip(single_rows(batch, step), seeds, strict=True)
    ]
    return traces[0] if batch.is_row else traces


def _trace(row: SingleRow, seed: int, *, fast: bool) -> Trace:
    steps: list[TraceStep] = []
    logits_V, stages, past, size = row.logits_V, row.stages, row.past, len(row.logits_V)
    try:
        before = Distribution(reference.all_tokens(logits_V), size)
        steps.append(TraceStep(StageChange(None, before, before), row.origin))
        u = reference.xtc_uniform(stages, seed, row.step)
        for stage, left in zip(stages[:-1], _walk(before.kept, row, u, fast=fast), strict=True):
            after = before if left is before.kept else Distribution(left, size)
            change = StageChange(stage, before, after, u)
            steps.append(TraceStep(change, why(stage, change)))
            before = after
        selection = select(stages[-1], before.kept, *reference.noise_of(stages, past, seed, row.step))
        token = row_path(True).run(logits_V, stages, seed, row.step, past).token if fast else selection.token
    except reference.RowError as error:
        return Trace(tuple(steps), None, str(error), seed, row.step)
    draw: Any = stages[-1]
    kept = before.kept
    drawn = Survivors(np.array([token]), kept.x_N[kept.ids_N == token], kept.total)
    change = StageChange(draw, before, Distribution(drawn, size))
    steps.append(TraceStep(change, why_selected(draw, change, token)))
    return Trace(tuple(steps), token, None, seed, row.step, None if draw.keyed else selection)


def _walk(kept: Survivors, row: SingleRow, u: float, *, fast: bool) -> Iterator[Survivors]:
    """The surviving tokens after each stage except the draw. fast: use the CPU backend for each prefix of stages."""
    stages = row.stages
    if not fast:
        yield from reference.apply_stages(kept, len(row.logits_V), stages[:-1], row.past, u)
        return
    for count in range(1, len(stages)):
        yield row_path(True).survivors(row.logits_V, (*stages[:count], stages[-1]), row.past, u)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
