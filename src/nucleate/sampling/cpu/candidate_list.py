"""A list of surviving tokens; stage rules are evaluated on it directly, as in the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import COMPOSED
from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise, reference
from nucleate.sampling.history import HistoryView
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import Floats, Ids, Survivors, TotalMass
from nucleate.sampling.rules import EXACT_STATISTICS, PipelineStep
from nucleate.sampling.stage import RowStats
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.token_logprobs import logprobs

TIE_TOLERANCE = 1e-9
"""Closer decisions that depend on sums of ``row_kernels`` are left to the reference. The sums are exact to 1e-12, and
no built-in rule magnifies their error a hundredfold; scores of real rows are hardly ever this close."""

MIN_FLOAT64 = np.finfo(np.float64).min

BLOCK_SIZE = 8192
"""Scores per evaluation of a rule: what it allocates stays in the cache."""


class UndecidedRow(Exception):  # noqa: N818  # control flow, not an error
    """The row is left to the reference: a decision is too close, or the row is invalid."""


def require_apart(some_N: Floats, other: float, scale: float) -> None:
    """Raise UndecidedRow if the error of sums could move one of a few numbers across another one."""
    if any(abs(one - other) <= TIE_TOLERANCE * scale for one in some_N.tolist()):
        raise UndecidedRow


def require_order(key_2: Floats, relative_2: Floats) -> None:
    """The same for the keys of two tokens, which may change places only if their scores differ."""
    if relative_2[0] != relative_2[1]:
        require_apart(key_2[1:], key_2[0], 1.0 + abs(key_2[0]))


class CandidateList:
    """Tokens and float64 scores, in rank order: score descending, then id ascending.

    total: ``reference.TotalMass``; None before any truncation since the last Shift or Scale, or if no rule needs it.
    inexact: scores depend on a sum of ``row_kernels``. ranked: False for tokens in ascending order of ids instead.
    """

    __slots__ = ("_mass", "_top", "ids_N", "inexact", "ranked", "total", "x_N")

    def __init__(
        self, ids_N: Ids, x_N: Floats, total: TotalMass | None = None, *, inexact: bool = False, ranked: bool = True
    ) -> None:
        self.ids_N, self.x_N, self.total, self.inexact, self.ranked = ids_N, x_N, total, inexact, ranked
        self._mass: Any = None
        self._top: Any = x_N[0] if ranked else None

    @property
    def top(self) -> Any:
        if self._top is None:
            self._top = self.x_N.max()
        return self._top

    def relative_scores(self) -> Floats:
        """The scores relative to the maximum, as rules take them."""
        relative_N: Floats = self.x_N - self.top
        return relative_N

    def ranked_list(self) -> CandidateList:
        """These tokens, ranked."""
        if self.ranked:
            return self
        ids_N, x_N = reference.ranked(self.ids_N, self.x_N)
        return CandidateList(ids_N, x_N, self.total, inexact=self.inexact)

    def survivors(self) -> Survivors:
        """The tokens as ``reference.Survivors``."""
        kept = self.ranked_list()
        return Survivors(kept.ids_N, kept.x_N, kept.total_mass)

    def statistics(self, names: frozenset[str], sorted_count: int = 0) -> RowStats:
        """The named row statistics, as in ``reference.relative_scores``; others may be NaN. Scores must be ranked."""
        n, zero, missing = len(self.x_N), np.float64(0.0), np.nan
        scores = reference.padded(self.x_N[:sorted_count] - self.top, sorted_count) if sorted_count else None
        if not names - EXACT_STATISTICS:
            return RowStats(n, zero, missing, missing, missing, missing, missing, missing, scores)
        if names & {"mean", "var"}:
            row = reference.statistics(self.relative_scores())
            mass, square, entropy, mean, var = row.mass, row.square, row.entropy, row.mean, row.var
        else:
            relative_N = np.maximum(self.relative_scores(), MIN_FLOAT64)
            e_N = np.exp(relative_N)
            mass, square, entropy, mean, var = e_N.sum(), missing, missing, missing, missing
            if "square" in names:
                square = (e_N * e_N).sum()
            if "entropy" in names:
                entropy = np.log(mass) - (e_N * relative_N).sum() / mass
        total = mass if self.total is None else max(self.total.mass * np.exp(self.total.top - self.top), mass)
        return RowStats(n, zero, mass, square, entropy, mean, var, total, scores)

    def select(self, keep_N: NDArray[np.bool_] | slice, total: TotalMass | None) -> CandidateList:
        return CandidateList(self.ids_N[keep_N], self.x_N[keep_N], total, inexact=self.inexact)

    def first_token(self, total: TotalMass | None) -> CandidateList:
        kept = self.ranked_list()
        return CandidateList(kept.ids_N[:1], kept.x_N[:1], total, inexact=self.inexact)

    @property
    def total_mass(self) -> TotalMass:
        return self.total or TotalMass(float(self.top), float(np.exp(self.x_N - self.top).sum()))

    def with_total(self, total: TotalMass | None) -> CandidateList:
        return CandidateList(self.ids_N, self.x_N, total, inexact=self.inexact, ranked=self.ranked)

    def shift(self, step: PipelineStep, past: HistoryView, size: int) -> CandidateList:
        """Apply a Shift after a Scale or a truncation, as the reference does, on all tokens. size: V."""
        if self.inexact and step.stage.touches == "all":  # rounds
            raise UndecidedRow
        before = self.survivors()
        after = reference.apply_shift(before, step.stage, past, size)
        return self if after is before else CandidateList(after.ids_N, after.x_N, None, inexact=self.inexact)

    def transform(self, step: PipelineStep, past: HistoryView) -> CandidateList:
        """Apply a Transform, as the reference does."""
        if self.inexact:
            raise UndecidedRow
        before = self.survivors()
        after = reference.apply_transform(before, step.stage, past)
        return self if after is before else CandidateList(after.ids_N, after.x_N)

    def scale(self, step: PipelineStep) -> CandidateList:
        kept, stage = self.ranked_list(), step.stage
        x_N = evaluate_rule(
            stage.apply, kept.relative_scores(), kept.statistics(step.kind.names, step.kind.sorted_count)
        )
        ids_N, x_N = finite_tokens(kept.ids_N, x_N)
        if not stage.monotone:  # ranked later if a stage needs it
            by_id_N = np.argsort(ids_N)
            return CandidateList(ids_N[by_id_N], x_N[by_id_N], inexact=self.inexact, ranked=False)
        if not (x_N[1:] <= x_N[:-1]).all():
            ids_N, x_N = reference.ranked(ids_N, x_N)
        return CandidateList(ids_N, x_N, inexact=self.inexact)

    def floor(self, step: PipelineStep, total: TotalMass | None) -> CandidateList:
        kept = self.ranked_list()
        threshold = float(step.stage.floor(kept.statistics(step.kind.names, step.kind.sorted_count)))
        return kept.above(threshold, total, step.min_keep, inexact=self.inexact)

    def above(self, threshold: float, total: TotalMass | None, min_keep: int = 1, *, inexact: bool) -> CandidateList:
        """The tokens at or above a relative threshold, and always the first ``min_keep``."""
        return self.select(slice(max(self.count_at_least(threshold, inexact=inexact), min_keep)), total)

    def count_at_least(self, threshold: float, *, inexact: bool) -> int:
        """The number of tokens at or above a relative threshold."""
        relative_N = self.relative_scores()
        count = int(np.count_nonzero(relative_N >= threshold))
        if inexact:
            require_apart(relative_N[max(count - 1, 1) : count + 1], threshold, 1.0 + abs(threshold))
        return count

    def prefix(self, step: PipelineStep, total: TotalMass | None) -> CandidateList:
        kept = self.ranked_list()
        row = kept.statistics(step.kind.names, step.kind.sorted_count)
        keep_N, _ = kept.prefix_mask(step, row, inexact=self.inexact)
        return kept.select(keep_N, total)

    def prefix_mask(
        self, step: PipelineStep, row: RowStats, *, inexact: bool
    ) -> tuple[NDArray[np.bool_] | slice, bool]:
        """The tokens that a Prefix keeps, and whether their weights reach its target (else more tokens may be kept).

        As ``reference.prefix_mask``. row: statistics of all tokens, of which these may be only the highest-ranked.
        """
        stage, kind, relative_N, order_N = step.stage, step.kind, self.relative_scores(), None
        weight_N = evaluate_rule(stage.weight, relative_N, row)
        if kind.has_order:
            key_N = evaluate_rule(stage.order, relative_N, row)
            order_N = key_N.argsort(kind="stable")
            weight_N = weight_N[order_N]
        target, sums_N = float(stage.target(row)), weight_N.cumsum()
        if not weight_N.min() >= 0.0 or target != target:  # noqa: PLR0124  # negative weights or NaN
            raise UndecidedRow
        if stage.inclusive:  # keep tokens whose preceding sum is below the target
            count = int(sums_N.searchsorted(target)) + 1
            reached = count <= len(sums_N)
        else:
            count = int(sums_N.searchsorted(target, side="right"))
            reached = count < len(sums_N)
        reached = reached and len(sums_N) >= step.min_keep
        count = min(max(count, step.min_keep), len(sums_N))
        if inexact:
            if not kind.unit_weights or kind.names - {"top"}:
                require_apart(sums_N[max(count - 2, 0) : count + 1], target, abs(target))
            if order_N is not None and count < len(order_N):
                last = order_N[count - 1 : count + 1]
                require_order(key_N[last], relative_N[last])
        if order_N is None and not stage.ties:
            return slice(count), reached
        keep_N = np.zeros(len(relative_N), bool)
        keep_N[slice(count) if order_N is None else order_N[:count]] = True
        if stage.ties:
            keep_N |= self.x_N >= self.x_N[keep_N].min()
        return keep_N, reached

    def ceiling(self, step: PipelineStep, total: TotalMass | None) -> CandidateList:
        kept = self.ranked_list()
        threshold = float(step.stage.ceiling(kept.statistics(step.kind.names, step.kind.sorted_count)))
        dropped_N = kept.ceiling_mask(step.stage, threshold, inexact=self.inexact)
        if len(dropped_N) - np.count_nonzero(dropped_N) < step.min_keep:
            return kept.with_total(total)
        return kept.select(~dropped_N, total)

    def ceiling_mask(self, stage: Any, threshold: float, *, inexact: bool) -> NDArray[np.bool_]:
        """The tokens that a Ceiling drops: those at or above a threshold, except the last of them and exempt ones."""
        above_N, count = np.zeros(len(self.ids_N), bool), self.count_at_least(threshold, inexact=inexact)
        above_N[: max(count - 1, 0)] = True
        return above_N & ~np.isin(self.ids_N, stage.exempt_ids) if stage.exempt_ids else above_N

    def logprob(self, token: int) -> float:
        """The log-probability of a surviving token."""
        if self._mass is None:
            self._mass = np.exp(self.relative_scores()).sum()
        index = (self.ids_N == token).argmax() if self.ranked else self.ids_N.searchsorted(token)
        return float(self.x_N[index] - self.top - np.log(self._mass))

    def step_logprobs(self, token: int, request: tuple[int, tuple[int, ...]]) -> StepLogprobs:
        return logprobs(self.ids_N, self.x_N, token, *request)

    def draw(self, step: PipelineStep, seed: int, step_index: int) -> int:
        """The token that a Draw selects, as in ``reference.select_token``. step_index: step of the noise."""
        stage = step.stage
        if stage.uniforms == "one":
            kept = CandidateList(self.ids_N, self.x_N, ranked=self.ranked).ranked_list()
            u = uniform(seed, step_index, noise.TOKEN)
            return kept.draw_by_cdf(stage, kept.statistics(step.kind.names), u, inexact=self.inexact)[0]
        if stage.uniforms == "none":
            return reference.highest_scoring(stage, self.ids_N, self.relative_scores(), np.zeros(len(self.ids_N)))
        if type(stage).score is not Gumbel.score:  # custom rule
            if self.inexact:
                raise UndecidedRow
            return reference.select_token(stage, self.survivors(), seed, step_index)
        count = (int(self.ids_N.max() if self.ranked else self.ids_N[-1]) // GROUP_SIZE) + 1
        groups_G, mass_G = np.empty(count + GROUP_SIZE, np.int64), np.empty(count + GROUP_SIZE)
        key, counter = np.uint64(seed), np.uint64(step_index)
        token = COMPOSED.gumbel_sample(self.ids_N, self.x_N, self.top, groups_G, mass_G, key, counter)
        if token < 0:
            raise UndecidedRow
        self._mass = mass_G[:count].sum()
        return int(token)

    def draw_by_cdf(self, stage: Any, row: RowStats, u: float, *, inexact: bool) -> tuple[int, bool]:
        """The first token at which the cumulative weight reaches the target, and whether it does."""
        target = float(stage.target(row, u))
        sums_N = np.cumsum(evaluate_rule(stage.weight, self.relative_scores(), row))
        if not target > 0.0 or target != target:  # noqa: PLR0124  # NaN
            raise UndecidedRow
        index = int(np.searchsorted(sums_N, target))
        if inexact:
            require_apart(sums_N[max(index - 1, 0) : index + 1], target, target)
        return int(self.ids_N[min(index, len(sums_N) - 1)]), index < len(sums_N)


def finite_tokens(ids_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """The tokens that are not at -inf. Raises UndecidedRow for a NaN, a +inf, or no finite score."""
    if np.isfinite(x_N.sum()):
        return ids_N, x_N
    if not -np.inf < x_N.max() < np.inf:
        raise UndecidedRow
    finite_N = x_N > -np.inf
    return ids_N[finite_N], x_N[finite_N]


def evaluate_rule(
    rule: Callable[[Any, Any], Any], relative_N: NDArray[Any], row: RowStats, out_N: Floats | None = None
) -> Floats:
    """Evaluate a rule on scores, in blocks. out_N: buffer for the result of more than one block."""
    if len(relative_N) <= BLOCK_SIZE:
        result_N = np.asarray(rule(relative_N, row), np.float64)
        return result_N if result_N.shape == relative_N.shape else np.full(relative_N.shape, result_N)
    result_N = np.empty(len(relative_N)) if out_N is None else out_N
    for start in range(0, len(relative_N), BLOCK_SIZE):
        result_N[start : start + BLOCK_SIZE] = rule(relative_N[start : start + BLOCK_SIZE], row)
    return result_N


def uniform(seed: int, step: int, stream: int) -> float:
    """``philox.uniform`` of index 0, compiled."""
    return float(COMPOSED.uniform(np.uint64(seed), np.uint64(step), stream, 0))
