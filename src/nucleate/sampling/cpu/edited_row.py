"""A row of float32 scores in memory, with edited float64 scores of some tokens; applies Shifts and Scales to it.

Scales are not applied to the scores: a ``Curve`` has them as a polynomial, for sums over the row. The scores that a
decision compares, and bounds of them, are computed by the rules themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import COMPOSED
from nucleate.jit.thread_pool import per_thread
from nucleate.sampling.cpu.candidate_list import UndecidedRow
from nucleate.sampling.history import HistoryView, TokenCounts
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import Floats, Ids, add_values, checked_values
from nucleate.sampling.rules import adds_value, bans_tokens
from nucleate.sampling.stage import RowStats, Shift, TokenInfo

HALVINGS = 140
PROBE = np.concatenate(([0.0], -(2.0 ** np.arange(-HALVINGS, HALVINGS + 1))))
"""Relative scores, at which the scale of a rule is found."""
FITTED = np.array([-1.0, -2.0, -3.0, -0.25, -5.0, -64.0])
"""Relative scores in units of that scale: at the first three a cubic is fitted, at the others it is checked."""
TOLERANCE = 1e-11
"""Relative error of a curve, at most."""
SMALLEST = 1e-13
"""Smaller factors, for the scale of the rule, are rounding errors, or matter only to tokens without a weight."""


class Curve(NamedTuple):
    """``slope * z + second * z**2 + third * z**3`` of z = raw score - maximum: rises to 0 at z = 0."""

    slope: float = 1.0
    second: float = 0.0
    third: float = 0.0

    @property
    def bent(self) -> bool:
        """Whether it is not a line."""
        return self.second != 0.0 or self.third != 0.0

    def at(self, z: Any) -> Any:
        """The relative score of relative raw scores. Those at -inf may be NaN."""
        return ((self.third * z + self.second) * z + self.slope) * z if self.bent else z * self.slope

    def times(self, factor: float) -> Curve:
        """The curve after a linear Scale."""
        return Curve(self.slope * factor, self.second * factor, self.third * factor)

    def after(self, slope: float) -> Curve:
        """This curve of ``slope * z``."""
        return Curve(self.slope * slope, self.second * slope**2, self.third * slope**3)

    def shifted(self, z: float) -> Curve:
        """The curve relative to another maximum, which is at z."""
        slope = self.slope + (2.0 * self.second + 3.0 * self.third * z) * z
        return Curve(slope, self.second + 3.0 * self.third * z, self.third)


def fitted(rule: Callable[[Any, RowStats], Any], row: RowStats) -> Curve | None:
    """The cubic through the scores that a monotone rule returns; None if there is none, or if it is too steep."""
    fall_N = -np.asarray(rule(PROBE, row), np.float64)
    place = int((fall_N >= 1.0).argmax())
    if fall_N[0] != 0.0 or not 1.0 <= fall_N[place] < 1e3:
        return None
    unit = -float(PROBE[place])
    expected = np.asarray(rule(unit * FITTED, row))
    one, two, three = expected[:3].tolist()
    factors = (
        -3.0 * one + 1.5 * two - three / 3.0,
        -2.5 * one + 2.0 * two - 0.5 * three,
        -0.5 * one + 0.5 * two - three / 6.0,
    )
    curve = Curve(*(0.0 if abs(factor) < SMALLEST else factor for factor in factors))
    if not (curve.slope >= 0.0 >= curve.second and curve.third >= 0.0):  # it might rise again, far away
        return None
    if not (np.abs(curve.at(FITTED) - expected) <= TOLERANCE * (np.abs(expected) + 1.0)).all():
        return None
    return curve.after(1.0 / unit)


LOWEST = np.finfo(np.float32).min
NO_IDS, NO_SCORES, NO_ROW = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.float32)
BINS, BINS_PER_UNIT = 4096, 128.0
"""Bins of a histogram of scores, and bins per unit of score."""


class RowWorkspace:
    """Reusable buffers for rows of one size V. Call ``reset`` before each row."""

    def __init__(self, size: int) -> None:
        self.size, self.groups = size, -(-size // GROUP_SIZE)
        self.keys = np.empty(self.groups * GROUP_SIZE, np.int64)
        self.bins = np.empty(self.groups * GROUP_SIZE, np.uint16)
        self.histogram, self.bin_weights = np.empty((2, BINS)), np.empty((2, GROUP_SIZE))
        self.scratch_V, self.race = np.empty(size), np.empty((3, max(self.groups, 2)))
        self.ids = np.arange(size)  #: read-only
        self._rows: list[NDArray[np.float32]] = []
        self._used = 0

    def reset(self) -> None:
        """Make all row buffers available again."""
        self._used = 0

    def new_row(self) -> NDArray[np.float32]:
        """An unused row buffer."""
        if self._used == len(self._rows):
            self._rows.append(np.empty(self.size, np.float32))
        self._used += 1
        return self._rows[self._used - 1]

    def as_float32(self, logits_V: NDArray[Any]) -> NDArray[np.float32]:
        """The row as float32, contiguous, aligned and writeable; a copy only if needed."""
        row_V = np.asarray(logits_V, np.float32)
        flags = row_V.flags
        if flags.c_contiguous and flags.writeable and flags.aligned:
            return row_V
        copy_V = self.new_row()
        copy_V[:] = row_V
        return copy_V


thread_workspace = per_thread(RowWorkspace)
"""The cached workspace of the calling thread for rows of a size."""


class EditedRow:
    """A row with edits. Raises UndecidedRow if no token can be sampled.

    row_V: float32, contiguous, aligned, writeable, with edited tokens at -inf. ids_K, x_K: edited tokens with finite
    scores, in ascending order of ids.
    """

    def __init__(
        self, work: RowWorkspace, row_V: NDArray[np.float32], ids_K: Ids = NO_IDS, x_K: Floats = NO_SCORES
    ) -> None:
        self.work, self.row_V, self.ids_K, self.x_K = work, row_V, ids_K, x_K
        self.maxima_G, self._tail = np.empty(work.groups, np.float32), np.empty(GROUP_SIZE, np.float32)
        top = float(COMPOSED.group_maxima(row_V, self._tail, self.maxima_G))
        self.top = max(top, float(x_K.max())) if len(x_K) else top  #: the maximum score
        if not (-np.inf < self.top < np.inf and top < np.inf):
            raise UndecidedRow

    def equals(self, other: EditedRow) -> bool:
        """Whether all scores are equal."""
        return np.array_equal(self.row_V, other.row_V) and np.array_equal(self.x_K, other.x_K)

    def scores(self, ids_N: Ids) -> Floats:
        """The scores of some tokens."""
        x_N = self.row_V[ids_N].astype(np.float64)
        if len(self.ids_K):
            place_N = np.minimum(np.searchsorted(self.ids_K, ids_N), len(self.ids_K) - 1)
            x_N = np.where(self.ids_K[place_N] == ids_N, self.x_K[place_N], x_N)
        return x_N

    def mass_sums(self, curve: Curve, masses_G: Floats) -> Floats:
        """Sums of e, e * d and e * e over the row; fills masses_G with sums of e. See ``row_kernels.group_masses``."""
        sums = np.empty(3)
        COMPOSED.group_masses(self.row_V, self._tail, self.top, *curve, masses_G, sums)
        if len(self.ids_K):
            d_K = np.maximum(curve.at(self.x_K - self.top), -700.0)
            e_K = np.exp(d_K)
            np.add.at(masses_G, self.ids_K // GROUP_SIZE, e_K)
            sums += e_K.sum(), (e_K * d_K).sum(), (e_K * e_K).sum()
        return sums

    def winning_group(self, curve: Curve, seed: np.uint64, step: np.uint64) -> int:
        """The group that wins the Gumbel draw; -1 if two are too close. See ``row_kernels.race_groups``."""
        more_G = self.work.race[0]
        more_G.fill(0.0)
        if len(self.ids_K):
            np.add.at(more_G, self.ids_K // GROUP_SIZE, np.exp(curve.at(self.x_K - self.top)))
        return int(
            COMPOSED.race_groups(self.row_V, self._tail, self.maxima_G, self.top, *curve, self.work.race, seed, step)
        )

    def count(self) -> int:
        """The number of finite scores."""
        return int(np.count_nonzero(self.row_V > -np.inf)) + len(self.ids_K)

    def moments(self, origin: np.float32) -> tuple[int, float, float]:
        """The number of finite scores, and the sums of x - origin and of its square."""
        sums, d_K = np.empty(3), self.x_K - origin
        COMPOSED.moments(self.row_V, self._tail, self.work.groups, origin, sums)
        return int(sums[0]) + len(d_K), float(sums[1] + d_K.sum()), float(sums[2] + (d_K * d_K).sum())

    def ranked(self, threshold: np.float32) -> tuple[Ids, Floats]:
        """The tokens at or above a score, ranked, and their scores. LOWEST selects all finite ones."""
        work, threshold = self.work, max(threshold, LOWEST)
        keys_N = work.keys[: COMPOSED.ranking_keys(self.row_V, self._tail, self.maxima_G, threshold, work.keys)]
        keys_N.sort()
        ids_N = keys_N & 0xFFFFFFFF
        x_N = self.row_V[ids_N].astype(np.float64)
        if not len(self.ids_K):
            return ids_N, x_N
        high_K = self.x_K >= (threshold if threshold > LOWEST else -np.inf)
        return merge_ranked(ids_N, x_N, self.ids_K[high_K], self.x_K[high_K])

    def kth_bound(self, k: int) -> np.float32:
        """A score that at least k tokens reach, or all finite ones."""
        k = min(k, self.work.size)
        maxima_G = (self.maxima_G if k <= len(self.maxima_G) // 2 else self.row_V).copy()
        maxima_G.partition(len(maxima_G) - k)
        threshold: np.float32 = maxima_G[len(maxima_G) - k]
        return threshold

    def count_ahead(self, token: int, score: float) -> int:
        """The number of tokens that rank before one with a score."""
        near = np.float32(score)
        higher_V = self.row_V >= near if float(near) > score else self.row_V > near
        count = np.count_nonzero(higher_V) + np.count_nonzero(self.x_K > score)
        if float(near) == score:
            count += np.count_nonzero(self.row_V[:token] == near)
        return int(count + np.count_nonzero((self.x_K == score) & (self.ids_K < token)))

    def _not_in(self, ids_N: Ids) -> NDArray[np.bool_]:
        """A mask of the edited tokens that are not in a list."""
        return np.isin(self.ids_K, ids_N, invert=True) if len(self.ids_K) else np.zeros(0, bool)

    def without(self, dropped_N: Ids) -> EditedRow:
        """The row without some tokens."""
        return self.with_scores(dropped_N, np.full(len(dropped_N), -np.inf))

    def at_least(self, lowest: np.float32, highest: np.float32, keeps: Callable[[Ids], NDArray[np.bool_]]) -> EditedRow:
        """The row without scores below ``lowest``. keeps: which tokens, edited or with scores up to highest, are kept.

        The same object if all tokens are kept.
        """
        row_V, ids_N = self.work.new_row(), self.work.keys
        above = np.nextafter(highest, np.float32(np.inf))
        lowest = max(lowest, LOWEST)  # the padding of the tail is not listed
        count = COMPOSED.keep_at_least(self.row_V, self._tail, lowest, above, row_V, ids_N)
        if count < 0:
            return self
        ids_N = np.concatenate((ids_N[:count], self.ids_K))
        dropped_N = ids_N[~keeps(ids_N)]
        kept_K = self._not_in(dropped_N)
        row_V[dropped_N] = -np.inf
        return EditedRow(self.work, row_V, self.ids_K[kept_K], self.x_K[kept_K])

    def with_scores(self, ids_K: Ids, x_K: Floats) -> EditedRow:
        """The row with new scores for some tokens; -inf removes a token."""
        row_V, kept_K, inside_K = self.work.new_row(), self._not_in(ids_K), x_K > -np.inf
        np.copyto(row_V, self.row_V)
        row_V[ids_K] = -np.inf
        ids_K = np.concatenate((self.ids_K[kept_K], ids_K[inside_K]))
        x_K = np.concatenate((self.x_K[kept_K], x_K[inside_K]))
        order_K = np.argsort(ids_K)
        return EditedRow(self.work, row_V, ids_K[order_K], x_K[order_K])

    def binned_masses(self, slope: float, masses_G: Floats, rows: int) -> Floats:
        """``mass_sums`` of an unedited row, with a histogram in the workspace; see ``row_kernels.binned_masses``."""
        sums, work = np.empty(3), self.work
        COMPOSED.binned_masses(
            *(self.row_V, self._tail, self.top, slope, BINS_PER_UNIT),
            *(work.bins, work.bin_weights, work.histogram, rows, masses_G, sums),
        )
        return sums

    def split_bins(self, kept: range, listed: range, *, copy: bool) -> tuple[NDArray[np.float32], Ids]:
        """A new row with the tokens of some bins, if it is needed, and the ids in the other listed bins."""
        work, row_V = self.work, self.work.new_row() if copy else NO_ROW
        edges = kept.start, kept.stop, listed.start, listed.stop
        count = COMPOSED.split_bins(self.row_V, work.bins, *edges, row_V, work.keys)
        return row_V, work.keys[:count].copy()

    def keep_only(self, ids_K: Ids) -> EditedRow:
        """The row with only the listed tokens."""
        row_V, kept_K = self.work.new_row(), ~self._not_in(ids_K)
        row_V.fill(-np.inf)
        row_V[ids_K] = self.row_V[ids_K]
        return EditedRow(self.work, row_V, self.ids_K[kept_K], self.x_K[kept_K])

    def with_mask(self, words_W: NDArray[np.int32]) -> EditedRow:
        """The row without the tokens whose bit is 0."""
        row_V = self.work.new_row()
        np.copyto(row_V, self.row_V)
        COMPOSED.apply_token_bitmask(row_V, words_W)
        kept_K = (words_W[self.ids_K >> 5] >> (self.ids_K & 31)) & 1 == 1
        return EditedRow(self.work, row_V, self.ids_K[kept_K], self.x_K[kept_K])


def merge_ranked(ids_N: Ids, x_N: Floats, ids_K: Ids, x_K: Floats) -> tuple[Ids, Floats]:
    """Merge tokens (ids_K, x_K) into a ranked list (ids_N, x_N)."""
    order_K = np.lexsort((ids_K, -x_K))
    ids_K, x_K = ids_K[order_K], x_K[order_K]
    at_K, end_K = np.searchsorted(-x_N, -x_K), np.searchsorted(-x_N, -x_K, side="right")
    for i in np.flatnonzero(end_K > at_K):  # equal scores: by id
        at_K[i] += np.searchsorted(ids_N[at_K[i] : end_K[i]], ids_K[i])
    return np.insert(ids_N, at_K, ids_K), np.insert(x_N, at_K, x_K)


def apply_shift(row: EditedRow, stage: Shift, past: HistoryView) -> EditedRow:
    """The row after a Shift; the same object if no score changes. Raises UndecidedRow."""
    match stage.touches:
        case "seen" | "output":
            counts = past.counts(stage.window)
            if stage.touches == "output":
                counts = TokenCounts(*(column[counts.output_K > 0] for column in counts))
            return _apply_rule(row, stage, counts.ids_K, counts.prompt_K, counts.output_K, 0.0)
        case "listed":
            ids_K, listed_K = _listing_arrays(past.listing(stage), row.work.size)
            return _apply_rule(row, stage, ids_K, *_listed_counts(past, stage, ids_K), listed_K)
        case "unlisted" if bans_tokens(stage):
            return row.keep_only(_listing_arrays(past.listing(stage), row.work.size)[0])
        case "all":
            return _apply_to_all(row, stage, past)
        case "masked" if past.mask is None:
            return row
        case "masked" if bans_tokens(stage):
            return row.with_mask(np.ascontiguousarray(past.mask, np.int32))
    raise UndecidedRow  # a custom rule over most of the vocabulary


def _apply_rule(row: EditedRow, stage: Shift, ids_K: Ids, prompt_K: Any, output_K: Any, listed_K: Any) -> EditedRow:
    x_K = row.scores(ids_K)
    new_K = np.broadcast_to(stage.apply(x_K, TokenInfo(ids_K, prompt_K, output_K, listed_K)), x_K.shape)
    changed_K = (x_K > -np.inf) & (new_K != x_K)
    if not changed_K.any():
        return row
    new_K = new_K[changed_K]
    if not new_K.max() < np.inf:  # a NaN or +inf
        raise UndecidedRow
    return row.with_scores(ids_K[changed_K], new_K)


def _apply_to_all(row: EditedRow, stage: Shift, past: HistoryView) -> EditedRow:
    """The row after a Shift that changes all tokens; its scores are rounded to float32."""
    work, new_V = row.work, row.work.new_row()
    if adds_value(stage) and not len(row.ids_K):
        add_values(row.row_V, stage, past, new_V)
        x_K: Any = NO_SCORES
    else:
        values: Any = checked_values(stage, past.values(stage, work.size), work.size)
        ids_K, prompt_K, output_K = past.counts(stage.window)
        (prompt_V, output_V), value_V = np.zeros((2, work.size)), np.broadcast_to(values, work.size)
        prompt_V[ids_K], output_V[ids_K] = prompt_K, output_K
        new_V[:] = stage.apply(row.row_V.astype(np.float64), TokenInfo(work.ids, prompt_V, output_V, 0.0, value_V))
        new_V[row.row_V == -np.inf] = -np.inf
        at_K = row.ids_K
        x_K = stage.apply(row.x_K, TokenInfo(at_K, prompt_V[at_K], output_V[at_K], 0.0, value_V[at_K]))
    new_V[row.ids_K] = x_K
    return EditedRow(work, new_V)


def _listing_arrays(listing: Mapping[int, float], size: int) -> tuple[Ids, Floats]:
    """A listing as arrays. Raises UndecidedRow for ids outside the vocabulary: the reference reports them."""
    ids_K = np.fromiter(listing, np.int64, len(listing))
    if len(ids_K) and not 0 <= ids_K.min() <= ids_K.max() < size:
        raise UndecidedRow
    return ids_K, np.fromiter(listing.values(), np.float64, len(listing))


def _listed_counts(past: HistoryView, stage: Shift, ids_K: Ids) -> tuple[Any, Any]:
    """Prompt and output counts of listed tokens; zeros unless the rule reads them."""
    if not {"prompt_count", "output_count"} & set(type(stage).apply.__code__.co_names):
        return 0.0, 0.0
    counts = past.counts(stage.window)
    index = {token: i for i, token in enumerate(counts.ids_K.tolist())}
    found = [index.get(token, -1) for token in ids_K.tolist()]
    return np.append(counts.prompt_K, 0)[found], np.append(counts.output_K, 0)[found]
