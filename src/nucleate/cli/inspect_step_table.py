"""The table of ``nucleate inspect`` for many steps: one row per token, printed as soon as the token is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nucleate.cli.inspect_tables import ENTROPY, before_draw, is_draw, percent
from nucleate.cli.terminal import NO_BREAK
from nucleate.cli.text_table import Cell, TextTable
from nucleate.cli.token_names import TokenNames

if TYPE_CHECKING:
    from nucleate.sampling.trace import Trace

TOKEN = 14
"""The width of a token."""
_LAYOUTS: tuple[tuple[tuple[str, ...], bool, int], ...] = (
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
        self._widths = {"step": len(str(steps)), "token": TOKEN, "left": len(str(vocab_size))}
        columns = names.terminal.columns
        for layout in _LAYOUTS:
            self._columns, self._tall, least = layout
            if columns is None or self._table([]).fixed + least <= columns:
                break

    def lines(self, result: Trace) -> list[str]:
        """The row of a step, below the headers if it is the first one."""
        table = self._table([self._row(result)])
        return table.lines(self._names.terminal)[table.height if result.step else 0 :]

    def _table(self, rows: list[list[Cell]]) -> TextTable:
        headers = tuple(name.replace(" ", "\n") if self._tall else name for name in self._columns)
        sides = "".join("<" if name == "token" else ">" for name in self._columns)
        widths = [self._widths.get(name, 0) for name in self._columns]
        return TextTable((*headers, "removed by"), f"{sides}<", rows, 0, widths)

    def _row(self, result: Trace) -> list[Cell]:
        token, last = result.token_id, before_draw(result)
        cells = {
            "step": Cell(str(result.step + 1)),
            "token": Cell("" if token is None else self._names(token, TOKEN), "bold"),
            "before": Cell("" if token is None else percent(result.steps[0].probabilities[token])),
            "after": Cell("" if token is None else percent(last.probabilities[token])),
            ENTROPY: Cell(f"{last.entropy:.4f}"),
            "left": Cell(str(last.left)),
        }
        removed = [(step.name, len(step.removed)) for step in result.steps if len(step.removed) and not is_draw(step)]
        end = ", ".join(f"{name}{NO_BREAK}{count}" for name, count in removed) if result.error is None else result.error
        return [*(cells[name] for name in self._columns), Cell(end, "dim")]
