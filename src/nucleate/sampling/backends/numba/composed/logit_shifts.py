"""Applies Shifts to a row: evaluates their rules on the tokens that they touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nucleate.sampling.backends.numba.composed.candidate_list import Floats, Ids, UndecidedRow
from nucleate.sampling.backends.numba.composed.edited_row import EditedRow
from nucleate.sampling.dispatch.rules import bans
from nucleate.sampling.history import HistoryView, TokenCounts
from nucleate.sampling.stage import Shift, TokenInfo


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
        case "unlisted" if bans(stage):
            return row.keep_only(_listing_arrays(past.listing(stage), row.work.size)[0])
        case "masked" if past.mask is None:
            return row
        case "masked" if bans(stage):
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
