"""What ``nucleate inspect`` prints: the parameters with their origin, and tables of stages, tokens and steps.

The tables are as wide as the terminal at most; on a narrow one, less important columns are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nucleate.cli.terminal import NO_BREAK, Cell, Terminal, TextTable, pad, text_width, truncated, wrapped
from nucleate.parameters.converters import shown
from nucleate.sampling.stage import Draw
from nucleate.sampling_params import FIELDS, SamplingParams, plain
from nucleate.tokenization.tokenizer import Tokenizer, token_text

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
    stage: Any = step.stage
    if issubclass(type(stage), Draw) and "seed" in stage.parameters:
        stage = replace(stage, seed=None)  # long if it is random, and shown above the tables
    name = step.name if stage is None else truncated(names.terminal.text(shown(stage)), layout.name)
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
    if "utf" not in terminal.encoding.lower():
        return "#" * max(1, round(part * length))
    whole, rest = divmod(max(1, round(part * length * 8)), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)


TOKEN_WIDTH = 14
_STEP_LAYOUTS: tuple[tuple[tuple[str, ...], bool, int], ...] = (
    (("step", "token", "before", "after", ENTROPY, "left"), False, 32),
    (("step", "token", "before", "after", ENTROPY, "left"), True, 32),
    (("step", "token", "after", ENTROPY, "left"), True, 32),
    (("step", "token", "after", "left"), False, 20),
    (("step", "token"), False, 0),
)
"""Columns, whether their headers have two lines, and the minimum width of the last column; from wide to narrow."""


class StepTable:
    """The columns that fit the terminal. steps: the highest number of rows. vocab_size: the most tokens left."""

    def __init__(self, names: TokenNames, steps: int, vocab_size: int) -> None:
        self._names = names
        self._widths = {"step": len(str(steps)), "token": TOKEN_WIDTH, "left": len(str(vocab_size))}
        columns = names.terminal.columns
        for layout in _STEP_LAYOUTS:
            self._columns, self._tall, least = layout
            if columns is None or self._table([]).fixed + least <= columns:
                break

    def lines(self, result: Trace) -> list[str]:
        """The row of a step, below the headers if it is the first one."""
        lines = self._table([self._row(result)]).lines(self._names.terminal)
        return lines[1 + self._tall :] if result.step else lines

    def _table(self, rows: list[list[Cell]]) -> TextTable:
        headers = tuple(name.replace(" ", "\n") if self._tall else name for name in self._columns)
        sides = "".join("<" if name == "token" else ">" for name in self._columns)
        widths = [self._widths.get(name, 0) for name in self._columns]
        return TextTable((*headers, "removed by"), f"{sides}<", rows, 0, widths)

    def _row(self, result: Trace) -> list[Cell]:
        token, last = result.token_id, before_draw(result)
        cells = {
            "step": Cell(str(result.step + 1)),
            "token": Cell("" if token is None else self._names(token, TOKEN_WIDTH), "bold"),
            "before": Cell("" if token is None else percent(result.steps[0].probabilities[token])),
            "after": Cell("" if token is None else percent(last.probabilities[token])),
            ENTROPY: Cell(f"{last.entropy:.4f}"),
            "left": Cell(str(last.left)),
        }
        removed = [(step.name, len(step.removed)) for step in result.steps if len(step.removed) and not is_draw(step)]
        end = ", ".join(f"{name}{NO_BREAK}{count}" for name, count in removed) if result.error is None else result.error
        return [*(cells[name] for name in self._columns), Cell(end, "dim")]


@dataclass(frozen=True)
class TokenNames:
    """The quoted texts of tokens, by token id and maximum width."""

    tokenizer: Tokenizer
    terminal: Terminal

    def __call__(self, token: int, width: int | None = None) -> str:
        return self.terminal.quoted(token_text(self.tokenizer, token), width)


def prompt_line(prompt: Sequence[int], output: Sequence[int], names: TokenNames, start: str, end: str) -> str:
    """The last tokens of a prompt, then those of its output after a |, between two texts, on one line."""
    terminal = names.terminal
    limit = 1000 if terminal.columns is None else terminal.columns - text_width(start) - text_width(end)
    tokens = [*prompt, *output]
    shown_tokens, used = list[str](), 4 + 2 * bool(output)
    for index, token in reversed([*enumerate(tokens)][-8:]):
        name = names(token, max(8, limit - 6))
        used += text_width(name) + 1
        if used > limit and shown_tokens:
            break
        mark = "| " if output and index == len(prompt) else ""
        shown_tokens.insert(0, f"{mark}{terminal.paint(name, 'sampled' if index >= len(prompt) else '')}")
    dots = "... " * (len(shown_tokens) < len(tokens))
    return f"{terminal.paint(start, 'bold')}{dots}{' '.join(shown_tokens)}{end}"


SHOWN_DEFAULTS = ("order", "draw")
"""Parameters with a stage or an effect of their own by default."""
ORIGINS = ("flag", "generation_config", "default")


def origins(params: SamplingParams, flags: Collection[str], recommended: SamplingParams) -> dict[str, str]:
    """The origin of each parameter of ``params`` that is set: "flag", "generation_config" or "default".

    flags: the names of parameters with a flag. recommended: the parameters that the model recommends. One of these that
    contradicts a flag has its default instead, see ``SamplingParams.override``.
    """

    own = {name for name in recommended.fields_set if getattr(params, name) == getattr(recommended, name)}
    return {
        name: "flag" if name in flags else "generation_config" if name in own else "default"
        for name in FIELDS
        if name in params.fields_set
    }


def parameter_lines(params: SamplingParams, origin: Mapping[str, str], source: str, terminal: Terminal) -> list[str]:
    """The parameters in effect, one row per origin. source: the name of the model's file with recommended ones."""
    if params.pipeline is None:
        origin = {**origin, **{name: "default" for name in (*SHOWN_DEFAULTS, "seed") if name not in origin}}
    else:  # it replaces all parameters of stages
        origin = {name: own for name, own in origin.items() if own != "default"}
    labels = dict(zip(ORIGINS, ("flags", terminal.text(source), "defaults"), strict=True))
    width = max(text_width(labels[one]) for one in origin.values())
    room = None if terminal.columns is None else max(20, terminal.columns - width - 2)
    lines = list[str]()
    for kind, label in labels.items():
        values = [f"{name}{NO_BREAK}{_value(name, params, terminal)}" for name, own in origin.items() if own == kind]
        for number, line in enumerate(wrapped(", ".join(values), room, "") if values else ()):
            lines.append(f"{terminal.paint(pad('' if number else label, width, '<'), 'dim')}  {line}")
    return lines


def _value(name: str, params: SamplingParams, terminal: Terminal) -> str:
    """A value on one line, truncated to 60 columns."""
    value = getattr(params, name)
    if name == "pipeline":
        text = " | ".join(map(repr, value))
    elif name == "seed" and value is None:
        text = "random"
    elif isinstance(value, str) and re.fullmatch(r"[\w.-]+", value):
        text = value
    else:
        text = json.dumps(plain(value), ensure_ascii=False)
    return truncated(terminal.text(text), 60)


def config_name(folder: Path | None) -> str:
    """The name of the file with the parameters that a model recommends."""
    return folder.name if folder is not None and folder.is_file() else "generation_config.json"  # a GGUF file
