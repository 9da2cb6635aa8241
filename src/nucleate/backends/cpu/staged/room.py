"""The tokens of a row that are still in, and the arrays they are kept in. Knows no stage."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.staged import summary
from nucleate.backends.cpu.staged.reach import BINS
from nucleate.backends.cpu.staged.space import LONGEST
from nucleate.backends.cpu.staged.summary import MASS, MOMENTS
from nucleate.core.stage import Row

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class Odd(Exception):  # noqa: N818  # it is not an error
    """The reference is to run this row."""


class Kept:
    """The tokens that are in: the first ``m`` of ``ids`` and ``x``; ``base`` by id, see ``keep``."""

    __slots__ = ("among", "base", "groups", "ids", "known", "m", "row", "top", "whole", "x")

    def __init__(
        self, ids: Ids, x: Floats, base: Floats, m: int, top: float, whole: reference.Whole | None, among: Any = None
    ) -> None:
        self.ids, self.x, self.base, self.m, self.top = ids, x, base, m, top
        self.whole = whole  #: None where nothing has been cut
        self.among = among  #: tokens of which these are all that matter to a stage: its statistics are theirs
        self.groups: Floats | None = None  #: log masses of groups, from the top, once they have raced
        self.known, self.row = 0, np.empty(5)  #: which statistics are there

    def with_whole(self, whole: reference.Whole | None) -> Kept:
        """The same tokens, after a cut that left all of them."""
        same = Kept(self.ids, self.x, self.base, self.m, self.top, whole)
        same.known, same.row = self.known, self.row
        return same

    def statistics(self, names: frozenset[str]) -> Row:
        """What a rule sees, of scores from the top. What is not named may be missing."""
        if self.among is not None:
            return self.among.statistics(names)  # type: ignore[no-any-return]  # a Kept, or what stands for one
        mass, square, entropy, mean, var = self._at_least(
            (MASS if names & {"mass", "square", "entropy", "whole"} else 0)
            | (MOMENTS if names & {"mean", "var"} else 0)
        )
        if self.whole is None or "whole" not in names:
            whole = mass
        else:
            whole = max(self.whole.mass * np.exp(self.whole.top - self.top), mass)
        return Row(self.m, np.float64(0.0), mass, square, entropy, mean, var, whole)

    def _at_least(self, wanted: int) -> Floats:
        if wanted & ~self.known:
            summary.statistics(self.x, self.m, self.top, wanted & ~self.known, self.row)
            self.known |= wanted
        return self.row

    @property
    def uncut(self) -> reference.Whole:
        """All tokens before the first cut, as of which this is one."""
        return self.whole or reference.Whole(self.top, self.statistics(frozenset(("mass",))).mass)

    def log_chance(self, token: int) -> float:
        """The log-probability of a token that is in."""
        place = np.searchsorted(self.ids[: self.m], token)
        mass = self.statistics(frozenset(("mass",))).mass if self.groups is None else np.exp(self.groups).sum()
        return float(self.x[place] - self.top - np.log(mass))


class Room:
    """Arrays to work in for rows of one size. Nothing in them outlives a row."""

    def __init__(self, size: int) -> None:
        self.size, self.padded = size, -(-size // GROUP) * GROUP
        self.every = np.arange(self.padded)
        self.row, self.tail = np.empty(size, np.float32), np.empty(GROUP, np.float32)
        self.keys, self.weights, self.v, self.w = (np.empty(self.padded) for _ in range(4))
        self.places = np.empty(self.padded, np.int64)
        self.sums = np.empty(BINS)
        count = self.padded // GROUP
        self.tops = np.empty(count, np.float32)
        self.weights_G = np.empty(count)  #: what groups weigh, see ``weighed``
        self.starts, self.masses, self.noise = np.empty(count + 1, np.int64), np.empty(count), np.empty(count + GROUP)
        self.cuts = np.empty(8, np.float32)
        self.four, self.rows = np.empty(4, np.int64), np.empty((LONGEST + 1, 8))
        self._floats: list[Floats] = []
        self._ids: list[Ids] = []
        self.start()
        self._control = self._addresses()
        self.control = self._control.ctypes.data  #: of the arrays of ``walk``

    def _addresses(self) -> Ids:
        ids, floats = self.ids(), [self.floats() for _ in range(3)]
        self.start()
        first: tuple[Any, ...] = (
            self.tail,
            self.tops,
            self.weights_G,
            self.starts,
            self.masses,
            self.noise,
            self.cuts,
            self.four,
        )
        second: tuple[Any, ...] = (
            self.sums,
            self.keys,
            self.weights,
            self.v,
            self.w,
            self.places,
            ids,
            *floats,
            self.rows,
        )
        return np.array([one.ctypes.data for one in (*first, *second)], np.int64)

    def start(self) -> None:
        """All arrays are free again."""
        self._used, self._fixed = [0, 0], {id(self.every)}
        self.weighed: Any = None  #: the ``Raw`` whose groups ``weights_G`` is of

    def fix(self, kept: Any) -> None:
        """Somebody will come back to these tokens: leave their arrays as they are, if they are listed in any."""
        if isinstance(kept, Kept):
            self._fixed |= {id(kept.ids), id(kept.x)}

    def floats(self) -> Floats:
        if self._used[0] == len(self._floats):
            self._floats.append(np.empty(self.padded + GROUP))  # some loops read a little more
        self._used[0] += 1
        return self._floats[self._used[0] - 1]

    def ids(self) -> Ids:
        if self._used[1] == len(self._ids):
            self._ids.append(np.empty(self.padded, np.int64))
        self._used[1] += 1
        return self._ids[self._used[1] - 1]

    def out(self, kept: Kept) -> tuple[Ids, Floats]:
        """Where to put the tokens that stay: where they are, unless these arrays are needed as they are."""
        ids = self.ids() if id(kept.ids) in self._fixed else kept.ids
        return ids, self.floats() if id(kept.x) in self._fixed or kept.x is kept.base else kept.x


_own = threading.local()


def room(size: int) -> Room:
    """The room of this thread for rows of a size; the last few sizes are kept."""
    rooms: dict[int, Room] = _own.__dict__.setdefault("rooms", {})
    if size not in rooms:
        if len(rooms) == 4:
            del rooms[next(iter(rooms))]
        rooms[size] = Room(size)
    return rooms[size]
