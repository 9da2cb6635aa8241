"""A whole row as it lies in memory, before its first cut: read for its statistics, and for the few tokens that matter.

Scales that are lines are not written down but remembered: they turn statistics, and are applied to the few.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.doubles import LOWEST
from nucleate.backends.cpu.load import FLOAT32
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.rows import chains
from nucleate.backends.cpu.staged import candidates, keep, summary
from nucleate.backends.cpu.staged.bind import values
from nucleate.backends.cpu.staged.room import Kept, Odd, Room
from nucleate.backends.rules import Line, line, reads
from nucleate.core.event import StepLogprobs
from nucleate.core.stage import Row, Scale

UNKNOWN = np.nan, np.nan
OF_MASS, OF_SCORES = frozenset(("mass", "entropy", "whole")), frozenset(("n", "mean", "var"))
OF_OTHERS = OF_SCORES | {"square"}

STEEPEST = 1e200
"""With more, scores might become infinite."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class Raw:
    """All tokens of a row, none of which has been cut, as some scales leave them."""

    def __init__(self, work: Room, row_V: NDArray[np.float32]) -> None:
        """row_V: contiguous, aligned, writeable."""
        self.work, self.row_V = work, row_V
        top = candidates.tops_of(row_V, work.tail, work.tops)
        if not -np.inf < top < np.inf:
            raise Odd
        self.highest = float(top)  #: of the scores as given
        self.top = self.highest  #: of the scores as they are
        self.scales: tuple[tuple[Scale, Row], ...] = ()
        self._slope, self._blur = 1.0, 0.0
        self._row: Floats | None = None
        self._told: Row | None = None  #: what most rules ask for: mass and entropy

    @property
    def m(self) -> int:
        """How many tokens there are; some may be out."""
        return self.work.size

    def statistics(self, names: frozenset[str]) -> Row:
        """As ``Kept.statistics``."""
        if self._told is not None and not names & OF_OTHERS:
            return self._told
        mass, entropy = self._masses() if names & OF_MASS else UNKNOWN
        square = self._square() if "square" in names else np.nan
        n, mean, var = self._means() if names & OF_SCORES else (self.m, np.nan, np.nan)
        told = Row(n, np.float64(0.0), mass, square, entropy, mean, var, mass)
        self._told = told if names & OF_MASS and not names & OF_OTHERS else self._told
        return told

    def _masses(self) -> Floats:
        if self._row is None:
            work, self._row = self.work, np.empty(2)
            summary.summary(self.row_V, work.tail, self.highest, self._slope, self._row, work.weights_G)
            work.weighed = self
        return self._row

    def _square(self) -> float:
        """The sum of exp(2 (x - top))."""
        work, row = self.work, np.empty(2)
        summary.summary(self.row_V, work.tail, self.highest, 2.0 * self._slope, row, work.masses)
        return float(row[0])

    def _means(self) -> tuple[int, Any, Any]:
        work = self.work
        summary.moments(self.row_V, work.tail, np.float32(self.highest), len(work.tops), work.sums[:3])
        n, total, squares = work.sums[:3]
        mean = total / n
        return int(n), mean * self._slope, max(squares / n - mean * mean, 0.0) * self._slope * self._slope

    whole = None  #: nothing has been cut

    def with_whole(self, _: Any) -> Raw:
        """The same tokens after a cut that left all of them: the mass before it is theirs."""
        return self

    @property
    def uncut(self) -> reference.Whole:
        return reference.Whole(self.top, self._masses()[0])

    def scaled(self, stage: Scale) -> Raw | None:
        """The same row after a scale; None if that is not a line upwards."""
        if not stage.monotone:
            return None
        row = self.statistics(reads(stage, "apply").row)
        found = line(stage, "apply", row)
        if found is None or found.bent or not 0.0 < self._slope * found.slope < STEEPEST:
            return None
        return copy.copy(self)._with(stage, row, found)  # noqa: SLF001  # its own

    def _with(self, stage: Scale, row: Row, found: Line) -> Raw:
        self.scales += ((stage, row),)
        self.top, self._slope, self._row = float(found.offset), self._slope * found.slope, None
        self._told = None
        self._blur += 1e-15 * abs(self.top) / self._slope
        return self

    def from_cut(self, cut: float, among: Raw | None = None) -> Kept:
        """The tokens at or above a cut, from the top, and maybe a few more."""
        return self.from_raw(self._score(cut, -1.0), among)

    def raised(self, cut: float, rest: float) -> float:
        """A cut, from the top, that may be higher, below which all tokens together weigh at most ``rest``."""
        work, top = self.work, np.float32(self.highest)
        given = np.float32(self.highest + cut / self._slope)
        if not given > candidates.LOWEST_32:
            return cut
        found = candidates.raised(
            self.row_V, work.tail, work.tops, top, given, self._slope, rest, work.cuts, work.places[:4]
        )
        return cut if found == given else max(cut, (float(found) - self.highest) * self._slope)

    def _score(self, cut: float, way: float) -> np.float32:
        """A score as given that is surely below a cut, from the top; or, the other way, above it."""
        below = cut / self._slope
        raw = self.highest + below + way * (self._blur + 1e-6 * (abs(self.highest) + abs(below)))  # for roundings
        given: np.float32 = np.nextafter(np.float32(max(raw, float(candidates.LOWEST_32))), np.float32(way * np.inf))
        return given

    def all_reach(self, cut: float) -> bool:
        """Whether all tokens are seen to be at or above a cut, from the top."""
        work = self.work
        return bool(candidates.all_reach(self.row_V, work.tail, work.tops, self._score(cut, 1.0)))

    def from_raw(self, cut: np.float32, among: Raw | None = None) -> Kept:
        """The tokens at or above a cut of the scores as given."""
        work = self.work
        ids, x, base = work.ids(), work.floats(), work.floats()
        cut = np.float32(max(cut, candidates.LOWEST_32))
        m = candidates.pick_out(self.row_V, work.tail, work.tops, cut, ids, x, base)
        kept = self._scaled(Kept(ids, x, base, m, self.highest, None))
        kept.among = among
        return kept

    def all(self) -> Kept:
        """All of them."""
        work = self.work
        base = work.floats()
        top, low = summary.widen(self.row_V, base)
        kept = self._scaled(dense(work, base, top, low))
        kept.among = self
        return kept

    def groups(self) -> tuple[Ids, Floats]:
        """The groups that have tokens, and log sum exp of their scores from the top."""
        work = self.work
        if self._row is None or work.weighed is not self:
            self._row = None
            self._masses()
        count = candidates.groups_of(
            self.row_V, work.tops, self.highest, self._slope, work.weights_G, work.starts, work.masses
        )
        return work.starts[:count], work.masses[:count]

    def of_group(self, group: int) -> tuple[Ids, Floats]:
        """The tokens of a group, and their scores from the top."""
        x_N = self.row_V[group * GROUP : (group + 1) * GROUP]
        inside_N = np.flatnonzero(x_N > -np.inf)
        return inside_N + group * GROUP, self._below(x_N[inside_N])

    def log_chance(self, token: int) -> float:
        """The log-probability of a token that is in."""
        return float(self._below(self.row_V[token : token + 1])[0] - np.log(self._masses()[0]))

    def report(self, chosen: int, top: int, asked: tuple[int, ...]) -> StepLogprobs:
        """What ``backends.logprobs`` says of the row as given."""
        return chains(self.m).report((self.row_V, 0, 0, FLOAT32), 0, chosen, top, asked)

    def _below(self, raw_N: NDArray[np.float32]) -> Floats:
        """Scores as given, as the scales leave them, from the top."""
        below_N = raw_N.astype(np.float64) - self.highest
        for stage, row in self.scales:
            said_N = np.asarray(stage.apply(np.append(below_N, 0.0), row))
            below_N = said_N[:-1] - said_N[-1]
        return below_N

    def _scaled(self, kept: Kept) -> Kept:
        for stage, row in self.scales:
            x = self.work.floats()
            values(stage, "apply", kept.x, kept.m, kept.top, row, x)
            kept = Kept(kept.ids, x, kept.base, kept.m, summary.scan(x, kept.m)[0], None)
        return kept


def dense(work: Room, base: Floats, top: float, low: float) -> Kept:
    """Tokens of which none has been cut; those at -inf are out."""
    if low > -np.inf:
        return Kept(work.every, base, base, work.size, top, None)
    ids, x = work.ids(), work.floats()
    m = keep.keep_above(base, work.every, work.size, 0.0, LOWEST, x, ids)
    return Kept(ids, x, base, m, top, None)


def listed(kept: Kept | Raw) -> Kept:
    """The tokens one by one."""
    return kept.all() if isinstance(kept, Raw) else kept
