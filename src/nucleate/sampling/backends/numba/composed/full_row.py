"""A whole row of which nothing is written down: its tokens are looked at when a stage needs them, the best ones first.

Scales that are lines are remembered instead of applied. Statistics come from passes over the row; a stage that cuts
gets the top of the ranking as a list, as far down as its decision needs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np

from nucleate.jit.kernel_libraries import GENERIC
from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise
from nucleate.sampling.backends.numba.composed.candidate_list import (
    CLOSE,
    CandidateList,
    Floats,
    Ids,
    UndecidedRow,
    evaluated,
    inside,
    uniform,
)
from nucleate.sampling.backends.numba.composed.edited_row import LOWEST, EditedRow
from nucleate.sampling.backends.numba.composed.logit_shifts import shifted
from nucleate.sampling.backends.numba.composed.pipeline_steps import PipelineStep
from nucleate.sampling.backends.reference import Survivors, TotalMass
from nucleate.sampling.history import HistoryView
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stage import RowStats, Scale
from nucleate.sampling.stages.selection.gumbel import Gumbel

FEW = 8
"""Rows of so few groups are always listed."""

FLATTEST, STEEPEST = 1e-200, 1e200
"""Beyond these slopes scores might become infinite, or lose digits."""

LITTLE, LIGHTEST = 1e-280, -750.0
"""Weights below the first are not told apart by ``row_kernels.group_masses``; a token this far below the top has none.
"""

FAR = 2.0**20
AT, BELOW = np.array([0.0, -FAR]), np.array([-FAR, -2.0 * FAR])
"""Two scores, from the top, that show the slope of a line; and two that show where the absolute value of one is 0."""

PARTS = 0.3, 0.03, 0.001
"""Parts of the mass that the tokens looked at leave out, one try after the other; then all are looked at."""

PROBES = -(2.0 ** np.arange(-4, 24))
"""Scores at which a weight that is negative anywhere below the tokens looked at should show."""

Scales = tuple[tuple[Scale, RowStats, float], ...]
"""With the statistics and the top that each of them saw."""


class FullRow:
    """All tokens of a row, as some scales leave them."""

    whole: TotalMass | None = None  #: see ``CandidateList``

    def __init__(
        self, row: EditedRow, scales: Scales = (), slope: float = 1.0, blur: float = 0.0, *, inexact: bool = False
    ) -> None:
        """slope: of all scales together. blur: how far off they may be. inexact: a statistic of ``kernels`` is in."""
        self.row, self.scales, self.slope, self._blur, self.inexact = row, scales, slope, blur, inexact
        self.top = row.top  #: the highest score after the scales
        self._sums: Floats | None = None
        self._masses_G = np.empty(row.work.groups)

    # statistics

    def statistics(self, names: frozenset[str]) -> RowStats:
        """As ``CandidateList.statistics``."""
        mass, entropy, square, n, mean, var = np.nan, np.nan, np.nan, self.row.work.size, np.nan, np.nan
        if names & {"mass", "entropy", "full_mass"}:
            mass, share = self._weighed().tolist()
            entropy = math.log(mass) - share / mass
        if "square" in names:
            square = self.row.weigh(2.0 * self.slope, self.row.work.spare_G)[0]
        if names & {"mean", "var"}:
            n, mean, var = self._moments()
        elif "n" in names:
            n = self.row.moments(np.float32(self.row.top))[0]
        whole = mass if self.whole is None else max(self.whole.mass * np.exp(self.whole.top - self.top), mass)
        return RowStats(*map(np.float64, (n, 0.0, mass, square, entropy, mean, var, whole)))  # as NumPy divides by 0

    def _weighed(self) -> Floats:
        """The sums of ``EditedRow.weigh`` after the scales."""
        if self._sums is None:
            self._sums = self.row.weigh(self.slope, self._masses_G)
            if -self._sums[1] < LITTLE:  # beside the best tokens, there are at most some that are too light for vectors
                row = self.listed(LIGHTEST).statistics(frozenset(("mass", "entropy")))
                self._sums[:] = row.mass, (np.log(row.mass) - row.entropy) * row.mass
        return self._sums

    def _moments(self) -> tuple[int, float, float]:
        """Number, mean and variance; in two passes, because from the top large means would cancel."""
        origin = np.float32(self.row.top)
        for _ in range(2):
            n, total, squares = self.row.moments(origin)
            mean = total / n
            var, mean = max(squares / n - mean * mean, 0.0), float(origin) + mean
            origin = np.float32(mean)
        if not var < np.inf:
            raise UndecidedRow
        return n, (mean - self.row.top) * self.slope, var * self.slope * self.slope

    # tokens

    def listed(self, threshold: float) -> CandidateList:
        """The tokens at or above a threshold, from the top, and maybe a few more."""
        return self._listed(self._raw(threshold))

    def all(self) -> CandidateList:
        return self._listed(LOWEST).with_whole(self.whole)

    def survivors(self) -> Survivors:
        kept = self.all()
        return Survivors(kept.ids_N, kept.x_N, self.uncut)

    def _raw(self, threshold: float, side: float = -1.0) -> np.float32:
        """A score of the row that is surely below a threshold, whatever roundings do; with side 1, above it."""
        below = threshold / self.slope
        score = self.row.top + below + side * (self._blur + 1e-6 * (abs(self.row.top) + abs(below)))
        return np.nextafter(np.float32(max(score, float(LOWEST))), np.float32(side * np.inf))  # type: ignore[no-any-return]

    def _listed(self, least: np.float32) -> CandidateList:
        ids_N, x_N = self.row.ranked(least)
        x_N = self._scaled(x_N)
        if not -np.inf < x_N[0] < np.inf:
            raise UndecidedRow
        if x_N[-1] == -np.inf:
            ids_N, x_N = ids_N[x_N > -np.inf], x_N[x_N > -np.inf]
        return CandidateList(ids_N, x_N, inexact=self.inexact)

    def _scaled(self, x_N: Floats) -> Floats:
        """What the scales make of scores of the row."""
        for stage, row, top in self.scales:
            x_N = evaluated(stage.apply, x_N - top, row)
        return x_N

    def _below(self, ids_N: Ids) -> Floats:
        """The scores of some tokens, from the top."""
        return self._scaled(self.row.scores(ids_N)) - self.top

    @property
    def uncut(self) -> TotalMass:
        return self.whole or TotalMass(self.top, float(self._weighed()[0]))

    def with_whole(self, whole: TotalMass | None) -> FullRow:
        same = copy.copy(self)
        same.whole = whole
        return same

    def first(self, whole: TotalMass | None) -> CandidateList:
        return self.listed(0.0).first(whole)

    def shift(self, step: PipelineStep, past: HistoryView, size: int) -> FullRow | CandidateList:
        if self.scales:
            return self.all().shift(step, past, size)
        row = shifted(self.row, step.stage, past)
        return self if row is self.row or (self.whole and row.equals(self.row)) else FullRow(row)

    def scale(self, step: PipelineStep) -> FullRow | CandidateList:
        stage, row = step.stage, self.statistics(step.kind.names)
        if not stage.monotone:
            return self._by_id(step, row)
        if step.kind.form == "linear":
            top, far = np.asarray(stage.apply(AT, row)).tolist()
            if FLATTEST < (slope := self.slope * (top - far) / FAR) < STEEPEST:
                blur, inexact = self._blur + 1e-15 * abs(top) / slope, self.inexact or step.kind.inexact
                scaled = FullRow(self.row, (*self.scales, (stage, row, self.top)), slope, blur, inexact=inexact)
                scaled.top = top
                return scaled
        return self.all().with_whole(None).scale(step)

    def _by_id(self, step: PipelineStep, row: RowStats) -> CandidateList:
        """All tokens after a scale, in ascending order of ids: a draw needs no other one."""

        def apply(x_N: Floats, _: RowStats) -> Floats:
            x_N = self._scaled(x_N.astype(np.float64)) if self.scales else x_N
            return np.asarray(step.stage.apply(np.subtract(x_N, self.top, dtype=np.float64), row))

        x_V = evaluated(apply, self.row.row_V, row, self.row.work.scores_V)
        if self.row.row_V.min() == -np.inf:
            x_V[self.row.row_V == -np.inf] = -np.inf
        if len(self.row.ids_K):
            x_V[self.row.ids_K] = apply(self.row.x_K, row)
        ids_N, x_N = inside(self.row.work.ids, x_V)
        return CandidateList(ids_N, x_N, inexact=self.inexact or step.kind.inexact, ranked=False)

    def floor(self, step: PipelineStep, whole: TotalMass | None) -> CandidateList | FullRow:
        threshold = float(step.stage.floor(self.statistics(step.kind.names)))
        if not threshold <= 0.0:
            return self.first(whole)
        if threshold == -np.inf:
            return self.with_whole(whole)
        inexact, least, tops_G = self.inexact or step.kind.inexact, self._raw(threshold), self.row.tops_G
        if not 2 * np.count_nonzero(tops_G >= least) > len(tops_G) > FEW:
            return self._listed(least).above(threshold, whole, inexact=inexact)
        most, row_V = self._raw(threshold, 1.0), self.row.row_V
        if row_V.min() > most:  # all are in
            return self.with_whole(whole)
        # too many tokens to list: the row without the others
        close_N = np.flatnonzero((row_V >= least) & (row_V <= most))
        close_N = np.concatenate((close_N, self.row.ids_K))
        below_N = self._below(close_N)
        if inexact and (np.abs(below_N - threshold) <= CLOSE * (1.0 + abs(threshold))).any():
            raise UndecidedRow
        return self._left(self.row.without(close_N[below_N < threshold], least), whole)

    def _left(self, row: EditedRow, whole: TotalMass | None) -> FullRow:
        """The tokens that are left of the row."""
        left = FullRow(row, self.scales, self.slope, self._blur, inexact=self.inexact)
        left.whole, left.top = whole, float(self._scaled(np.array([row.top]))[0])
        return left

    def prefix(self, step: PipelineStep, whole: TotalMass | None) -> CandidateList:
        row, inexact = self.statistics(step.kind.names), self.inexact or step.kind.inexact
        for kept in self._candidates(step, row):
            keep_N, reached = kept.first_reaching(step, row, inexact=inexact)
            if reached:
                break
        return kept.cut(keep_N, whole)

    def _candidates(self, step: PipelineStep, row: RowStats) -> Iterator[CandidateList]:
        """Longer and longer tops of the ranking among which a Prefix finds its tokens; the last one has all."""
        stage, kind, goal = step.stage, step.kind, float(step.stage.target(row))
        if kind.summed and (kind.form == "abs_linear" or not kind.own_order):
            threshold = self._by_mass(0.99 * (self._weighed()[0] - goal))
            if kind.form == "abs_linear":  # nearest to a centre first: all as near as those above the threshold
                near, far = np.asarray(stage.order(BELOW, row)).tolist()
                centre = near * FAR / (far - near) - FAR if far > near else -np.inf
                threshold = min(threshold, 2.0 * centre) if -FAR / 2.0 < centre < FAR else -np.inf
            if threshold > -np.inf:
                yield self.listed(threshold - 2.0 * CLOSE * (1.0 + abs(threshold)))
        elif kind.counts and not kind.own_order:
            if 0.0 < goal < self.row.work.size:
                yield self._listed(self.row.best(math.ceil(goal)))
        elif not kind.own_order and np.min(stage.weight(PROBES, row)) >= 0.0:
            for part in PARTS:
                yield self.listed(self._by_mass(part * self._weighed()[0]))
        yield self.all()

    def _by_mass(self, rest: float) -> float:
        """A threshold, from the top, below which all tokens together weigh at most ``rest``."""
        mass = self._weighed()[0]
        return float(GENERIC.threshold_by_mass(self._masses_G, rest)) if rest > CLOSE * mass else -np.inf

    def ceiling(self, step: PipelineStep, whole: TotalMass | None) -> FullRow:
        threshold = float(step.stage.ceiling(self.statistics(step.kind.names)))
        kept = self.listed(min(threshold, 0.0))
        dropped_N = kept.beheaded(step.stage, threshold, inexact=self.inexact or step.kind.inexact)
        return self._left(self.row.without(kept.ids_N[dropped_N]), whole) if dropped_N.any() else self.with_whole(whole)

    # what comes of the token drawn

    def log_chance(self, token: int) -> float:
        """The log-probability of a token that is in."""
        return float(self._below(np.array([token]))[0] - math.log(self._weighed()[0]))

    def report(self, token: int, wanted: tuple[int, tuple[int, ...]]) -> StepLogprobs:
        """What a Tap asks for."""
        count, requested = wanted
        named = [one for one in (token, *requested) if 0 <= one < self.row.work.size]
        scores_N = self.row.scores(np.array(named))
        least = float(scores_N[scores_N > -np.inf].min())
        if count:
            least = min(least, float(self.row.best(min(count, self.row.work.size))))
        kept = self._listed(np.nextafter(np.float32(max(least, float(LOWEST))), np.float32(-np.inf)))  # and all before
        own, more = kept.report(token, wanted), math.log(np.exp(kept.below()).sum() / self._weighed()[0])
        moved = [[one._replace(logprob=one.logprob + more) for one in some] for some in ((own.chosen,), *own[1:])]
        return StepLogprobs(moved[0][0], *map(tuple, moved[1:]))

    def draw(self, step: PipelineStep, seed: int, place: int) -> int:
        """As ``CandidateList.draw``."""
        stage, (key, at) = step.stage, map(np.uint64, (seed, place))
        if stage.uniforms == "one":
            return self._walked(step, uniform(seed, place, noise.TOKEN))
        if stage.uniforms == "none" or type(stage).score is not Gumbel.score:
            return self.all().draw(step, seed, place)
        self._weighed()
        winner = GENERIC.race(self.row.work.ids[: len(self._masses_G)], self._masses_G, key, at, noise.GROUP)
        ids_N = self.row.work.ids[max(winner, 0) * GROUP_SIZE : (winner + 1) * GROUP_SIZE]
        token = GENERIC.race(ids_N, np.exp(self._below(ids_N)), key, at, noise.TOKEN)
        if token < 0:
            raise UndecidedRow
        return int(token)

    def _walked(self, step: PipelineStep, u: float) -> int:
        row = self.with_whole(None).statistics(step.kind.names | {"mass"})
        if step.kind.summed:
            threshold = self._by_mass(0.99 * (row.mass - float(step.stage.target(row, u))))
            token, reached = self.listed(threshold).walked(step.stage, row, u, inexact=True)
            if reached:
                return token
        return self.all().walked(step.stage, row, u, inexact=True)[0]
