"""A whole row, evaluated lazily: linear and cubic Scales are recorded, not applied; kernels make statistics.

A truncation stage gets the top of the ranking as a list, as long as its decision needs.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import COMPOSED
from nucleate.outputs import StepLogprobs, TokenLogprob
from nucleate.sampling import noise, reference
from nucleate.sampling.cpu.candidate_list import (
    TIE_TOLERANCE,
    CandidateList,
    UndecidedRow,
    evaluate_rule,
    finite_tokens,
    require_apart,
    require_order,
    uniform,
)
from nucleate.sampling.cpu.edited_row import BINS, BINS_PER_UNIT, LOWEST, PROBE, Curve, EditedRow, apply_shift, fitted
from nucleate.sampling.history import HistoryView
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import Floats, Ids, Survivors, TotalMass
from nucleate.sampling.rules import PipelineStep, StageKind
from nucleate.sampling.stage import RowStats, Scale
from nucleate.sampling.stages.selection import Gumbel

MIN_GROUPS = 8
"""Rows with at most this many groups are always listed."""

LINE = Curve()
MIN_SLOPE, MAX_SLOPE = 1e-200, 1e200
"""Steeper or flatter scales are applied at once: scores could overflow or lose digits."""
MAX_FACTOR = 1e30
"""The same for lines before and after curves."""
CURVES = ("quadratic", "cubic")
"""Forms of rules that are evaluated as curves."""

MIN_WEIGHTED_SUM, MIN_RELATIVE_SCORE = 1e-280, -750.0
"""Sums below the first are too inexact in ``row_kernels.group_masses``; tokens below the second have weight 0."""

LINE_SPAN = 2.0**20
LINE_PROBE, BENT_PROBE = np.array([0.0, -LINE_SPAN]), np.array([-LINE_SPAN, -2.0 * LINE_SPAN])
"""Relative scores at which the slope of a linear rule, and the centre of a bent one, |x - c|, are measured."""

TAIL_FRACTIONS = 0.3, 0.03, 0.001
"""Fractions of the mass left out of successive candidate lists; the last list has all tokens."""

FLAT_GROUPS = 8.0
"""Rows whose groups' maxima weigh as much as this many equal ones are sorted into bins: lists would be too long."""
WEIGHT_PROBE = np.array([0.0, -1.0, -2.0, -8.0])
"""Relative scores at which a weight is checked for being a line times the softmax weight."""

NEGATIVE_WEIGHT_PROBE = -(2.0 ** np.arange(-4, 24))
"""Relative scores at which weights are checked for being negative below the candidates."""

ROUNDING = 1e-6
"""Errors of distances, in bins, are smaller."""

NO_NAMES, COUNT = frozenset[str](), frozenset(("n",))

Scales = tuple[tuple[Scale, RowStats, float], ...]
"""Scales, each with the statistics and the maximum that it is applied with."""


class Boundary(NamedTuple):
    """The tokens around the place where weights reach a target, in the order of their stage."""

    row_V: NDArray[np.float32]  #: the row with only the tokens before them
    ids_N: Ids
    relative_N: Floats  #: their scores relative to the maximum
    key_N: Floats  #: what they are ordered by
    sums_N: Floats  #: the weights of all tokens up to each


