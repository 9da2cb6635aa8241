"""A whole row of which nothing is written down: float32 scores as they lie in memory, and a few edited tokens.

Scales that are lines are remembered instead of applied. Statistics come from passes over the row; a stage that cuts
gets the top of the ranking as a list, as far down as its decision needs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.generic import kernels
from nucleate.backends.cpu.generic.listed import CLOSE, Floats, Ids, Listed, Undecided, raced, uniforms
from nucleate.backends.cpu.generic.program import Step
from nucleate.backends.cpu.generic.room import Room
from nucleate.backends.cpu.load import FLOAT32
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.special.rows import chains
from nucleate.backends.reference import Whole
from nucleate.backends.rules import line
from nucleate.core import noise
from nucleate.core.event import StepLogprobs
from nucleate.core.stage import Row, Scale

LOWEST = np.finfo(np.float32).min
FEW = 8
"""Rows of so few groups are always listed."""

FLATTEST, STEEPEST = 1e-200, 1e200
"""Beyond these slopes scores might become infinite, or lose digits."""

LITTLE, LIGHTEST = 1e-280, -750.0
"""Weights below the first are not told apart by ``kernels.group_masses``; a token this far below the top has none."""

PARTS = 0.3, 0.03, 0.001
"""Parts of the mass that the tokens looked at leave out, one try after the other; then all are looked at."""

NONE_IDS, NONE_X = np.zeros(0, np.int64), np.zeros(0)


class Uncut:
    """All tokens of a row, as some scales leave them.

    row_V: float32, contiguous, aligned, writeable; edited tokens are at -inf there. ids_K, x_K: the edited tokens, in
    ascending order of ids, and their float64 scores. Raises Undecided if no token can be drawn.
    """

    whole: Whole | None = None

    def __init__(self, work: Room, row_V: NDArray[np.float32], ids_K: Ids = NONE_IDS, x_K: Floats = NONE_X) -> None:
        self.work, self.row_V, self.ids_K, self.x_K = work, row_V, ids_K, x_K
        self.tops_G, self.tail = np.empty(work.groups, np.float32), np.empty(GROUP, np.float32)
        highest = float(kernels.group_tops(row_V, self.tail, self.tops_G))
        self.highest = max(highest, float(x_K.max())) if len(x_K) else highest  #: score of the best token as given
        if not (-np.inf < self.highest < np.inf and highest < np.inf):
            raise Undecided
        self.top = self.highest  #: and after the scales
        self.scales: tuple[tuple[Scale, Row, float], ...] = ()  #: with the top that each saw
        self.inexact = False  #: a scale went through a statistic of ``kernels``
        self.slope, self._blur = 1.0, 0.0
        self._sums: Floats | None = None
        self._masses_G: Floats | None = None

    # statistics

    def statistics(self, names: frozenset[str]) -> Row:
        """As ``Listed.statistics``."""
        mass, entropy, square, n, mean, var = np.nan, np.nan, np.nan, self.work.size, np.nan, np.nan
        if names & {"mass", "entropy", "whole"}:
            mass, share = self._weighed()
            entropy = math.log(mass) - share / mass
        if "square" in names:
            square = self._weigh(2.0 * self.slope, self.work.spare_G)[0]
        if names & {"n", "mean", "var"}:
            n, mean, var = self._moments()
        whole = mass if self.whole is None else max(self.whole.mass * np.exp(self.whole.top - self.top), mass)
        return Row(n, np.float64(0.0), np.float64(mass), np.float64(square), np.float64(entropy), mean, var, whole)

    def _weighed(self) -> Floats:
        if self._sums is None:
            self._masses_G = np.empty(self.work.groups)
            self._sums = self._weigh(self.slope, self._masses_G)
            if -self._sums[1] < LITTLE:  # beside the best tokens, there are at most some that are too light for vectors
                row = self.listed(LIGHTEST).statistics(frozenset(("mass", "entropy")))
                self._sums[:] = row.mass, (np.log(row.mass) - row.entropy) * row.mass
        return self._sums

    def _weigh(self, slope: float, masses_G: Floats) -> Floats:
        """The sums of e and e * d, see ``kernels.group_masses``; those of groups with the edited tokens."""
        sums = np.empty(2)
        kernels.group_masses(self.row_V, self.tail, self.highest, slope, masses_G, sums)
        if len(self.ids_K):
            d_K = np.maximum((self.x_K - self.highest) * slope, -700.0)
            e_K = np.exp(d_K)
            np.add.at(masses_G, self.ids_K // GROUP, e_K)
            sums += e_K.sum(), (e_K * d_K).sum()
        return sums

    def _moments(self) -> tuple[int, float, float]:
        """Number, mean and variance; in two passes, because from the top large means would cancel."""
        n, mean, origin, sums = 0, 0.0, np.float32(self.highest), np.empty(3)
        for _ in range(2):
            kernels.moments(self.row_V, self.tail, self.work.groups, origin, sums)
            d_K = self.x_K - origin
            n = int(sums[0]) + len(d_K)
            mean, squares = (sums[1] + d_K.sum()) / n, (sums[2] + (d_K * d_K).sum()) / n
            var = max(squares - mean * mean, 0.0)
            if not squares < np.inf:
                raise Undecided
            mean, origin = origin + mean, np.float32(origin + mean)
        return n, (mean - self.highest) * self.slope, var * self.slope * self.slope

    # lists

    def listed(self, threshold: float) -> Listed:
        """The tokens at or above a threshold, from the top, and maybe a few more."""
        return self._list(self._raw(threshold))

    def all(self) -> Listed:
        kept = self._list(LOWEST)
        kept.whole = self.whole
        return kept

    def survivors(self) -> reference.Survivors:
        return self.all().survivors()

    def _raw(self, threshold: float, side: float = -1.0) -> np.float32:
        """A score of the row that is surely below a threshold, whatever roundings do; with side 1, above it."""
        below = threshold / self.slope
        score = self.highest + below + side * (self._blur + 1e-6 * (abs(self.highest) + abs(below)))
        given: np.float32 = np.nextafter(np.float32(max(score, float(LOWEST))), np.float32(side * np.inf))
        return given

    def _list(self, score: np.float32) -> Listed:
        """The tokens at or above a score of the row."""
        work, score = self.work, max(score, LOWEST)
        keys_N = work.keys[: kernels.keys_from(self.row_V, self.tail, self.tops_G, score, work.keys)]
        keys_N.sort()
        ids_N = keys_N & 0xFFFFFFFF
        x_N = self.row_V[ids_N].astype(np.float64)
        high_K = self.x_K >= (score if score > LOWEST else -np.inf)  # edited scores are float64
        if high_K.any():
            ids_N, x_N = merged(ids_N, x_N, self.ids_K[high_K], self.x_K[high_K])
        x_N = self._applied(x_N)
        if not -np.inf < x_N[0] < np.inf:
            raise Undecided
        if x_N[-1] == -np.inf:
            ids_N, x_N = ids_N[x_N > -np.inf], x_N[x_N > -np.inf]
        return Listed(ids_N, x_N, inexact=self.inexact)

    # the shapes

    @property
    def uncut(self) -> Whole:
        return self.whole or Whole(self.top, float(self._weighed()[0]))

    def with_whole(self, whole: Whole | None) -> Uncut:
        same = copy.copy(self)
        same.whole = whole
        return same

    def first(self, whole: Whole | None) -> Listed:
        return self.listed(0.0).first(whole)

    def scale(self, step: Step) -> Uncut | Listed:
        stage, row = step.stage, self.statistics(step.kind.names)
        if not stage.monotone:
            return self._by_id().scale(step, row)
        found = line(stage, "apply", row)
        if found is not None and not found.bent and FLATTEST < self.slope * found.slope < STEEPEST:
            return copy.copy(self)._scaled(stage, row, found, inexact=step.kind.inexact)  # noqa: SLF001  # its own
        return self.all().with_whole(None).scale(step)

    def _by_id(self) -> Listed:
        """All tokens in ascending order of ids."""
        x_V = self.row_V.astype(np.float64)
        x_V[self.ids_K] = self.x_K
        ids_N = np.flatnonzero(x_V > -np.inf)
        return Listed(ids_N, self._applied(x_V[ids_N]), inexact=self.inexact, ranked=False)

    def _scaled(self, stage: Scale, row: Row, found: Any, *, inexact: bool) -> Uncut:
        self.scales += ((stage, row, self.top),)
        self.top, self.slope = float(np.asarray(stage.apply(np.zeros(1), row))[0]), self.slope * found.slope
        self._sums = self._masses_G = self.whole = None
        self._blur += 1e-15 * abs(self.top) / self.slope
        self.inexact |= inexact
        return self

    def floor(self, step: Step, whole: Whole | None) -> Listed | Uncut:
        threshold = float(step.stage.floor(self.statistics(step.kind.names)))
        if not threshold <= 0.0:
            return self.first(whole)
        if threshold == -np.inf:
            return self.with_whole(whole)
        inexact, score = self.inexact or step.kind.inexact, self._raw(threshold)
        if 2 * np.count_nonzero(self.tops_G >= score) > len(self.tops_G) > FEW:
            return self._above(threshold, whole, inexact=inexact)
        return self._list(score).above(threshold, whole, inexact=inexact)

    def _above(self, threshold: float, whole: Whole | None, *, inexact: bool) -> Uncut:
        """The tokens at or above a threshold, of which there are too many to list: as a row without the others."""
        low, high = self._raw(threshold), self._raw(threshold, 1.0)
        between_N = np.flatnonzero((self.row_V >= low) & (self.row_V <= high))
        ids_N = np.concatenate((between_N, self.ids_K))
        below_N = self._below(ids_N)
        if inexact and (np.abs(below_N - threshold) <= CLOSE * (1.0 + abs(threshold))).any():
            raise Undecided
        row_V = self.work.row()
        np.copyto(row_V, self.row_V)
        row_V[self.row_V < low] = -np.inf
        return self._left(row_V, ids_N[below_N < threshold], whole)

    def _left(self, row_V: NDArray[np.float32], dropped_N: Ids, whole: Whole | None) -> Uncut:
        """These tokens without some. row_V: a copy of the row, without some others already."""
        row_V[dropped_N] = -np.inf
        stay_K = ~np.isin(self.ids_K, dropped_N)
        left = Uncut(self.work, row_V, self.ids_K[stay_K], self.x_K[stay_K])
        left.scales, left.slope, left.inexact = self.scales, self.slope, self.inexact
        left.top, left.whole = float(left._applied(np.array([left.highest]))[0]), whole  # noqa: SLF001  # its own
        left._blur = self._blur  # noqa: SLF001
        return left

    def prefix(self, step: Step, whole: Whole | None) -> Listed:
        row, inexact = self.statistics(step.kind.names), self.inexact or step.kind.inexact
        for kept in self._candidates(step, row):
            keep_N, reached = kept.first_reaching(step, row, inexact=inexact)
            if reached:
                break
        return kept.cut(keep_N, whole)

    def _candidates(self, step: Step, row: Row) -> Iterator[Listed]:
        """Longer and longer tops of the ranking among which a Prefix finds its tokens; the last one has all."""
        stage, kind, goal = step.stage, step.kind, float(step.stage.target(row))
        if kind.counts and not kind.own_order:
            if 0.0 < goal < self.work.size:
                yield self._best(math.ceil(goal))
        elif kind.summed:
            bent = line(stage, "order", row) if kind.own_order else None
            if not kind.own_order or (bent is not None and bent.bent and bent.slope != 0.0):
                threshold = self._by_mass(0.99 * (self._weighed()[0] - goal))
                if bent is not None:  # nearest to a centre first: all that are as near as those above the threshold
                    threshold = min(threshold, -2.0 * bent.offset / bent.slope)
                if threshold > -np.inf:
                    yield self.listed(threshold - CLOSE * (1.0 + abs(threshold)))
        elif not kind.own_order:
            for part in PARTS:
                yield self.listed(self._by_mass(part * self._weighed()[0]))
        yield self.all()

    def _by_mass(self, rest: float) -> float:
        """A threshold, from the top, below which all tokens together weigh at most ``rest``."""
        mass, _ = self._weighed()
        return float(kernels.threshold_by_mass(self._masses_G, rest)) if rest > CLOSE * mass else -np.inf

    def _best(self, k: int) -> Listed:
        """At least the first k tokens; if there are as many."""
        tops_G = self.tops_G if k <= len(self.tops_G) // 2 else self.row_V
        score = np.partition(tops_G, len(tops_G) - k)[len(tops_G) - k]
        return self._list(score)

    def ceiling(self, step: Step, whole: Whole | None) -> Uncut:
        threshold = float(step.stage.ceiling(self.statistics(step.kind.names)))
        kept = self.listed(min(threshold, 0.0))
        dropped_N = kept.beheaded(step.stage, threshold, inexact=self.inexact or step.kind.inexact)
        if not dropped_N.any():
            return self.with_whole(whole)
        row_V = self.work.row()
        np.copyto(row_V, self.row_V)
        return self._left(row_V, kept.ids_N[dropped_N], whole)

    # what comes of the token drawn

    def log_chance(self, token: int) -> float:
        """The log-probability of a token that is in."""
        return float(self._below(np.array([token]))[0] - math.log(self._weighed()[0]))

    def report(self, token: int, wanted: tuple[int, tuple[int, ...]]) -> StepLogprobs:
        """What a Tap asks for; of the row as given a kernel tells it, with sums in float32."""
        if self.scales or len(self.ids_K) or not all(0 <= one < self.work.size for one in wanted[1]):
            return self.all().report(token, wanted)
        return chains(self.work.size).report((self.row_V, 0, 0, FLOAT32), 0, token, *wanted)

    def scores(self, ids_N: Ids) -> Floats:
        """The scores of some tokens before the scales."""
        x_N = self.row_V[ids_N].astype(np.float64)
        if len(self.ids_K):
            place_N = np.minimum(np.searchsorted(self.ids_K, ids_N), len(self.ids_K) - 1)
            x_N = np.where(self.ids_K[place_N] == ids_N, self.x_K[place_N], x_N)
        return x_N

    def _below(self, ids_N: Ids) -> Floats:
        """The scores of some tokens after the scales, from the top."""
        return self._applied(self.scores(ids_N)) - self.top

    def _applied(self, x_N: Floats) -> Floats:
        """What the scales make of scores as given."""
        for stage, row, top in self.scales:
            x_N = np.asarray(stage.apply(x_N - top, row))
        return x_N

    # the draw

    def draw(self, step: Step, seed: int, place: int) -> int:
        """As ``Listed.draw``."""
        stage = step.stage
        if stage.uniforms == "none":
            return self._by_id().draw(step, seed, place)
        if stage.uniforms == "one":
            return self._walked(step, float(uniforms(seed, place, noise.TOKEN, np.zeros(1, np.int64))[0]))
        self._weighed()
        assert self._masses_G is not None  # noqa: S101  # it is weighed
        groups_G = np.flatnonzero(self._masses_G > LITTLE)  # others are 600 nats behind
        u_G = uniforms(seed, place, noise.GROUP, groups_G)
        winner = int(groups_G[raced(stage, np.log(self._masses_G[groups_G]), u_G, inexact=True)])
        ids_N = np.arange(winner * GROUP, min((winner + 1) * GROUP, self.work.size))
        below_N = self._below(ids_N)
        ids_N, below_N = ids_N[below_N > -np.inf], below_N[below_N > -np.inf]
        return int(ids_N[raced(stage, below_N, uniforms(seed, place, noise.TOKEN, ids_N), inexact=self.inexact)])

    def _walked(self, step: Step, u: float) -> int:
        row = self.with_whole(None).statistics(step.kind.names | {"mass"})
        if step.kind.summed:
            threshold = self._by_mass(0.99 * (row.mass - float(step.stage.target(row, u))))
            token, reached = self.listed(threshold).walked(step.stage, row, u, inexact=True)
            if reached:
                return token
        return self.all().walked(step.stage, row, u, inexact=True)[0]


def merged(ids_N: Ids, x_N: Floats, ids_K: Ids, x_K: Floats) -> tuple[Ids, Floats]:
    """Some tokens put among others that are in the order."""
    order_K = np.lexsort((ids_K, -x_K))
    ids_K, x_K = ids_K[order_K], x_K[order_K]
    at_K, end_K = np.searchsorted(-x_N, -x_K), np.searchsorted(-x_N, -x_K, side="right")
    for i in np.flatnonzero(end_K > at_K):  # equal scores: by id
        at_K[i] += np.searchsorted(ids_N[at_K[i] : end_K[i]], ids_K[i])
    return np.insert(ids_N, at_K, ids_K), np.insert(x_N, at_K, x_K)
