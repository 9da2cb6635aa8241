"""Text tables that fit a terminal: the last column wraps between words, or moves below each row.

Does not depend on the rest of nucleate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nucleate.cli.terminal import Terminal, pad, text_width, wrapped

GAP = 2
"""Columns between two cells."""


class Cell(NamedTuple):
    """A text and the style of a part of it. bold: the number of characters at its start that are bold instead."""

    text: str
    style: str = ""
    bold: int = 0

    def painted(self, text: str, terminal: Terminal) -> str:
        """The padded text of the cell, with its style."""
        start, rest = text[: self.bold], text[self.bold :]
        inner = rest.strip(" ")
        if not inner:
            return f"{terminal.paint(start, 'bold')}{rest}"
        left = rest[: len(rest) - len(rest.lstrip(" "))]
        right = rest[len(left) + len(inner) :]
        return f"{terminal.paint(start, 'bold')}{left}{terminal.paint(inner, self.style)}{right}"


@dataclass(frozen=True)
class TextTable:
    """Rows under headers, which may have two lines. sides: the alignment of each column, "<" or ">".

    The last column is a text on the left. least: its minimum width beside the others. widths: minimum widths of these,
    for a table that is printed row by row.
    """

    headers: tuple[str, ...]
    sides: str
    rows: Sequence[Sequence[Cell]]
    least: int = 30
    widths: Sequence[int] = ()

    @property
    def _widths(self) -> list[int]:
        """Of all columns but the last one."""
        headers = [max(map(text_width, header.split("\n"))) for header in self.headers]
        cells = [headers, *([text_width(cell.text) for cell in row] for row in self.rows)]
        widths = [max(column) for column in zip(*cells, strict=True)][:-1]
        return [*map(max, widths, self.widths)] if self.widths else widths

    @property
    def height(self) -> int:
        """The number of lines of the headers."""
        return max(header.count("\n") + 1 for header in self.headers)

    @property
    def fixed(self) -> int:
        """The columns before the last cell."""
        return sum(self._widths) + GAP * len(self._widths)

    def fits(self, columns: int | None, *, whole: bool = False) -> bool:
        """Whether the last column fits beside the others. whole: without wrapping."""
        if columns is None:
            return True
        texts = [row[-1].text for row in self.rows]
        longest_word = max((text_width(word) for text in texts for word in text.split()), default=0)
        longest = max(map(text_width, texts), default=0)
        return columns - self.fixed >= (longest if whole else max(min(longest, self.least), longest_word + GAP))

    def fits_stacked(self, columns: int) -> bool:
        """Whether the columns but the last one fit."""
        return self.fixed - GAP <= columns

    def lines(self, terminal: Terminal) -> list[str]:
        """The lines of the table, with the last column beside the others if it fits."""
        stacked = not self.fits(terminal.columns)
        widths, indent = self._widths, self.fixed
        width = None if terminal.columns is None else terminal.columns - (GAP if stacked else indent)
        lines = self._header_lines(self.headers[:-1] if stacked else self.headers, widths, terminal)
        for *cells, last in self.rows:
            first, *more = wrapped(last.text, width)
            if stacked:
                lines.append(self._line(cells, widths, terminal))
                indent, more = GAP, [first, *more]
            else:
                lines.append(self._line([*cells, last._replace(text=first)], widths, terminal))
            lines += [f"{' ' * indent}{last.painted(text, terminal)}" for text in more]
        return lines

    def _header_lines(self, headers: Sequence[str], widths: Sequence[int], terminal: Terminal) -> list[str]:
        parts = [header.split("\n") for header in headers]
        height = max(map(len, parts))
        rows = zip(*([""] * (height - len(part)) + part for part in parts), strict=True)
        return [self._line([Cell(text, "dim") for text in row], widths, terminal) for row in rows]

    def _line(self, cells: Sequence[Cell], widths: Sequence[int], terminal: Terminal) -> str:
        cells = cells[: 1 + max((i for i, cell in enumerate(cells) if cell.text), default=-1)]
        last = len(cells) - 1
        texts = [
            cell.text if i == last and side == "<" else pad(cell.text, ([*widths, 0])[i], side)
            for i, (cell, side) in enumerate(zip(cells, self.sides, strict=False))
        ]
        return (" " * GAP).join(cell.painted(text, terminal) for cell, text in zip(cells, texts, strict=True))
