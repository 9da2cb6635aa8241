"""Rows of one structure as columns: a line per number that their stages hold, a column per row. What a kernel reads.

Refuses to know what a number means. Lists, tables and words are no numbers: they reach a kernel as edits of a row.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.core.stage import Pipeline, Stage

Structure = tuple[type[Stage], ...]
"""The types of the stages of a pipeline. Rows that share one run through the same kernel."""

NUMBERS = ("float", "int", "bool")
LARGEST = sys.float_info.max  # an integer may be larger, but then no row is as long as it says


class Line(NamedTuple):
    """Which number a line of the columns holds."""

    place: int  #: of the stage in the pipeline
    attribute: str


def structure_of(stages: Pipeline) -> Structure:
    """The structure of a pipeline."""
    return tuple(type(stage) for stage in stages)


@lru_cache(maxsize=256)
def lines_of(structure: Structure) -> tuple[Line, ...]:
    """The numbers of a structure, except the seed: 64 bits do not fit a float64."""
    return tuple(
        Line(place, attribute)
        for place, kind in enumerate(structure)
        for attribute, parameter in kind.parameters.items()
        if parameter.kind in NUMBERS and parameter.name != "seed"
    )


class Columns:
    """The rows of one structure. ``values`` is float64 [P, R]; None is NaN. ``rows`` says whose column each is."""

    def __init__(self, stages: Pipeline) -> None:
        self.structure = structure_of(stages)
        self.lines = lines_of(self.structure)
        self.rows: list[int] = []
        self._places: dict[int, int] = {}
        self._values = np.zeros((len(self.lines), 4))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def values(self) -> NDArray[np.float64]:
        return self._values[:, : len(self.rows)]

    def add(self, row: int, stages: Pipeline) -> None:
        """A new last column."""
        if len(self.rows) == self._values.shape[1]:
            self._values = np.concatenate((self._values, np.zeros_like(self._values)), axis=1)
        self._places[row] = len(self.rows)
        self.rows.append(row)
        self.update(row, stages)

    def update(self, row: int, stages: Pipeline) -> None:
        """The numbers of a row as its stages have them now."""
        given = (getattr(stages[line.place], line.attribute) for line in self.lines)
        self._values[:, self._places[row]] = [
            np.nan if value is None else float(min(value, LARGEST)) for value in given
        ]

    def remove(self, row: int) -> None:
        """Take out a column; the last one takes its place."""
        place, last = self._places.pop(row), self.rows.pop()
        if last != row:
            self.rows[place], self._places[last] = last, place
            self._values[:, place] = self._values[:, len(self.rows)]
