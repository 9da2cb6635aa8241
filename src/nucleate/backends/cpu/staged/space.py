"""What the kernel ``walk`` is given and works in: the columns of a program, and views of arrays by their addresses.

A kernel is compiled the faster the less it hands on to its parts: so one address, and not the arrays, goes to each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import carray

from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.load import doubles_at, floats_at, longs_at

COLUMNS = 11
SHAPE, WANTS, MODE, STRICT, TIES = range(5)
RULE, ORDER, TARGET = 5, 7, 9
"""Where a step has the address of a rule, and behind it that of its numbers: one of its shape, two more of a Prefix."""

SCALE, FLOOR, PREFIX, DRAW = range(4)
"""What a step is."""

MASS, MOMENTS, SQUARE = 1, 2, 4
"""What the rules of a step ask of the row. The first two are as in ``summary``."""

EVERY, COUNTED, SUMMED, TRIED, BENT = 0, 1, 2, 3, 8
"""Among which tokens a Prefix finds its own, see ``shortlist``; added: its order is the absolute value of a line."""

LONGEST = 12
"""So many steps a program has at most."""

ODD = -1
"""What the kernel says of a row that has to be run step by step."""

TAIL, TOPS, WEIGHTS_G, STARTS, MASSES, NOISE, CUTS, COUNTS, SUMS = range(9)
KEYS, WEIGHTS, V, W, PLACES, IDS, X, BASE, OTHER, ROWS = range(9, 19)
"""The places of arrays among the addresses in ``room.Room.control``."""
ARRAYS = 19


class Raw(NamedTuple):
    """A row of which nothing has been cut, as some scales leave it."""

    x: Any  #: float32 [V]
    highest: Any  #: of the scores as given, float32
    slope: Any  #: of what the scales make of them: 0.0 where that is not known
    blur: Any  #: how far roundings may be off, in scores as given
    scales: Any  #: it is as the scales among so many first steps leave it


class Cut(NamedTuple):
    """Tokens that are in, the first ones of ``IDS`` and ``X``."""

    m: Any  #: how many; 0: nothing has been cut; ODD
    top: Any  #: the highest score


@jit
def floats(space: Any, place: Any, count: Any) -> Any:
    return carray(floats_at(carray(longs_at(space), ARRAYS)[place]), count)


@jit
def longs(space: Any, place: Any, count: Any) -> Any:
    return carray(longs_at(carray(longs_at(space), ARRAYS)[place]), count)


@jit
def doubles(space: Any, place: Any, count: Any) -> Any:
    return carray(doubles_at(carray(longs_at(space), ARRAYS)[place]), count)


@jit
def told(space: Any, i: Any) -> Any:
    """What the rules of a step are told of the row, as ``stage.Row``."""
    return doubles(space, ROWS, 8 * (LONGEST + 1))[8 * i : 8 * i + 8]


@jit
def tell(row: Any, n: Any, mass: Any, square: Any, entropy: Any, mean: Any, var: Any) -> None:
    """Of scores from the top, before the first cut."""
    row[0], row[1], row[2], row[3] = n, 0.0, mass, square
    row[4], row[5], row[6], row[7] = entropy, mean, var, mass
