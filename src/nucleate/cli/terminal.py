"""What stdout can show: its width, colours and characters. Texts and tables that fit into its columns.

Does not depend on the rest of nucleate.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

STYLES: Mapping[str, str] = {
    "bold": "1",
    "dim": "2",
    "cyan": "36",
    "sampled": "1;32",  # bold green
}
"""Styles, and their codes of Select Graphic Rendition: of the 16 colours that follow the theme of the terminal."""

NO_BREAK = "\0"
"""See ``wrapped``."""


@dataclass(frozen=True)
class Terminal:
    """An output. columns: None if lines may have any length, as in a file or a pipe."""

    columns: int | None = None
    has_colors: bool = False
    encoding: str = "utf-8"

    @classmethod
    def of_stdout(cls) -> Terminal:
        """What the current stdout can show."""
        return cls(columns(sys.stdout), has_colors(sys.stdout), sys.stdout.encoding or "ascii")

    def paint(self, text: str, style: str) -> str:
        """The text in a style; an empty style changes nothing."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text and self.has_colors else text

    def character(self, character: str) -> str:
        """A character as the terminal can show it: escaped if it cannot be printed, or if the encoding lacks it."""
        if character.isprintable():  # no C1 control codes, nor changes of the writing direction
            with contextlib.suppress(LookupError, UnicodeError):
                return character.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"

    def text(self, text: str) -> str:
        """A text as the terminal can show it, on one line."""
        return "".join(map(self.character, text))

    def quoted(self, text: str, width: int | None = None) -> str:
        """The text in quotes, on one line. width: maximum number of columns; a truncated text ends with ``"...``."""
        parts = [_SHORT_ESCAPES.get(character) or self.character(character) for character in text]
        whole = f'"{"".join(parts)}"'
        if width is None or text_width(whole) <= width:
            return whole
        ends = accumulate(map(text_width, parts), initial=5)  # of quotes and dots
        return f'"{"".join(part for part, end in zip(parts, [*ends][1:], strict=True) if end <= width)}"...'


_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def columns(stream: Any) -> int | None:
    """The columns of a terminal, or those in COLUMNS; None if there is neither."""
    given = os.environ.get("COLUMNS", "")
    if not stream.isatty() and not (given.isdecimal() and int(given) > 0):
        return None
    return shutil.get_terminal_size((80, 24)).columns


def has_colors(stream: Any) -> bool:
    """Whether to use colours: NO_COLOR and FORCE_COLOR decide, otherwise a terminal has colours unless it is dumb."""
    given = os.environ.get
    if given("NO_COLOR"):
        return False
    if any(given(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    if "0" in (given("FORCE_COLOR"), given("CLICOLOR")):
        return False
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def character_width(character: str) -> int:
    """The columns of a printable character: 0 if it combines with the one before, 2 if it is wide."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":  # Hangul vowels
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def text_width(text: str) -> int:
    """The columns of a printable text."""
    return len(text) if text.isascii() else sum(map(character_width, text))


def pad(text: str, width: int, side: str) -> str:
    """Fill a text up with spaces to a number of columns. side: "<" for text on the left, ">" for text on the right."""
    space = " " * (width - text_width(text))
    return text + space if side == "<" else space + text


def truncated(text: str, width: int) -> str:
    """The beginning of a text, with ``...`` if it takes more columns."""
    if text_width(text) <= width:
        return text
    ends = accumulate(map(character_width, text))
    return f"{''.join(character for character, end in zip(text, ends, strict=True) if end <= width - 3)}..."


def wrapped(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Break a text into lines between words. indent: of all lines but the first. A longer word has a line alone.

    NO_BREAK stands for a space at which no line ends.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        longer = f"{line}{' ' * bool(line.strip())}{word}"
        if width is not None and text_width(longer) > width and line.strip():
            lines.append(line)
            line = f"{indent}{word}"
        else:
            line = longer
    return [one.replace(NO_BREAK, " ") for one in (*lines, line)]


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
        return terminal.paint(start, "bold") + rest.replace(inner, terminal.paint(inner, self.style), 1)


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
        headers = [header.split("\n")[::-1] for header in (self.headers[:-1] if stacked else self.headers)]
        rows = [*zip_longest(*headers, fillvalue="")][::-1]  # aligned at the last line
        lines = [self._line([Cell(text, "dim") for text in row], widths, terminal) for row in rows]
        for *cells, last in self.rows:
            first, *more = wrapped(last.text, width)
            if stacked:
                lines.append(self._line(cells, widths, terminal))
                indent, more = GAP, [first, *more]
            else:
                lines.append(self._line([*cells, last._replace(text=first)], widths, terminal))
            lines += [f"{' ' * indent}{last.painted(text, terminal)}" for text in more]
        return lines

    def _line(self, cells: Sequence[Cell], widths: Sequence[int], terminal: Terminal) -> str:
        cells = cells[: 1 + max((i for i, cell in enumerate(cells) if cell.text), default=-1)]
        last = len(cells) - 1
        texts = [
            cell.text if i == last and side == "<" else pad(cell.text, ([*widths, 0])[i], side)
            for i, (cell, side) in enumerate(zip(cells, self.sides, strict=False))
        ]
        return (" " * GAP).join(cell.painted(text, terminal) for cell, text in zip(cells, texts, strict=True))