class FullRow:
    """All tokens of a row, after some Scales."""

    total: TotalMass | None = None  #: see ``CandidateList``

    def __init__(
        self, row: EditedRow, scales: Scales = (), curve: Curve = LINE, error: float = 0.0, *, inexact: bool = False
    ) -> None:
        """curve: of all scales. error: rounding error of raw scores. inexact: see ``CandidateList``."""
        self.row, self.scales, self.curve, self._error, self.inexact = row, scales, curve, error, inexact
        self.top = row.top  #: the maximum score after the scales
        self._sums: Floats | None = None
        self._masses_G = np.empty(row.work.groups)

    def statistics(self, names: frozenset[str], sorted_count: int = 0) -> RowStats:
        """As ``CandidateList.statistics``."""
        if self.curve.bent and names & {"mean", "var"}:
            return self.ranked_list().statistics(names, sorted_count)
        mass, entropy, square, n, mean, var = np.nan, np.nan, np.nan, self.row.work.size, np.nan, np.nan
        if names & {"mass", "entropy", "square", "full_mass"}:
            mass, weighted_sum, square = self._mass_sums().tolist()
            entropy = math.log(mass) - weighted_sum / mass
        if names & {"mean", "var"}:
            n, mean, var = self._moments()
        elif "n" in names:
            n = self.row.count()
        total = mass if self.total is None else max(self.total.mass * np.exp(self.total.top - self.top), mass)
        scores = self._first(sorted_count).statistics(NO_NAMES, sorted_count).sorted_scores if sorted_count else None
        values = map(np.float64, (n, 0.0, mass, square, entropy, mean, var, total))  # not floats: 1 / 0 is inf
        return RowStats(*values)._replace(sorted_scores=scores)

    def _mass_sums(self) -> Floats:
        """``EditedRow.mass_sums`` after the scales."""
        if self._sums is None:
            self._sums = self.row.mass_sums(self.curve, self._masses_G)
            if -self._sums[1] < MIN_WEIGHTED_SUM:  # all but the top tokens underflow in the kernel
                row = self.list_above(MIN_RELATIVE_SCORE).statistics(frozenset(("mass", "entropy", "square")))
                self._sums[:] = row.mass, (np.log(row.mass) - row.entropy) * row.mass, row.square
        return self._sums

    def _sort_into_bins(self, kind: StageKind) -> bool:
        """Whether the boundary of a Prefix or a Draw is found by bins; then makes them, together with the sums."""
        if self.curve.bent or len(self.row.ids_K) or len(self.row.maxima_G) <= MIN_GROUPS or kind.unit_weights:
            return False
        if kind.has_order and kind.form != "abs_linear":
            return False
        weights_G = np.exp(np.subtract(self.row.maxima_G, self.row.top, dtype=np.float64) * self.curve.slope)
        if weights_G.sum() ** 2 < FLAT_GROUPS * weights_G.dot(weights_G):
            return False
        self._sums = self.row.binned_masses(self.curve.slope, self._masses_G, 1 if kind.softmax_weights else 2)
        return True

    def _moments(self) -> tuple[int, float, float]:
        """Count, mean and variance, in two passes: relative to the maximum, large means would cancel."""
        origin = np.float32(self.row.top)
        for _ in range(2):
            n, total, squares = self.row.moments(origin)
            mean = total / n
            var, mean = max(squares / n - mean * mean, 0.0), float(origin) + mean
            origin = np.float32(mean)
        if not var < np.inf:
            raise UndecidedRow
        slope = self.curve.slope
        return n, (mean - self.row.top) * slope, var * slope * slope

    def list_above(self, threshold: float) -> CandidateList:
        """The tokens at or above a relative threshold, and possibly a few more."""
        return self._list_raw(self._raw_bound(threshold))

    def _first(self, count: int) -> CandidateList:
        """The first tokens in rank order, at least so many."""
        return self._list_raw(self.row.kth_bound(count))

    def ranked_list(self) -> CandidateList:
        return self._list_raw(LOWEST).with_total(self.total)

    def survivors(self) -> Survivors:
        kept = self.ranked_list()
        return Survivors(kept.ids_N, kept.x_N, self.total_mass)

    def _raw_bound(self, threshold: float, side: float = -1.0) -> np.float32:
        """A raw score certainly below a relative threshold despite rounding; with side 1, above it."""
        relative = self._bent_bound(threshold, side) if self.curve.bent else threshold / self.curve.slope
        score = self.row.top + relative + side * (self._error + 1e-6 * (abs(self.row.top) + abs(relative)))
        return np.nextafter(np.float32(max(score, float(LOWEST))), np.float32(side * np.inf))  # type: ignore[no-any-return]

    def _bent_bound(self, threshold: float, side: float) -> float:
        """A difference of raw scores from the maximum below a relative threshold; with side 1, above it."""
        z_N = PROBE
        for _ in range(2):
            after_N = self._apply_scales(self.row.top + z_N) - self.top  # falls
            count = np.count_nonzero(after_N >= threshold) if side < 0.0 else np.count_nonzero(after_N > threshold)
            if count == len(z_N):
                return float(z_N[-1]) if side > 0.0 else -np.inf
            if count == 0:
                return 0.0
            z_N = np.linspace(z_N[count - 1], z_N[count], 65)
        return float(z_N[64 if side < 0.0 else 0])

    def _list_raw(self, lowest: np.float32) -> CandidateList:
        ids_N, x_N = self.row.ranked(lowest)
        x_N = self._apply_scales(x_N)
        if not -np.inf < x_N[0] < np.inf:
            raise UndecidedRow
        if self.curve.bent and not (x_N[1:] <= x_N[:-1]).all():  # rounding has changed the order
            raise UndecidedRow
        if x_N[-1] == -np.inf:
            ids_N, x_N = ids_N[x_N > -np.inf], x_N[x_N > -np.inf]
        return CandidateList(ids_N, x_N, inexact=self.inexact)

    def _apply_scales(self, x_N: Floats) -> Floats:
        """The scores after the scales."""
        for stage, row, top in self.scales:
            x_N = evaluate_rule(stage.apply, x_N - top, row)
        return x_N

    def _relative_scores(self, ids_N: Ids) -> Floats:
        """The scores of some tokens relative to the maximum."""
        return self._apply_scales(self.row.scores(ids_N)) - self.top

    @property
    def total_mass(self) -> TotalMass:
        return self.total or TotalMass(self.top, float(self._mass_sums()[0]))

    def with_total(self, total: TotalMass | None) -> FullRow:
        copied = copy.copy(self)
        copied.total = total
        return copied

    def first_token(self, total: TotalMass | None) -> CandidateList:
        return self.list_above(0.0).first_token(total)

    def shift(self, step: PipelineStep, past: HistoryView, size: int) -> FullRow | CandidateList:
        if self.scales or (self.total and step.stage.touches == "all"):
            return self.ranked_list().shift(step, past, size)
        row = apply_shift(self.row, step.stage, past)
        return self if row is self.row or (self.total and row.equals(self.row)) else FullRow(row)

    def transform(self, step: PipelineStep, past: HistoryView) -> CandidateList:
        return self.ranked_list().transform(step, past)

    def scale(self, step: PipelineStep) -> FullRow | CandidateList:
        stage, row = step.stage, self.statistics(step.kind.names, step.kind.sorted_count)
        if not stage.monotone:
            return self._scale_unranked(step, row)
        curve, top = None, 0.0
        if step.kind.form == "linear":
            top, far_score = np.asarray(stage.apply(LINE_PROBE, row)).tolist()
            factor = (top - far_score) / LINE_SPAN
            if self.curve.bent and top == 0.0 and 1.0 / MAX_FACTOR < factor < MAX_FACTOR:
                curve = self.curve.times(factor)
            elif not self.curve.bent and MIN_SLOPE < self.curve.slope * factor < MAX_SLOPE:
                curve = Curve(self.curve.slope * factor)
        elif step.kind.form in CURVES and not self.curve.bent and 1.0 / MAX_FACTOR < self.curve.slope < MAX_FACTOR:
            found = fitted(stage.apply, row)
            curve = found and found.after(self.curve.slope)
        if curve is None:
            return self.ranked_list().with_total(None).scale(step)
        error = self._error + (1e-15 * abs(top) / curve.slope if top != 0.0 else 0.0)
        scales, inexact = (*self.scales, (stage, row, self.top)), self.inexact or step.kind.inexact
        scaled = FullRow(self.row, scales, curve, error, inexact=inexact)
        scaled.top = top
        return scaled

    def _scale_unranked(self, step: PipelineStep, row: RowStats) -> CandidateList:
        """All tokens after a Scale, in ascending order of ids; ranked later if a stage needs it."""

        def apply(x_N: Floats, _: RowStats) -> Floats:
            x_N = self._apply_scales(x_N.astype(np.float64)) if self.scales else x_N
            return np.asarray(step.stage.apply(np.subtract(x_N, self.top, dtype=np.float64), row))

        x_V = evaluate_rule(apply, self.row.row_V, row, self.row.work.scratch_V)
        if self.row.row_V.min() == -np.inf:
            x_V[self.row.row_V == -np.inf] = -np.inf
        if len(self.row.ids_K):
            x_V[self.row.ids_K] = apply(self.row.x_K, row)
        ids_N, x_N = finite_tokens(self.row.work.ids, x_V)
        return CandidateList(ids_N, x_N, inexact=self.inexact or step.kind.inexact, ranked=False)

    def floor(self, step: PipelineStep, total: TotalMass | None) -> CandidateList | FullRow:
        threshold = float(step.stage.floor(self.statistics(step.kind.names, step.kind.sorted_count)))
        if threshold == -np.inf:
            return self.with_total(total)
        if not threshold <= 0.0 and step.min_keep <= 1:
            return self.first_token(total)
        lowest, maxima_G = self._raw_bound(min(threshold, 0.0)), self.row.maxima_G
        if step.min_keep > 1:
            lowest = min(lowest, self.row.kth_bound(step.min_keep))
        inexact, many = self.inexact or step.kind.inexact, 2 * np.count_nonzero(maxima_G >= lowest) > len(maxima_G)
        if step.min_keep > 1 or not many or len(maxima_G) <= MIN_GROUPS:
            return self._list_raw(lowest).above(threshold, total, step.min_keep, inexact=inexact)

        def keeps(ids_N: Ids) -> NDArray[np.bool_]:
            relative_N = self._relative_scores(ids_N)
            if inexact and (np.abs(relative_N - threshold) <= TIE_TOLERANCE * (1.0 + abs(threshold))).any():
                raise UndecidedRow
            kept_N: NDArray[np.bool_] = relative_N >= threshold
            return kept_N

        row = self.row.at_least(lowest, self._raw_bound(threshold, 1.0), keeps)  # too many tokens to list
        return self.with_total(total) if row is self.row else self._with_row(row, total)

    def _with_row(self, row: EditedRow, total: TotalMass | None) -> FullRow:
        """The same scales on a row with fewer tokens."""
        curve = self.curve.shifted(row.top - self.row.top) if self.curve.bent else self.curve
        left = FullRow(row, self.scales, curve, self._error, inexact=self.inexact)
        left.total, left.top = total, float(self._apply_scales(np.array([row.top]))[0])
        return left

    def prefix(self, step: PipelineStep, total: TotalMass | None) -> CandidateList | FullRow:
        binned = not step.stage.ties and self._sort_into_bins(step.kind)
        row = self.statistics(step.kind.names, step.kind.sorted_count)
        if binned and (kept := self._prefix_by_bins(step, row, total)) is not None:
            return kept
        inexact = self.inexact or step.kind.inexact
        for some in self._candidates(step, row):
            keep_N, reached = some.prefix_mask(step, row, inexact=inexact)
            if reached:
                break
        return some.select(keep_N, total)

    def _prefix_by_bins(self, step: PipelineStep, row: RowStats, total: TotalMass | None) -> FullRow | None:
        """What a Prefix keeps of a row in bins. None if another way is needed."""
        stage, target = step.stage, float(step.stage.target(row))
        found = self._boundary(stage, step.kind, row, target, copy=True)
        if found is None:
            return None
        count = int(found.sums_N.searchsorted(target, "left" if stage.inclusive else "right")) + stage.inclusive
        if not 0 < count < len(found.sums_N):
            raise UndecidedRow
        require_apart(found.sums_N[max(count - 2, 0) : count + 1], target, target)
        if step.kind.has_order:
            require_order(found.key_N[count - 1 : count + 1], found.relative_N[count - 1 : count + 1])
        ids_N = found.ids_N[:count]
        found.row_V[ids_N] = self.row.row_V[ids_N]
        kept = EditedRow(self.row.work, found.row_V)
        left = self._with_row(kept, total)
        return left if step.min_keep <= 1 or kept.count() >= step.min_keep else None

    def _boundary(self, stage: Any, kind: StageKind, row: RowStats, target: float, *, copy: bool) -> Boundary | None:
        """The tokens around the place where the weights of a Prefix or a Draw reach a target, in its order.

        Of a row in bins, see ``_sort_into_bins``: only the tokens of a few bins are sorted. None for other orders and
        weights than are known, and if the bins do not reach the place. copy: whether the row of the tokens before them
        is needed.
        """
        line_N = np.asarray(stage.weight(WEIGHT_PROBE, row)) * np.exp(-WEIGHT_PROBE)
        first, slant = float(line_N[0]), float(line_N[0] - line_N[1])
        if not (np.abs(first + slant * WEIGHT_PROBE - line_N) <= 1e-12 * first).all() or slant > 1e-15 * first:
            return None
        histogram, sums = self.row.work.histogram, np.zeros(BINS + 1)  # weights of all tokens before each bin
        weights = first * histogram[0] if kind.softmax_weights else first * histogram[0] + slant * histogram[1]
        weights.cumsum(out=sums[1:])
        if not 0.0 < target < sums[BINS - 1]:
            return None
        if kind.has_order:
            kept, listed = _bins_around(-self._centre(stage, row) * BINS_PER_UNIT, sums, target)
        else:
            place = int(sums.searchsorted(target))
            kept, listed = range(max(place - 2, 0)), range(max(place - 2, 0), place + 1)
        if listed.stop >= BINS:
            return None
        row_V, ids_N = self.row.split_bins(kept, listed, copy=copy)
        ids_N, x_N = reference.ranked(ids_N, self._apply_scales(self.row.scores(ids_N)))
        relative_N = x_N - self.top
        key_N = -relative_N
        if kind.has_order:
            key_N = evaluate_rule(stage.order, relative_N, row)
            order_N = key_N.argsort(kind="stable")
            ids_N, relative_N, key_N = ids_N[order_N], relative_N[order_N], key_N[order_N]
        sums_N = sums[kept.stop] - sums[kept.start] + evaluate_rule(stage.weight, relative_N, row).cumsum()
        return Boundary(row_V, ids_N, relative_N, key_N, sums_N)

    @staticmethod
    def _centre(stage: Any, row: RowStats) -> float:
        """The relative score c that an order like abs(x - c) prefers; NaN if it is out of reach."""
        near, far_score = np.asarray(stage.order(BENT_PROBE, row)).tolist()
        factor = (far_score - near) / LINE_SPAN
        centre = near / factor - LINE_SPAN if factor > 0.0 else math.nan
        return centre if abs(centre) < LINE_SPAN / 2.0 else math.nan

    def _candidates(self, step: PipelineStep, row: RowStats) -> Iterator[CandidateList]:
        """Longer and longer tops of the ranking for a Prefix; the last one has all tokens."""
        stage, kind, target = step.stage, step.kind, float(step.stage.target(row))
        if kind.softmax_weights and (kind.form == "abs_linear" or not kind.has_order):
            threshold = self._mass_threshold(0.99 * (self._mass_sums()[0] - target))
            if kind.form == "abs_linear":  # ordered by |x - centre|: reflect the threshold
                centre = self._centre(stage, row)
                threshold = -np.inf if math.isnan(centre) else min(threshold, 2.0 * centre)
            if threshold > -np.inf:
                yield self.list_above(threshold - 2.0 * TIE_TOLERANCE * (1.0 + abs(threshold)))
        elif kind.unit_weights and not kind.has_order:
            if 0.0 < target < self.row.work.size:
                yield self._first(max(math.ceil(target), step.min_keep))
        elif not kind.has_order and np.min(stage.weight(NEGATIVE_WEIGHT_PROBE, row)) >= 0.0:
            for fraction in TAIL_FRACTIONS:
                yield self.list_above(self._mass_threshold(fraction * self._mass_sums()[0]))
        yield self.ranked_list()

    def _mass_threshold(self, rest: float) -> float:
        """A relative threshold below which all tokens together weigh at most ``rest``."""
        mass = self._mass_sums()[0]
        return float(COMPOSED.threshold_by_mass(self._masses_G, rest)) if rest > TIE_TOLERANCE * mass else -np.inf

    def ceiling(self, step: PipelineStep, total: TotalMass | None) -> FullRow:
        threshold = float(step.stage.ceiling(self.statistics(step.kind.names, step.kind.sorted_count)))
        kept = self.list_above(min(threshold, 0.0))
        dropped_N = kept.ceiling_mask(step.stage, threshold, inexact=self.inexact or step.kind.inexact)
        left = self.statistics(COUNT).n - np.count_nonzero(dropped_N) if step.min_keep > 1 else 1
        if not dropped_N.any() or left < step.min_keep:
            return self.with_total(total)
        return self._with_row(self.row.without(kept.ids_N[dropped_N]), total)

    def logprob(self, token: int) -> float:
        """The log-probability of a surviving token."""
        return float(self._relative_scores(np.array([token]))[0] - math.log(self._mass_sums()[0]))

    def step_logprobs(self, token: int, request: tuple[int, tuple[int, ...]]) -> StepLogprobs:
        """The logprobs for a Tap. request: ``Tap.request``."""
        count, requested = request
        if self.scales:  # they may make scores equal, and of equal scores the lowest ids are reported
            return self._listed_logprobs(token, request)
        log_mass = math.log(self._mass_sums()[0])

        def one(token: int) -> TokenLogprob:
            score = float(self.row.scores(np.array([token]))[0]) if 0 <= token < self.row.work.size else -np.inf
            if score == -np.inf:
                return TokenLogprob(token, -np.inf, None)
            return TokenLogprob(token, score - self.top - log_mass, 1 + self.row.count_ahead(token, score))

        first = self._first(count) if count else None
        ranked = zip(first.ids_N[:count].tolist(), first.x_N[:count].tolist(), strict=True) if first else ()
        most_likely = [TokenLogprob(one, x - self.top - log_mass, rank) for rank, (one, x) in enumerate(ranked, 1)]
        return StepLogprobs(one(token), tuple(most_likely), tuple(map(one, requested)))

    def _listed_logprobs(self, token: int, request: tuple[int, tuple[int, ...]]) -> StepLogprobs:
        """``step_logprobs`` from a list of all tokens down to the lowest of those to report."""
        count, requested = request
        scores_N = self.row.scores(np.array([one for one in (token, *requested) if 0 <= one < self.row.work.size]))
        lowest = float(scores_N[scores_N > -np.inf].min())
        if count:
            lowest = min(lowest, float(self.row.kth_bound(count)))
        last = float(self._apply_scales(np.array([lowest]))[0] - self.top)
        bound = self._raw_bound(min(last, 0.0)) if last > -np.inf else LOWEST
        kept = self._list_raw(np.nextafter(min(np.float32(lowest), bound), np.float32(-np.inf)))
        result = kept.step_logprobs(token, request)  # relative to the mass of the list
        offset = math.log(np.exp(kept.relative_scores()).sum() / self._mass_sums()[0])
        parts = [[one._replace(logprob=one.logprob + offset) for one in some] for some in ((result[0],), *result[1:])]
        return StepLogprobs(parts[0][0], *map(tuple, parts[1:]))

    def draw(self, step: PipelineStep, seed: int, step_index: int) -> int:
        """As ``CandidateList.draw``."""
        stage, (key, counter) = step.stage, map(np.uint64, (seed, step_index))
        if stage.uniforms == "one":
            return self._draw_by_cdf(step, uniform(seed, step_index, noise.TOKEN))
        if stage.uniforms == "none" or type(stage).score is not Gumbel.score:
            return self.ranked_list().draw(step, seed, step_index)
        winner = self.row.winning_group(self.curve, key, counter)
        ids_N = self.row.work.ids[max(winner, 0) * GROUP_SIZE : (winner + 1) * GROUP_SIZE]
        token = COMPOSED.gumbel_race(ids_N, np.exp(self._relative_scores(ids_N)), key, counter, noise.TOKEN)
        if token < 0:
            raise UndecidedRow
        return int(token)

    def _draw_by_cdf(self, step: PipelineStep, u: float) -> int:
        stage, kind = step.stage, step.kind
        binned = kind.softmax_weights and self._sort_into_bins(kind)
        self._mass_sums()  # shared with the copy
        row = self.with_total(None).statistics(kind.names | {"mass"})
        if kind.softmax_weights:
            target = float(stage.target(row, u))
            found = self._boundary(stage, kind, row, target, copy=False) if binned else None
            if found is not None:
                index = int(found.sums_N.searchsorted(target))
                if index == len(found.sums_N):
                    raise UndecidedRow
                require_apart(found.sums_N[max(index - 1, 0) : index + 1], target, target)
                return int(found.ids_N[index])
            threshold = self._mass_threshold(0.99 * (row.mass - target))
            token, reached = self.list_above(threshold).draw_by_cdf(stage, row, u, inexact=True)
            if reached:
                return token
        return self.ranked_list().draw_by_cdf(stage, row, u, inexact=True)[0]


def _bins_around(centre: float, sums: Floats, target: float) -> tuple[range, range]:
    """Bins that are all nearer to a place than the token at which weights reach a target, and those up to it.

    centre: the place, in bins. sums: of the weights before each bin. The window around the centre whose whole bins
    reach the target is found to half a bin. All bins that a window touches are inside one that is wider by one: that
    token is at most 1.5 bins from the edges, and half a bin more has its neighbours.
    """

    def inside(radius: float) -> range:
        start, end = max(math.ceil(centre - radius), 0), min(math.floor(centre + radius), BINS)
        return range(start, max(start, end))

    def reach(half_bins: int) -> float:
        whole = inside(half_bins / 2.0)
        return sums.item(whole.stop) - sums.item(whole.start)

    if not abs(centre) < BINS:
        return range(0), range(BINS)
    radius = bisect_left(range(4 * BINS), target, key=reach) / 2.0
    return inside(max(radius - 1.5 - ROUNDING, 0.0)), inside(radius + 1.5)
