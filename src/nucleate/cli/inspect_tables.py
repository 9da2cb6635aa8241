"""The tables of one step of ``nucleate inspect``: its stages, and its most likely tokens.

They are as wide as the terminal at most; on a narrow one, less important columns are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nucleate.cli.terminal import Terminal, pad, text_width, truncated
from nucleate.cli.text_table import Cell, TextTable
from nucleate.cli.token_names import TokenNames
from nucleate.parameters.converters import shown
from nucleate.sampling.stage import Draw

if TYPE_CHECKING:
    from nucleate.sampling.trace import Trace, TraceStep

BAR = 24
"""Length of the bar of the most likely token, in characters."""
SAMPLED = " <- sampled"
ENTROPY = "entropy (nats)"


class Layout(NamedTuple):
    """A choice of columns. name, token: maximum width of a stage and of a token."""

    columns: tuple[str, ...]
    name: int
    token: int
    tall: bool  #: headers of two words on two lines


_ALL = ("stage", "left", "touched", "removed", ENTROPY, "best", "p")
_MOST = ("stage", "left", "removed", ENTROPY, "best", "p")
LAYOUTS = (
    Layout(_ALL, 34, 20, tall=False),
    Layout(_MOST, 34, 20, tall=False),
    Layout(_MOST, 34, 20, tall=True),
    Layout(_MOST, 24, 14, tall=True),
    Layout(("stage", "left", ENTROPY, "best", "p"), 24, 14, tall=True),
    Layout(("stage", "left", "best", "p"), 20, 12, tall=True),
    Layout(("stage", "left"), 20, 12, tall=True),
)
"""The layouts of the table of stages, from wide to narrow."""


def stage_lines(result: Trace, names: TokenNames, terminal: Terminal) -> list[str]:
    """One row per stage. The reason is in the last column, or below the row if the terminal is narrow."""
    tables = [_stage_table(result, names, layout) for layout in LAYOUTS]
    room = terminal.columns
    best = next((table for table in tables[:3] if table.fits(room, whole=True)), None)
    best = best or next((table for table in tables[2:4] if table.fits(room)), None)
    best = best or next((table for table in tables if room is None or table.fits_stacked(room)), tables[-1])
    return best.lines(terminal)


def _stage_table(result: Trace, names: TokenNames, layout: Layout) -> TextTable:
    headers = tuple(name.replace(" ", "\n") if layout.tall else name for name in layout.columns)
    sides = "".join("<" if name in ("stage", "best") else ">" for name in layout.columns)
    rows = [_stage_row(step, names, layout, result) for step in result.steps]
    return TextTable((*headers, "why"), f"{sides}<", rows)


def _stage_row(step: TraceStep, names: TokenNames, layout: Layout, result: Trace) -> list[Cell]:
    [best] = step.most_likely(1)
    name = (
        step.name if step.stage is None else truncated(names.terminal.text(shown(_unseeded(step.stage))), layout.name)
    )
    cells = {
        "stage": Cell(name, "", bold=len(name.split("(")[0])),
        "left": Cell(str(step.left)),
        "touched": Cell(str(len(step.touched))),
        "removed": Cell(str(len(step.removed))),
        ENTROPY: Cell(f"{step.entropy:.4f}"),
        "best": Cell(names(best, layout.token), "sampled" if is_draw(step) and best == result.token_id else ""),
        "p": Cell(f"{step.probabilities[best]:.4f}"),
    }
    return [*(cells[name] for name in layout.columns), Cell(names.terminal.text(step.why))]


def token_lines(result: Trace, names: TokenNames, terminal: Terminal, top: int) -> list[str]:
    """The most likely tokens before sampling, then those that a stage removed, with its name."""
    first, last = result.steps[0], before_draw(result)
    tokens = last.most_likely(top)
    tokens += [token for token in first.most_likely(top + len(tokens)) if token not in tokens][: top - len(tokens)]
    if result.token_id is not None and result.token_id not in tokens:
        tokens.append(result.token_id)
    notes = {token: f"removed: {out}" for token in tokens if (out := removed_by(result.steps, token))}
    best, ids = max(last.probabilities[token] for token in tokens), max(2, *(len(str(token)) for token in tokens))
    width, length = _token_and_bar(tokens, names, ids, max(map(len, notes.values()), default=0))
    lines = [terminal.paint(f"{'id':>{ids}}  {'token':{width}}  {'before':>7}  {'after':>7}", "dim")]
    for token in tokens:
        before, after = first.probabilities[token], last.probabilities[token]
        start = f"{token:>{ids}}  {pad(names(token, width), width, '<')}  {percent(before)}"
        if token in notes:
            lines.append(terminal.paint(f"{start}  {'':7}  {notes[token]}", "dim"))
            continue
        sampled = token == result.token_id
        start = terminal.paint(f"{start}  {percent(after)}", "sampled" if sampled else "")
        drawn = terminal.paint(bar(after / best, terminal, length), "cyan")
        lines.append(f"{start}  {drawn}{terminal.paint(SAMPLED, 'sampled') if sampled else ''}")
    return lines


def _token_and_bar(tokens: list[int], names: TokenNames, ids: int, note: int) -> tuple[int, int]:
    """The width of the tokens and of the longest bar. ids, note: width of the ids and of the longest note."""
    fixed, columns = ids + 22, names.terminal.columns  # two columns of percentages, and the gaps
    most = 40 if columns is None else max(8, min(40, columns - fixed - max(note, 8 + len(SAMPLED))))
    width = max(5, *(text_width(names(token, most)) for token in tokens))
    return width, BAR if columns is None else max(4, min(BAR, columns - fixed - width - len(SAMPLED)))


def _unseeded(stage: Any) -> Any:
    """A stage without its seed, which is long if it is random, and is shown above the tables."""
    return replace(stage, seed=None) if issubclass(type(stage), Draw) and "seed" in stage.parameters else stage


def before_draw(result: Trace) -> TraceStep:
    """The step before the token was selected."""
    return result.steps[-1 if result.token_id is None else -2]


def is_draw(step: TraceStep) -> bool:
    """Whether a stage selects the token."""
    return isinstance(step.stage, Draw)


def removed_by(steps: tuple[TraceStep, ...], token: int) -> str:
    """Return the stage that removed a token before sampling, or an empty string."""
    return next((step.name for step in steps if token in step.removed and not is_draw(step)), "")


def percent(p: float) -> str:
    """Format a probability in seven characters; a small one is not shown as 0."""
    return f"{p:7.2%}" if p >= 0.0001 or p == 0 else f"{100 * p:6.0e}%"


def bar(part: float, terminal: Terminal, length: int = BAR) -> str:
    """Return a bar of at most ``length`` characters, with eighths of a character if the terminal has them."""
    if not terminal.has_unicode:
        return "#" * max(1, round(part * length))
    whole, rest = divmod(max(1, round(part * length * 8)), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)
